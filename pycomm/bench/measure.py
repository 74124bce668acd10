"""Measures times.

On a shared machine the noise can last for minutes, so a single time says little, but a ratio of
times taken side by side says much. So all contestants of a case run in interleaved rounds: in every
round each has one block of calls, in an order that rotates. The figures are medians.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench.report import Settings

ROUNDS = 7
# Bounds of the calls per contestant and case; within them, as many as fit into the budget.
BUDGET_S = 0.25
FEWEST, MOST = 21, 7000
PILOT_CALLS = 5


@dataclass(frozen=True)
class Prepared:
    """A contestant that is ready to run.

    Attributes:
        source: receives the input; its device is where the call works.
        result: holds the output after a call; may be `source` itself.
        call: runs what is timed once, through the API that users call.
        data: the values that `source` gets before each sample, as backward writes new gradients;
            None if it keeps its values.
        residual: the tensor in which `call` keeps what compression loses.
    """

    source: torch.Tensor
    result: torch.Tensor
    call: Callable[[], object]
    data: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def rewrite(self) -> None:
        """Writes the input."""
        if self.data is not None:
            self.source.copy_(self.data)


@dataclass(frozen=True)
class Figures:
    """A contestant's times for one call, in microseconds.

    A sample is the time of one call on the slowest rank. Before it, every rank writes its input
    anew, and all ranks meet at a barrier.

    Attributes:
        time_us: for each round, the mean over the middle half of its samples, which preemption
            does not affect; then the median over rounds.
        p50_us: the median over all samples.
        p95_us: the 95th percentile over all samples.
        p99_us: the 99th percentile over all samples.
        max_us: the longest sample.
        iterations: the number of samples.
    """

    time_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    iterations: int

    def columns(self, without_us: float = 0.0) -> dict[str, Any]:
        """The fields of a :class:`pycomm.bench.report.TimedRow`.

        Args:
            without_us: subtracted from all times.
        """
        times = {name: value for name, value in vars(self).items() if name.endswith("_us")}
        return {"iterations": self.iterations} | {
            name: round(value - without_us, 3) for name, value in times.items()
        }


def compete(
    group: pycomm.Group | None,
    contestants: Mapping[str, Callable[[], object] | Prepared],
    settings: Settings,
    device: str = "cpu",
) -> dict[str, Figures]:
    """Times calls by name; see :func:`interleave`. The calls get no new input."""
    nothing = torch.empty(0, device=device)
    runs = [
        run if isinstance(run, Prepared) else Prepared(nothing, nothing, run)
        for run in contestants.values()
    ]
    figures = interleave(group, runs, settings.iters, settings.warmup_iters)
    return dict(zip(contestants, figures, strict=True))


def interleave(
    group: pycomm.Group | None,
    runs: list[Prepared],
    iters: int | None = None,
    warmup_iters: int | None = None,
) -> list[Figures]:
    """Times every contestant of a case; all ranks call it together.

    Args:
        group: synchronises the ranks between blocks; None if a process measures alone.
        runs: the contestants, ready to run.
        iters: calls of each over all rounds; by default as many as fit into a fixed time.
        warmup_iters: untimed calls before each block; by default a tenth of the block.
    """
    gc.disable()
    counts = fitting(group, runs) if iters is None else [iters] * len(runs)
    blocks = [_split(count) for count in counts]
    samples: list[list[list[int]]] = [[] for _ in runs]
    for number in range(len(blocks[0])):
        for offset in range(len(runs)):
            index = (number + offset) % len(runs)
            calls = blocks[index][number]
            warmup = calls // 10 + 1 if warmup_iters is None else warmup_iters
            samples[index].append(_block(group, runs[index], warmup, calls))
    gc.enable()
    return _figures(group, samples)


def _split(calls: int) -> list[int]:
    """Splits calls into rounds as evenly as possible."""
    rounds = min(ROUNDS, calls)
    return [calls * (i + 1) // rounds - calls * i // rounds for i in range(rounds)]


def barrier_us(group: pycomm.Group, calls: int = 2000) -> float:
    """The median time of a barrier, which shows how close the ranks' cores are to each other."""
    nothing = torch.empty(0)
    run = Prepared(nothing, nothing, lambda: pycomm.barrier(group=group))
    return _figures(group, [[_block(group, run, calls // 10, calls)]])[0].p50_us


def fitting(group: pycomm.Group | None, runs: Sequence[Prepared]) -> list[int]:
    """The calls of each contestant that fit into the budget: the same numbers on every rank."""
    pilots = [min(_block(group, run, PILOT_CALLS, PILOT_CALLS)) for run in runs]
    return [min(max(int(BUDGET_S * 1e9 / ns), FEWEST), MOST) for ns in _slowest(group, pilots)]


def _slowest(group: pycomm.Group | None, samples: list[int]) -> list[int]:
    """The slowest rank's samples."""
    if group is None:
        return samples
    times = torch.tensor(samples)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def _block(group: pycomm.Group | None, run: Prepared, warmup: int, calls: int) -> list[int]:
    """Nanoseconds of each call in a sequence, on this rank."""
    device, clock = run.source.device.type, time.perf_counter_ns
    call, rewrite = (synchronised(each, device) for each in (run.call, run.rewrite))

    def sample() -> int:
        rewrite()
        if group is not None:
            pycomm.barrier(group=group)
        begin = clock()
        call()
        return clock() - begin

    for _ in range(warmup):
        sample()
    return [sample() for _ in range(calls)]


def synchronised(function: Callable[[], object], device: str) -> Callable[[], object]:
    """The function, whose work on the device is complete when it returns."""
    if device == "cpu":
        return function

    def call() -> None:
        function()
        torch.cuda.synchronize()

    return call


def _figures(group: pycomm.Group | None, samples: list[list[list[int]]]) -> list[Figures]:
    """The figures of every contestant, from its samples per round; the same on all ranks."""
    return [summarise([_slowest(group, block) for block in rounds], 1e3) for rounds in samples]


def summarise(rounds: Sequence[Sequence[float]], unit: float) -> Figures:
    """The figures of samples of which `unit` make a microsecond."""
    ordered = sorted(itertools.chain.from_iterable(rounds))
    return Figures(
        time_us=statistics.median(map(middle_mean, rounds)) / unit,
        p50_us=percentile(ordered, 0.5) / unit,
        p95_us=percentile(ordered, 0.95) / unit,
        p99_us=percentile(ordered, 0.99) / unit,
        max_us=ordered[-1] / unit,
        iterations=len(ordered),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of the sorted samples do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def middle_mean(samples: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter."""
    quarter = len(samples) // 4
    return statistics.fmean(sorted(samples)[quarter : len(samples) - quarter])
