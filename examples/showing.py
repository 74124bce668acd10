"""Output of the examples: a progress bar, curves of the loss."""

from __future__ import annotations

from pathlib import Path

LINES = 2  # number of lines that print the loss


class Screen:
    """The progress bar, and sometimes a line with the loss; silent on all ranks but 0."""

    def __init__(self, title: str, steps: int, rank: int) -> None:
        from rich import progress

        self._active = rank == 0
        self._line_every = steps / LINES
        self._next_line = self._line_every
        self._bar = progress.Progress(
            progress.TextColumn(title),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s"),
            progress.TimeRemainingColumn(),
            disable=not self._active,
        )
        self._task = self._bar.add_task("", total=steps, loss=float("nan"), rate=0.0)
        self._bar.start()

    def show(self, step: int, loss: float, rate: float) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step, loss=loss, rate=rate)
        if self._active and step >= self._next_line:
            self._next_line += self._line_every
            self._bar.console.print(f"step {step:5}  loss {loss:.3f}", highlight=False)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._bar.stop()


def draw_losses(path: str, curves: dict[str, list[float]], every: int) -> None:
    """Writes a PNG with a curve per training.

    Args:
        path: of the PNG; its folder is made.
        curves: losses under what to call them.
        every: steps from one loss to the next.
    """
    from matplotlib import pyplot as plt

    from pycomm.bench.plot import OURS

    figure, panel = plt.subplots(figsize=(8, 5), layout="constrained")
    width = 3.0  # each curve is thinner, as it may hide another
    for colour, (label, losses) in zip(OURS, curves.items(), strict=False):
        steps = [every * (i + 1) for i in range(len(losses))]
        panel.plot(steps, losses, label=label, color=colour, linewidth=width)
        width *= 0.5
    panel.set(
        xlabel="step", ylabel="training loss", title="A small transformer on Python's sources"
    )
    panel.grid(color="#DDDDDD", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
