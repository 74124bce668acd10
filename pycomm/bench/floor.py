"""The floor: the least time in which this machine can move the bytes of a collective.

It is measured for each size in the same rounds as the contestants. Several probes compete, and the
fastest is the floor:

- Crossings (csrc/cpu/executor/crossing.h) move what must cross between the ranks' caches, in one
  step or tile by tile, without arithmetic.
- Streams, for tensors in the window that are larger than caches, read and write as many bytes of
  private memory as every rank must read and write of all tensors. Only an all-reduce writes what it
  has read; the streams of the other collectives write other memory.

A call in a group of one rank shows what a call costs if nothing crosses. Between nodes it is the
only probe, and there is no floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm import _C
from pycomm.bench.contestants import Case, Contestant, Pycomm
from pycomm.bench.measure import Figures, Prepared
from pycomm.bench.report import KIB, MIB, human_bytes
from pycomm.bench.streams import LADDERS, OUT_OF_PLACE, Mix, streams

WHOLE = 256 * KIB  # larger tensors do not cross in one step
TILES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
STREAMED = 8 * MIB  # smaller tensors stay in caches
SMALL = 4 * KIB  # here a call costs as much as the bytes
_LINE = 64  # bytes

Route = _C.Crossing.Route
# Per collective and buffer, the competing routes. For tensors in the window all of them count.
# Other collectives have no floor.
ROUTES: dict[str, dict[str, tuple[_C.Crossing.Route, ...]]] = {
    "all_reduce": {
        "tensor": (Route.one_shot, Route.two_shot),
        "window": (Route.two_shot_window,),
    },
    "reduce_scatter": {
        "tensor": (Route.reduce_scatter,),
        "window": (Route.reduce_scatter_window,),
    },
    "all_gather": {
        "tensor": (Route.all_gather,),
        "window": (Route.all_gather_push, Route.all_gather_pull),
    },
    "broadcast": {
        "tensor": (Route.broadcast,),
        "window": (Route.broadcast_pull, Route.broadcast_share),
    },
}


@dataclass(frozen=True, kw_only=True)
class CrossingProbe(Contestant):
    """What must cross between the caches, whole or tile by tile, for tensors on its buffer.

    Attributes:
        tile: bytes; 0 for the whole tensor.
    """

    group: pycomm.Group
    collective: str
    route: _C.Crossing.Route
    tile: int
    impl: str = "floor"

    def supports(self, case: Case) -> bool:
        """True if tensors of this size may be fastest this way."""
        if case.collective != self.collective or case.device != "cpu":
            return False
        return case.nbytes >= self.tile if self.tile else case.nbytes <= WHOLE

    def prepare(self, case: Case) -> Prepared:
        """Tensors of the case's size, in the window or with a slot for each rank there."""
        group, ranks = self.group, self.group.size
        padded = replace(case, count=-(-case.count // ranks) * ranks)
        lines = max(self.tile // (_LINE * ranks), 1)
        tile = lines * _LINE * ranks if self.tile else padded.nbytes
        flag = group.empty(_C.Crossing.flag_bytes, dtype=torch.uint8).zero_()
        if self.buffer == "window":
            source, result = padded.tensors(group.empty)
            slot = result if self.route == Route.all_gather_push else source
        else:
            source, result = padded.tensors(torch.zeros)
            slot = group.empty(_C.Crossing.turns * tile, dtype=torch.uint8)
        flags, slots = _addresses(group, flag), _addresses(group, slot)
        crossing = _C.Crossing(self.route, flags, slots, group.rank, padded.nbytes, tile)
        given, taken, memory = source.data_ptr(), result.data_ptr(), (source, result, flag, slot)

        def call(_alive: object = memory) -> None:
            crossing.run(given, taken, group.timeout)

        return Prepared(source[: case.count], result[: case.count], call, case.data(source))


def _addresses(group: pycomm.Group, tensor: torch.Tensor) -> list[int]:
    """Where this process finds the tensors that all ranks have given."""
    offsets: list[int] = [0] * group.size
    dist.all_gather_object(offsets, group._core.offset_of(tensor.data_ptr()))
    return [group._core.address(rank, at, tensor.nbytes) for rank, at in enumerate(offsets)]


@dataclass(frozen=True, kw_only=True)
class StreamProbe(Contestant):
    """A stream that reads and writes as much as every rank must, with tensors in the window."""

    group: pycomm.Group
    collective: str
    impl: str = "floor"
    buffer: str = "window"

    def supports(self, case: Case) -> bool:
        """True for tensors that are too large for the caches."""
        on_cpu = case.collective == self.collective and case.device == "cpu"
        return on_cpu and case.nbytes >= STREAMED

    def prepare(self, case: Case) -> Prepared:
        """The same bytes as fp32, since fp32 loops are limited only by memory."""
        mix = _mix(case.collective, case.nbytes, case.ranks)
        stream = streams(mix, "cpu", group=self.group)[self.algorithm]
        rewritten = stream.result if case.collective == "all_reduce" else stream.source
        return Prepared(rewritten, rewritten, stream.call, torch.zeros_like(rewritten))


def _mix(collective: str, nbytes: int, ranks: int) -> Mix:
    """The main memory that every rank must read and write, of tensors of `nbytes` bytes.

    Each of n ranks does the n-th part of the work on all n tensors.
    """
    part = nbytes // (4 * ranks) * 4
    if collective == "broadcast":
        return Mix(part, (ranks - 1) * part)
    read = part if collective == "all_gather" else ranks * part
    write = part if collective == "reduce_scatter" else ranks * part
    return Mix(read, write)


@dataclass(frozen=True, kw_only=True)
class LoneRankProbe(Pycomm):
    """A collective of this rank only."""

    impl: str = "one rank"

    def supports(self, case: Case) -> bool:
        """True if the call is a part of the time."""
        return case.nbytes <= SMALL and case.collective != "send_recv"

    def prepare(self, case: Case) -> Prepared:
        """The case with one rank."""
        return super().prepare(replace(case, ranks=1))


def probes(
    group: pycomm.Group, alone: pycomm.Group, collective: str, buffers: tuple[str, ...]
) -> list[Contestant]:
    """All probes.

    Args:
        group: the ranks.
        alone: a group of this rank only.
        collective: what is measured.
        buffers: whose floors are wanted.
    """
    lone = LoneRankProbe(group=alone)
    if len(group.nodes) > 1:
        return [lone]
    found: list[Contestant] = []
    for buffer, routes in ROUTES.get(collective, {}).items():
        if buffer == "tensor" or buffer in buffers:
            found += [
                CrossingProbe(
                    group=group,
                    collective=collective,
                    route=route,
                    tile=tile,
                    buffer=buffer,
                    algorithm=route.name + (f", tiles of {tile // KIB} KiB" if tile else ""),
                )
                for route in routes
                for tile in (0, *TILES)
                if route != Route.one_shot or tile == 0
            ]
    if "window" in buffers and collective in ROUTES:
        ladders = LADDERS if collective == "all_reduce" else OUT_OF_PLACE
        names = streams(_mix(collective, MIB, group.size), "cpu", ladders)
        found += [
            StreamProbe(group=group, collective=collective, algorithm=name)
            for name in sorted(names)
        ]
    return [*found, lone]


def make_entries(
    case: Case, probed: list[Contestant], figures: list[Figures]
) -> list[dict[str, Any]]:
    """The entries of ``meta["floor"]`` for a case: a probe each."""
    return [
        {
            "bytes": case.nbytes,
            "dtype": case.dtype_name,
            "impl": probe.impl,
            "algorithm": probe.algorithm,
            "buffer": probe.buffer,
            "time_us": round(figure.time_us, 3),
        }
        for probe, figure in zip(probed, figures, strict=True)
    ]


def fastest(rows: list[dict[str, Any]], buffer: str) -> dict[str, Any] | None:
    """The floor of a size: the entry of ``meta["floor"]`` with the least time.

    Args:
        rows: the entries of this size.
        buffer: for tensors in the window, every probe counts.
    """
    able = [row for row in rows if row["impl"] == "floor" and row["buffer"] in ("tensor", buffer)]
    return min(able, key=lambda row: row["time_us"], default=None)


def describe(found: list[dict[str, Any]], buffers: tuple[str, ...]) -> list[str]:
    """Per size, the floor of tensors on each buffer, and the time of a call of one rank."""
    lines = []
    sizes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in found:
        sizes.setdefault((row["bytes"], row["dtype"]), []).append(row)
    for (nbytes, dtype), same in sizes.items():
        words = []
        for buffer in buffers:
            least = fastest(same, buffer)
            if least is not None:
                words.append(f"{buffer} {least['time_us']:,.2f} us ({least['algorithm']})")
        words += [f"{r['impl']} {r['time_us']:,.2f} us" for r in same if r["impl"] != "floor"]
        lines.append(f"floor at {human_bytes(nbytes)} {dtype}: {', '.join(words)}")
    return lines
