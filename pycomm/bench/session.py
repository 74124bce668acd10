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
from pycomm.bench.report import Row


def run(settings: Settings) -> None:
    """Measures everything in the settings; rank 0 prints, writes and plots."""
    group = pycomm.init(timeout=settings.timeout, cuda_heap_bytes=_cuda_heap_bytes(settings))
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.manual_seed(group.rank)  # random numbers differ between ranks, as gradients do
    alone = pycomm.init(dist.new_group([group.rank], use_local_synchronization=True))
    probes = floor.probes(group, alone, settings.collective, settings.buffers)
    cases = list(expand(settings, group.size))
    others, absent = peers.find(settings.peers)
    for peer in others:
        if not any(peer.supports(case) for case in cases):
            absent[peer.impl] = "cannot run any of these cases"
    field = [*contestants.own(group, settings), *others]
    meta = report.make_meta(settings, group.size, absent, contestants.refusals(field, cases))
    meta["barrier_us_before"] = round(measure.barrier_us(group), 3)
    if not settings.brief:
        _say(report.preamble(meta, settings))
    rows: list[Row] = []
    for case in cases:
        able = [contestant for contestant in field if contestant.supports(case)]
        if able:
            able_probes = [probe for probe in probes if probe.supports(case)]
            added = _run_case(settings, group, able, able_probes, case, meta)
            lines = report.compare(added) if settings.brief else map(report.format_row, added)
            _say("\n".join(lines))
            rows += added
    meta["barrier_us_after"] = round(measure.barrier_us(group), 3)
    meta["load_after"] = os.getloadavg()[0]
    if group.rank == 0:
        _finish(settings, meta, rows)
    alone.close()
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
    probes: list[Contestant],
    case: Case,
    meta: dict[str, Any],
) -> list[Row]:
    """Checks all contestants of a case, then times them beside the probes."""
    runs = [contestant.prepare(case) for contestant in [*able, *probes]]
    wrong = _check(case, group.rank, able, runs) if settings.check else [None] * len(able)
    figures = measure.interleave(group, runs, settings.iters, settings.warmup_iters)
    floors = [
        {
            "bytes": case.nbytes,
            "dtype": str(case.dtype).removeprefix("torch."),
            "impl": probe.impl,
            "algorithm": probe.algorithm,
            "buffer": probe.buffer,
            "time_us": round(figure.time_us, 3),
        }
        for probe, figure in zip(probes, figures[len(able) :], strict=True)
    ]
    meta["floor"] += floors
    return [
        report.make_row(case, contestant, figure, errors, floor.fastest(floors, contestant.buffer))
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


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _finish(settings: Settings, meta: dict[str, Any], rows: list[Row]) -> None:
    """What comes after the table."""
    if not settings.brief:
        for line in report.closing(meta, settings, rows):
            print(f"# {line}")
    if settings.json is not None:
        report.write_json(settings.json, meta, map(asdict, rows))
    if settings.plot is not None:
        from pycomm.bench import plot

        plot.draw(settings.plot, meta, rows)
