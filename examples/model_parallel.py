"""What fsdp.py, tensor_parallel.py and pipeline.py share: text, progress, and who waits when.

On GPUs, NCCL runs the collectives and messages; pictures are of the CPU's only.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from devices import CPU, DTYPES, add_device, add_dtype, count, device_of
from showing import Screen
from torch import profiler
from torch.nn import functional
from train_lm import BATCH, CONTEXT, OUT, draw_batch, read_corpus

from pycomm.bench import launch

TRACED = 5  # steps that the profiler records; of these the last ones are drawn
DRAWN = 2
STEP, SEND, RECEIVE = "step", "pycomm:send", "pycomm:recv"
COLOURS = {"compute": "#0072B2", "communicate": "#D55E00", "wait": "#DDDDDD"}

# nn.Linear returns a view of its result, which nobody overwrites here.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Passages of real text and the characters to predict, the same on every rank."""
    corpus, random = read_corpus(0, 1), torch.Generator().manual_seed(0)
    while True:
        yield draw_batch(corpus, random)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next characters."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum. `foreach` would mix DTensors with plain tensors, which torch refuses."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, foreach=False)


class Interval(NamedTuple):
    """A time in which an operation runs, in seconds by the monotonic clock."""

    name: str
    begin: float
    end: float


class Log:
    """Collects losses, shows progress on rank 0, and draws the last steps.

    Args:
        title: of the progress bar and the picture.
        steps: the number of steps.
        plot: file for the picture, a PNG; None for none.
        device: of the batches.

    Attributes:
        losses: the loss of each step.
    """

    def __init__(
        self, title: str, steps: int, plot: str | None = None, device: torch.device = CPU
    ) -> None:
        self.losses: list[float] = []
        self._title, self._steps, self._device = title, steps, device
        self._plot = plot if device == CPU else None  # the profiler would record launches
        self._screen = Screen(title, steps, dist.get_rank())
        self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        self._begins: list[float] = []
        self._start = time.perf_counter()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A batch for every step."""
        for _, (inputs, targets) in zip(range(self._steps), batches(), strict=False):
            yield inputs.to(self._device), targets.to(self._device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step."""
        left = self._steps - len(self.losses)
        if self._plot is None or left > TRACED:
            yield
            return
        if not self._begins:
            self._profile.start()
        with profiler.record_function(STEP):
            self._begins.append(time.perf_counter())
            yield

    def add(self, loss: torch.Tensor) -> None:
        """Records the loss of a step, which is the same on every rank."""
        self.losses.append(loss.item())
        step, seconds = len(self.losses), time.perf_counter() - self._start
        self._screen.show(step, self.losses[-1], step * BATCH * CONTEXT / seconds)

    def close(self) -> None:
        """Draws the picture and leaves the terminal as it was."""
        self._screen.close()
        if self._plot is None:
            return
        self._profile.stop()
        everyone: list[list[Interval]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self._intervals())
        if dist.get_rank() == 0:
            draw(self._plot, self._title, everyone)
            print(f"drawn in {self._plot}")

    def _intervals(self) -> list[Interval]:
        """The steps, and pycomm's operations, by a clock that all ranks share."""
        events = list(self._profile.events() or [])  # type: ignore[no-untyped-call]
        events.sort(key=lambda event: event.time_range.start)
        steps = [event for event in events if event.name == STEP]
        pairs = zip(steps, self._begins, strict=True)
        ahead = statistics.median(step.time_range.start - 1e6 * begin for step, begin in pairs)
        return [
            Interval(
                event.name,
                (event.time_range.start - ahead) / 1e6,
                (event.time_range.end - ahead) / 1e6,
            )
            for event in events
            if event.name == STEP or event.name.startswith("pycomm:")
        ]


