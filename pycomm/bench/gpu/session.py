"""Measures speed on a GPU as shares of its copy bandwidth, compared with torch and with goals.

``python -m pycomm.bench gpu -J FILE``. Method and results: docs/lab/performance.md.
"""

from __future__ import annotations

import gc
import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from pycomm._runtime.torch_private import keep_device_busy
from pycomm.bench.gpu import ranks
from pycomm.bench.gpu.cases import (
    CODEC_SIZES,
    RULE_BYTES,
    STEP_SIZES,
    STEPS,
    Call,
    KernelCase,
    extreme_cases,
    int8_cases,
    rule_cases,
    small_tensor_cases,
    step_cases,
    stream_cases,
    topk_cases,
)
from pycomm.bench.gpu.machine import gpu, missing
from pycomm.bench.measure import percentile, summarise
from pycomm.bench.optimizers import OPTIMIZERS
from pycomm.bench.report import MIB, Column, Results, Settings, TimedRow, cell, spread
from pycomm.bench.streams import Mix, streams

# The device waits this long (1 ms) before every timed call, so that the host can run ahead.
HEAD_START_CYCLES = 2_000_000
WARM_UP = 3
ROUNDS = 51
COPY = "copy"
LEAST_COPIED = 256 * MIB  # several times any L2

Cases = Callable[[], AbstractContextManager[list[KernelCase]]]


