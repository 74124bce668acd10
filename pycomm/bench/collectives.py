"""Collectives of pycomm and of other libraries: ``python -m pycomm.bench all_reduce`` and so on.

The table has nccl-tests' columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench import floor, measure, peers, verify
from pycomm.bench.contestants import (
    IN_PLACE,
    REDUCTIONS,
    Case,
    CollectiveRow,
    Compressed,
    Contestant,
    Pycomm,
    make_row,
)
from pycomm.bench.gpu import machine
from pycomm.bench.report import RankSettings, Results, human_bytes


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings(RankSettings):
    """A whole run, as asked for on the command line; see ``python -m pycomm.bench all_reduce -h``.

    The benchmark is the collective.
    """

    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...] = ("sum",)
    algorithms: tuple[str, ...] = ("auto",)
    buffers: tuple[str, ...]
    compressions: tuple[str, ...] = ("none",)
    feedback: bool = False
    peers: tuple[str, ...]
    check: bool
    brief: bool
    device: str


def run(settings: CollectiveSettings) -> Results[CollectiveRow]:
    """Measures everything in the settings; rank 0 prints, writes and plots."""
    group = pycomm.init(timeout=settings.timeout, cuda_heap_bytes=_cuda_heap_bytes(settings))
    torch.manual_seed(group.rank)  # random numbers differ between ranks, as gradients do
    alone = pycomm.init(dist.new_group([group.rank], use_local_synchronization=True))
    probes = floor.probes(group, alone, settings.benchmark, settings.buffers)
    cases = list(expand(settings, group.size))
    found, absent = peers.find(settings.peers, lambda name: peers.COLLECTIVES[name]())
    others = list(itertools.chain.from_iterable(found))
    for peer in others:
        if not any(peer.supports(case) for case in cases):
            absent[peer.impl] = "cannot run any of these cases"
    field = [*own_contestants(group, settings), *others]
    results = _begin(settings, group, absent, refusals(field, cases))
    several = len(settings.dtypes) * len(settings.ops) > 1
    for case in cases:
        able = [contestant for contestant in field if contestant.supports(case)]
        if able:
            able_probes = [probe for probe in probes if probe.supports(case)]
            added = _run_case(settings, group, able, able_probes, case, results.meta)
            if settings.brief:
                results.keep(added)
                results.say(*compare(added))
            else:
                if several:
                    results.comment(f"{case.dtype_name} {added[0].op}")
                results.add(added)
    if settings.device == "cuda" and group.rank == 0:
        results.meta["links_after"] = machine.links()
    results.meta["barrier_us_after"] = round(measure.barrier_us(group), 3)
    results.comment(*floor.describe(results.meta["floor"], settings.buffers))
    results.end(*compare(results.rows))
    alone.close()
    group.close()
    return results


def _begin(
    settings: CollectiveSettings, group: pycomm.Group, absent: dict[str, str], refused: list[str]
) -> Results[CollectiveRow]:
    """Prints what is above the table."""
    results: Results[CollectiveRow] = Results(
        settings,
        brief=settings.brief,
        ranks=group.size,
        nodes=len(group.nodes),
        feedback=settings.feedback,
        absent_peers=absent,
        refused=refused,
        floor=[],
    )
    if settings.device == "cuda" and group.rank == 0:
        results.meta |= {"gpu": machine.gpu(), "links_before": machine.links()}
    results.meta["barrier_us_before"] = round(measure.barrier_us(group), 3)
    notes = [f"no {name}: {reason}" for name, reason in absent.items()]
    notes += [f"not compressed: {', '.join(refused)}"] if refused else []
    kinds = ", ".join(
        (*settings.dtypes, *(settings.ops if settings.benchmark in REDUCTIONS else ()))
    )
    what = f"{settings.benchmark} of {kinds}, {group.size} ranks on {results.place}"
    results.begin(what, CollectiveRow.header(settings.wide), *notes)
    return results


def expand(settings: CollectiveSettings, ranks: int) -> Iterator[Case]:
    """Every case of a run, cut to whole elements for every rank.

    Cases of one size, which a reader may compare, are measured close together.
    """
    for size, name, op in itertools.product(settings.sizes, settings.dtypes, settings.ops):
        dtype: torch.dtype = getattr(torch, name)
        blocks = 1 if settings.benchmark in (*IN_PLACE, "send_recv") else ranks
        unit = blocks * dtype.itemsize
        count = max(size // unit, 1) * blocks
        yield Case(settings.benchmark, dtype, op, count, ranks, settings.device)


def own_contestants(group: pycomm.Group, settings: CollectiveSettings) -> list[Contestant]:
    """Makes pycomm's contestants: each algorithm on each buffer, then each algorithm compressed."""
    field: list[Contestant] = []
    for compression in settings.compressions:
        if compression == "none":
            field += [
                Pycomm(group=group, algorithm=algorithm, buffer=buffer)
                for buffer in settings.buffers
                for algorithm in settings.algorithms
            ]
        else:
            field += [
                Compressed(
                    group=group,
                    algorithm=algorithm,
                    compression=compression,
                    feedback=settings.feedback,
                )
                for algorithm in settings.algorithms
            ]
    return field