def times_of(everyone: list[list[Interval]]) -> list[list[tuple[float, float, float]]]:
    """For each operation of each rank: its begin, when all its data was there, and its end.

    A collective can move data when the last rank has begun it, a receive when another rank has
    begun to send. Sends run beside computation and are left out.
    """
    collectives = [[i for i in rank if i.name not in (STEP, SEND, RECEIVE)] for rank in everyone]
    complete = [max(i.begin for i in same) for same in zip(*collectives, strict=True)]
    found = []
    for rank in everyone:
        sends = [
            i.begin for other in everyone if other is not rank for i in other if i.name == SEND
        ]
        last_begin = iter(complete)
        times = []
        for name, begin, end in rank:
            if name == RECEIVE:
                there = max((sent for sent in sends if sent <= end), default=begin)
            elif name in (STEP, SEND):
                continue
            else:
                there = next(last_begin)
            times.append((begin, min(max(there, begin), end), end))
        found.append(times)
    return found


def pieces_of(
    begin: float, end: float, times: list[tuple[float, float, float]]
) -> list[tuple[str, float, float]]:
    """Cuts a rank's time into computing, waiting and communicating: (kind, begin, end)."""
    pieces, now = [], begin
    for start, there, stop in times:
        if now < stop and start < end:
            start, there = max(start, now), max(there, now)
            pieces += [
                ("compute", now, start),
                ("wait", start, there),
                ("communicate", there, stop),
            ]
            now = stop
    return [*pieces, ("compute", now, max(now, end))]


def draw(path: str, title: str, everyone: list[list[Interval]]) -> None:
    """Writes a PNG with a time line of the last steps for each rank."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    steps = [[i for i in rank if i.name == STEP][-DRAWN:] for rank in everyone]
    first, last = min(rank[0].begin for rank in steps), max(rank[-1].end for rank in steps)
    length = 1e3 * (last - first)
    figure, panel = plt.subplots(figsize=(10, 1.2 + 0.75 * len(everyone)), layout="constrained")
    for row, times in enumerate(times_of(everyone)):
        spent = dict.fromkeys(COLOURS, 0.0)
        for kind, begin, end in pieces_of(steps[row][0].begin, steps[row][-1].end, times):
            spent[kind] += end - begin
            span = (1e3 * (begin - first), 1e3 * (end - begin))
            panel.broken_barh([span], (row - 0.38, 0.76), color=COLOURS[kind], linewidth=0)
        total = sum(spent.values())
        shares = [f"{kind} {100 * share / total:.0f} %" for kind, share in spent.items()]
        panel.text(1.01 * length, row, "\n".join(shares), va="center", fontsize=9)
    panel.set_title(f"{title}: the last {DRAWN} steps", loc="left", fontsize=11)
    panel.set(xlabel="ms", xlim=(0, length), ylim=(len(everyone) - 0.5, -0.5))
    panel.set_yticks(range(len(everyone)), [f"rank {row}" for row in range(len(everyone))])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(left=False)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    panel.legend(
        handles=patches, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
    )  # fmt: skip
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser_of(script: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that all three examples have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    add, plot = parser.add_argument, OUT / f"{Path(script).stem}.png"
    add("--ranks", type=count, default=2, help="processes to start without torchrun (default 2)")
    add("--steps", type=count, default=300, help="training steps (default 300)")
    add("--plot", default=str(plot), help="who waits when, as a PNG (default %(default)s)")
    add_device(parser)
    add_dtype(parser)
    return parser


def run(train: Callable[..., Log], arguments: argparse.Namespace, *more: str) -> None:
    """Calls ``train(steps, plot, device, *more)`` on every rank of a group."""
    launch.require("rich", "matplotlib")
    device_of(arguments.device, 0)  # raises here, rather than in every process
    place = arguments.device, arguments.dtype
    launch.run(
        run_rank, train, *place, arguments.steps, arguments.plot, *more,
        ranks=arguments.ranks, backend="pycomm",
    )  # fmt: skip


def run_rank(
    train: Callable[..., Log], device: str, dtype: str, steps: int, plot: str, *more: str
) -> None:
    """Trains on one rank."""
    torch.set_default_dtype(DTYPES[dtype])
    train(steps, plot, device_of(device, dist.get_rank()), *more)