@dataclass(frozen=True, kw_only=True)
class GpuSettings(Settings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench gpu -h``.

    Attributes:
        only: the sets to measure.
        check: 0 leaves out the checks of results.
    """

    only: tuple[str, ...]
    check: int = 1


@dataclass(frozen=True)
class KernelRow(TimedRow):
    """One case, whose time is the median.

    Attributes:
        bytes: bytes that it must read from and write to device memory.
        share: `floor_us` divided by `time_us`.
        data_bytes: bytes of the tensors that it works on.
        floor_us: the time of a copy of `bytes` bytes in the same rounds.
        p10_us: a tenth of the samples takes at most this time.
        wrong: the number of wrong elements; None if only tests check the results.
        base: the name of the row with which `over` compares: `over` is this time divided by its.
        peer: another way to compute the same; `peer_ratio` is its time divided by ours.
        goals: the goals, each with the figure that was reached.
    """

    name: str
    bytes: int
    share: float
    data_bytes: int
    floor_us: float
    p10_us: float
    wrong: int | None
    base: str | None = None
    over: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    peer_ratio: float | None = None
    goals: dict[str, bool] = field(default_factory=dict)

    columns: ClassVar[tuple[Column, ...]] = (
        Column("  name", "", -44, cell("name")),
        Column("data", "(MiB)", 9, cell("data_bytes", ".2f", MIB), wide=True),
        Column("moved", "(MiB)", 9, cell("bytes", ".2f", MIB), wide=True),
        Column("time", "(us)", 9, cell("time_us", ".2f")),
        Column("floor", "(us)", 10, cell("floor_us", ".2f"), wide=True),
        Column("share", "(%)", 5, lambda row: f"{100 * row.share:.1f}"),
        Column("p10", "(us)", 9, cell("p10_us", ".2f"), wide=True),
        *spread(),
        Column("over", "", 5, cell("over", ".2f")),
        Column("peer", "/ ours", 6, cell("peer_ratio", ".2f")),
        Column("goal", "", 6, lambda row: row.verdict()),
        Column("goals", "", -20, lambda row: row.reached(), wide=True),
    )

    def verdict(self) -> str:
        """Whether results are right and goals are reached, in a word."""
        if self.wrong:
            return "WRONG"
        return "" if not self.goals else "yes" if all(self.goals.values()) else "MISSED"

    def reached(self) -> str:
        """Each goal, and the number of wrong elements."""
        goals = [f"{goal}{'' if reached else ' MISSED'}" for goal, reached in self.goals.items()]
        return ", ".join([*goals, *([f"{self.wrong} WRONG"] if self.wrong else [])])

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return self.name, self.data_bytes, "bytes"


def sets(device: str) -> Iterator[tuple[str, Cases]]:
    """The sets of cases that are timed together, by name."""
    for stem in STEPS:
        for nbytes, suffix in STEP_SIZES.items():
            yield stem + suffix, partial(step_cases, stem, nbytes, suffix, device)
    for rule in OPTIMIZERS:
        yield f"{rule}_rule", partial(rule_cases, rule, RULE_BYTES, device)
    for nbytes, suffix in CODEC_SIZES.items():
        yield f"int8{suffix}", partial(int8_cases, nbytes, suffix, device)
        yield f"topk{suffix}", partial(topk_cases, nbytes, suffix, device)
        yield f"extremes{suffix}", partial(extreme_cases, nbytes, suffix, device)
        yield f"streams{suffix}", partial(stream_cases, nbytes, suffix, device)
    yield "small_tensors", partial(small_tensor_cases, device)
    yield "all_reduce", partial(ranks.large_cases, device)
    yield "all_reduce_1KiB", partial(ranks.small_cases, device)


def interleave(
    calls: Mapping[str, Call], rounds: int, warmup: int = WARM_UP
) -> dict[str, list[float]]:
    """Times every call on the device, in microseconds, with a sample of each in every round.

    Each call finds in the L2 what the previous one has left there, and the order rotates.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        begun = []
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            keep_device_busy(HEAD_START_CYCLES)
            begin.record()
            calls[name]()
            end.record()
            begun.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in begun:
            samples[name].append(1e3 * begin.elapsed_time(end))
    return samples


def measure(cases: list[KernelCase], device: str, settings: GpuSettings) -> list[KernelRow]:
    """Checks, then times cases, their peers and a copy together."""
    checked = [case for case in cases if case.wrong is not None and settings.check]
    wrong = {case.stem: case.wrong() for case in checked if case.wrong is not None}
    copied = max(cases[0].moved_bytes, LEAST_COPIED)
    (probe,) = streams(Mix(copied // 2, copied // 2), device).values()
    probe.source.normal_()
    calls = {COPY: probe.call} | {case.stem: case.call for case in cases}
    calls |= {f"{case.stem}, peer": case.peer for case in cases if case.peer is not None}
    warmup = WARM_UP if settings.warmup_iters is None else settings.warmup_iters
    samples = interleave(calls, settings.iters or ROUNDS, warmup)
    copy_us = statistics.median(samples[COPY]) / copied  # per byte
    return make_rows(cases, samples, copy_us, wrong)


def make_rows(
    cases: list[KernelCase],
    samples: Mapping[str, list[float]],
    copy_us_per_byte: float,
    wrong: Mapping[str, int],
) -> list[KernelRow]:
    """Makes rows from the samples."""
    repeats = {case.stem: case.repeats for case in cases}
    figures = {name: summarise([taken], repeats.get(name, 1)) for name, taken in samples.items()}
    times = {name: each.p50_us for name, each in figures.items()}
    rows = []
    for case in cases:
        time_us, floor_us = times[case.stem], case.moved_bytes * copy_us_per_byte
        peer_us = times.get(f"{case.stem}, peer")
        over = time_us / times[case.base] if case.base else None
        share, ratio = floor_us / time_us, peer_us / time_us if peer_us else None
        reached = {"time_us": time_us, "share": share, "over": over, "peer_ratio": ratio}
        rows.append(
            KernelRow(
                name=case.name, bytes=case.moved_bytes, data_bytes=case.data_bytes,
                floor_us=round(floor_us, 3),
                p10_us=round(percentile(sorted(samples[case.stem]), 0.1) / case.repeats, 3),
                wrong=wrong.get(case.stem), base=case.base and case.base + case.suffix,
                peer=case.peer_name, peer_us=peer_us and round(peer_us, 3),
                goals={str(goal): goal.reached(reached[goal.figure]) for goal in case.goals},
                share=round(share, 4), over=over and round(over, 4),
                peer_ratio=ratio and round(ratio, 4),
                **figures[case.stem].columns() | {"time_us": round(time_us, 4)},
            )
        )  # fmt: skip
    return rows


class KernelResults(Results[KernelRow]):
    """Results with the errors of sets that failed."""

    def __init__(self, settings: Settings, **facts: Any) -> None:
        super().__init__(settings, **facts, failed={})

    def fail(self, name: str, error: Exception) -> None:
        """Records the error of a set; the other sets continue."""
        self.meta["failed"][name] = f"{type(error).__name__}: {error}"
        self.comment(f"{name} FAILED")
        traceback.print_exc()
        self.save()

    def good(self) -> bool:
        """True if everything ran and was right; a missed goal is not an error."""
        return not self.meta["failed"] and not any(row.wrong for row in self.rows)


def run(settings: GpuSettings) -> KernelResults | None:
    """Measures the selected sets; exits with status 1 if one failed or a result was wrong.

    Where there is no GPU, it says so.
    """
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return None
    results = measure_sets(settings)
    if not results.good():
        raise SystemExit(1)
    return results


def measure_sets(settings: GpuSettings, device: str = "cuda") -> KernelResults:
    """Measures the selected sets; one that fails does not keep the others from running."""
    results = KernelResults(settings, gpu=gpu())
    results.begin(f"kernels on {json.dumps(results.meta['gpu'])}", KernelRow.header(settings.wide))
    for name, cases in sets(device):
        if name not in settings.only:
            continue
        try:
            with cases() as made:
                results.add(measure(made, device, settings))
        except Exception as error:
            results.fail(name, error)
        made = []
        gc.collect()
        torch.cuda.empty_cache()
    results.end()
    return results