def refusals(field: list[Contestant], cases: list[Case]) -> list[str]:
    """Descriptions of pycomm's contestants that are left out, each once."""
    ours = [contestant for contestant in field if isinstance(contestant, Compressed)]
    found = [contestant.refusal(case) for case in cases for contestant in ours]
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def _cuda_heap_bytes(settings: CollectiveSettings) -> int:
    """Room for every tensor that the run takes from a CUDA window; it frees none of them."""
    if settings.device == "cpu" or "window" not in settings.buffers:
        return 0
    variants = len(settings.dtypes) * len(settings.ops) * len(settings.algorithms)
    return 3 * variants * sum(settings.sizes)


def _run_case(
    settings: CollectiveSettings,
    group: pycomm.Group,
    able: list[Contestant],
    probes: list[Contestant],
    case: Case,
    meta: dict[str, Any],
) -> list[CollectiveRow]:
    """Checks all contestants of a case, then times them beside the probes."""
    runs = [contestant.prepare(case) for contestant in [*able, *probes]]
    wrong: list[int] | list[None] = [None] * len(able)
    if settings.check:
        wrong = verify.count_wrong_everywhere(case, group.rank, able, runs)
    figures = measure.interleave(group, runs, settings.iters, settings.warmup_iters)
    floors = floor.make_entries(case, probes, figures[len(able) :])
    meta["floor"] += floors
    return [
        make_row(case, contestant, figure, errors, floor.fastest(floors, contestant.buffer))
        for contestant, figure, errors in zip(able, figures, wrong, strict=False)
    ]


def compare(rows: list[CollectiveRow]) -> list[str]:
    """Per size, ratios of pycomm's time to the best peer's, and of compressed to uncompressed."""
    return [*_compare_peers(rows), *_compare_compressed(rows)]


def _compare_peers(rows: list[CollectiveRow]) -> list[str]:
    """Per size, our uncompressed time on each buffer as a ratio to the best peer's."""
    lines = []
    for what, same in _by_case(rows).items():
        peers = [row for row in same if row.impl != "pycomm"]
        for buffer in ("tensor", "window"):
            ours = [row for row in same if (row.buffer, row.compression) == (buffer, "none")]
            ours = [row for row in ours if row.impl == "pycomm"]
            if ours and peers:
                best, peer = _best(ours), _best(peers)
                times = f"pycomm {best.p50_us:,.2f} us, {peer.impl} {peer.p50_us:,.2f} us"
                ratio = f"{peer.p50_us / best.p50_us:.2f} times as fast"
                lines.append(f"{what}, {buffer}: {times}: {ratio}")
    return lines


def _compare_compressed(rows: list[CollectiveRow]) -> list[str]:
    """Per size, the time of every compression as a ratio to the uncompressed time."""
    lines = []
    for what, same in _by_case(rows).items():
        ours = [row for row in same if (row.impl, row.buffer) == ("pycomm", "tensor")]
        plain = [row for row in ours if row.compression == "none"]
        for name in dict.fromkeys(row.compression for row in ours):
            if plain and name != "none":
                best, base = _best([row for row in ours if row.compression == name]), _best(plain)
                times = f"{name} {best.p50_us:,.2f} us, uncompressed {base.p50_us:,.2f} us"
                lines.append(f"{what}: {times}: {best.p50_us / base.p50_us:.2f} times the time")
    return lines


def _by_case(rows: list[CollectiveRow]) -> dict[str, list[CollectiveRow]]:
    """The rows of every size, dtype and operation, by a description of these."""
    cases: dict[str, list[CollectiveRow]] = {}
    for row in rows:
        op = "" if row.op == "none" else f" {row.op}"
        cases.setdefault(f"{human_bytes(row.bytes)} {row.dtype}{op}", []).append(row)
    return cases


def _best(rows: list[CollectiveRow]) -> CollectiveRow:
    """The row of ``algorithm="auto"``, or of the fastest algorithm if that was not measured."""
    return min([row for row in rows if row.algorithm == "auto"] or rows, key=lambda row: row.p50_us)
