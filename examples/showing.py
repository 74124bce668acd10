"""Output of the examples: a progress bar, curves of the loss, a Chrome trace."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler

from pycomm import hooks

LINES = 10  # number of lines that print the loss
TRACED = 5  # number of steps in the trace
STEP = "step"


class Screen:
    """The progress bar, and sometimes a line with the loss; silent on all ranks but 0."""

    def __init__(self, title: str, steps: int, rank: int) -> None:
        from rich import progress

        self._active = rank == 0
        self._line_every = steps / LINES
        self._next_line = 0.0
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


class Tracer:
    """Records the last steps of a training as a Chrome trace, exchanges included.

    The profiler does not see the exchanges, because they run on the group's worker outside of
    torch. Their times are by the monotonic clock. At the start of every step this clock is read and
    the profiler records an event by its own clock, which aligns the two clocks.
    """

    def __init__(self, path: str | None, steps: int) -> None:
        self._path = path
        self._first = steps - TRACED + 1
        self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        self._begins: list[float] = []
        self._exchanges: list[tuple[int, float, float]] = []

    @contextmanager
    def step(self, number: int, state: hooks.CommState | hooks.LocalSGDState) -> Iterator[None]:
        """Surrounds a step."""
        if self._path is None or number < self._first:
            yield
            return
        if not self._begins:
            self._profile.start()
        with profiler.record_function(STEP):
            self._begins.append(time.perf_counter())
            yield
        self._exchanges += state.intervals()

    def close(self) -> None:
        """Writes the trace."""
        if self._path is None:
            return
        self._profile.stop()
        path = Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(self._path)
        trace = json.loads(path.read_text())
        trace["traceEvents"] += self._exchange_events(trace["traceEvents"])
        path.write_text(json.dumps(trace))

    def _exchange_events(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Events that show every exchange on a separate line, the worker's."""
        steps = [event for event in events if event.get("name") == STEP]
        pairs = zip(steps, self._begins, strict=True)
        ahead = statistics.median(step["ts"] - 1e6 * begin for step, begin in pairs)
        worker = {"pid": steps[0]["pid"], "tid": 1}
        name = {"ph": "M", "name": "thread_name", "args": {"name": "pycomm's worker"}, **worker}
        return [name] + [
            {
                "ph": "X",
                "cat": "pycomm",
                "name": "pycomm::exchange",
                "ts": 1e6 * begin + ahead,
                "dur": 1e6 * (end - begin),
                "args": {"bytes": nbytes},
                **worker,
            }
            for nbytes, begin, end in self._exchanges
        ]
