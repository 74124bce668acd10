"""A run of the benchmark on one rank."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench import contestants, floor, measure, peers, report, verify, verify_compressed
from pycomm.bench.cases import Case, Settings, expand
from pycomm.bench.contestants import Compressed, Contestant, Prepared
from pycomm.bench.measure import Figures
from pycomm.bench.report import Row


def run(settings: Settings) -> None:
    """Measures everything in the settings; rank 0 prints, writes and plots."""
    group = pycomm.init(timeout=settings.timeout, cuda_heap_bytes=_cuda_heap_bytes(settings))
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.manual_seed(group.rank)  # random numbers differ between ranks, as gradients do
    cases = list(expand(settings, group.size))
    others, absent = peers.find(settings.peers)
    for peer in others:
        if not any(peer.supports(case) for case in cases):
            absent[peer.impl] = "cannot run any of these cases"
    field = [*contestants.own(group, settings), *others]
    meta = report.make_meta(settings, group.size, absent, contestants.refusals(field, cases))
    meta["barrier_us_before"] = round(measure.barrier_us(group), 3)
    _say(report.preamble(meta, settings))
    rows: list[Row] = []
    for case in cases:
        able = [contestant for contestant in field if contestant.supports(case)]
        if able:
            added = _run_case(settings, group, able, case, meta)
            _say("\n".join(map(report.format_row, added)))
            rows += added
    meta["barrier_us_after"] = round(measure.barrier_us(group), 3)
    meta["load_after"] = os.getloadavg()[0]
    if group.rank == 0:
        _finish(settings, meta, rows)
    group.close()


def _cuda_heap_bytes(settings: Settings) -> int:
    """Room for every tensor that the run takes from a CUDA window; none of it comes back."""
    if settings.device == "cpu" or "window" not in settings.buffers:
        return 0
    variants = len(settings.dtypes) * len(settings.ops) * len(settings.algorithms)
    return 3 * variants * sum(settings.sizes)


def _run_case(
    settings: Settings,
    group: pycomm.Group,
    able: list[Contestant],
    case: Case,
    meta: dict[str, Any],
) -> list[Row]:
    """Checks, then times, all contestants of a case."""
    streams = [probe for probe in floor.probes(group) if probe.supports(case)]
    runs = [contestant.prepare(case) for contestant in [*able, *streams]]
    wrong = _check(case, group.rank, able, runs) if settings.check else [None] * len(able)
    for run in runs:
        run.settle()
    figures = measure.interleave(group, runs, settings.iters, settings.warmup_iters)
    floor_us = None
    if streams:
        floor_us = _note_floor(case, streams, figures[len(able) :], meta)
    return [
        report.make_row(case, contestant, figure, errors, floor_us)
        for contestant, figure, errors in zip(able, figures, wrong, strict=False)
    ]


def _check(case: Case, rank: int, able: list[Contestant], runs: list[Prepared]) -> list[int]:
    """Wrong elements of every contestant, over all ranks."""
    wrong = torch.tensor(
        [
            verify_compressed.count_wrong(case, rank, contestant, run)
            if isinstance(contestant, Compressed)
            else verify.count_wrong(case, rank, run)
            for contestant, run in zip(able, runs, strict=False)
        ]
    )
    dist.all_reduce(wrong)
    return [int(count) for count in wrong]


def _note_floor(
    case: Case, streams: list[Contestant], figures: list[Figures], meta: dict[str, Any]
) -> float:
    """Keeps the fastest stream's rate; returns its time."""
    best = min(range(len(streams)), key=lambda index: figures[index].time_us)
    time_us = figures[best].time_us
    meta["floor"].append(
        {
            "bytes": case.nbytes,
            "probe": streams[best].algorithm,
            "time_us": round(time_us, 1),
            "GBps": round(floor.rate(case, time_us), 2),
        }
    )
    return time_us


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _finish(settings: Settings, meta: dict[str, Any], rows: list[Row]) -> None:
    """What comes after the table."""
    for entry in meta["floor"]:
        size = report.human_bytes(entry["bytes"])
        rate = f"{entry['GBps']} GB/s read plus written, all ranks together"
        print(f"# floor at {size}: {rate} ({entry['probe']})")
    print(f"# load {meta['load_after']:.2f}, barrier {meta['barrier_us_after']:.2f} us")
    for line in [*report.compare(rows), *report.compare_compressed(rows)]:
        print(f"# {line}")
    if settings.json is not None:
        report.write_json(settings.json, meta, map(asdict, rows))
    if settings.plot is not None:
        from pycomm.bench import plot

        plot.draw(settings.plot, meta, rows)
