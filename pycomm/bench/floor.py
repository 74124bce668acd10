"""The floor: the least time in which this machine can move the bytes of an all-reduce.

It is measured for each size in the same rounds as the contestants. Several probes compete, and the
fastest is the floor:

- Crossings (csrc/cpu/crossing.h) move what must cross between the ranks' caches, in one step or in
  two, without arithmetic.
- Streams, for tensors in the window that are larger than caches. Every rank reads one byte and
  writes one byte of main memory per byte of the tensor: it reads its share of n tensors, and writes
  the sum into its share of n tensors. The streams do the same on private memory.

A call of one rank alone shows what a call costs in which nothing crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm import _C
from pycomm.bench.cases import KIB, MIB, Case
from pycomm.bench.contestants import Contestant, Prepared, Pycomm

WHOLE = 256 * KIB  # larger tensors do not cross in one step
TILES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
STREAMED = 8 * MIB  # smaller tensors stay in caches
SMALL = 4 * KIB  # here a call costs as much as the bytes
_LINE = 64  # bytes

Route = _C.Crossing.Route


@dataclass(frozen=True)
class Crossing:
    """What must cross between the caches, tile by tile.

    Attributes:
        buffer: ``"tensor"`` or ``"window"``: whose floor it may be.
    """

    group: pycomm.Group
    route: _C.Crossing.Route
    tile: int
    buffer: str
    impl: str = "floor"
    compression: str = "none"

    @property
    def algorithm(self) -> str:
        """The route and the tile."""
        return f"{self.route.name}, tiles of {self.tile // KIB} KiB" if self.tile else "one_shot"

    def supports(self, case: Case) -> bool:
        """True if tensors of this size may be fastest this way."""
        if case.collective != "all_reduce" or case.device != "cpu":
            return False
        return case.nbytes <= WHOLE if self.route == Route.one_shot else case.nbytes >= self.tile

    def prepare(self, case: Case) -> Prepared:
        """Tensors of the case's size, with a slot for each rank in the window."""
        ranks = self.group.size
        count, lines = -(-case.count // ranks) * ranks, max(self.tile // (_LINE * ranks), 1)
        nbytes, tile = count * case.dtype.itemsize, lines * _LINE * ranks
        source, result = torch.zeros(2, count, dtype=case.dtype).unbind()
        flag = self.group.empty(_C.Crossing.flag_bytes, dtype=torch.uint8).zero_()
        slot = self.group.empty(_C.Crossing.slot_bytes(self.route, nbytes, tile), dtype=torch.uint8)
        if self.route == Route.window:
            source = result = slot.view(case.dtype)
        crossing = _C.Crossing(
            self.route,
            _addresses(self.group, flag),
            _addresses(self.group, slot),
            self.group.rank,
            nbytes,
            tile,
        )
        given, taken, memory = source.data_ptr(), result.data_ptr(), (source, result, flag, slot)

        def call(_alive: object = memory) -> None:
            crossing.run(given, taken, self.group.timeout)

        return Prepared(source[: case.count], result[: case.count], call, case.data(source))


def _addresses(group: pycomm.Group, tensor: torch.Tensor) -> list[int]:
    """Where this process finds the tensors that all ranks have given."""
    offsets: list[int] = [0] * group.size
    dist.all_gather_object(offsets, group._core.offset_of(tensor.data_ptr()))
    return [group._core.address(rank, at, tensor.nbytes) for rank, at in enumerate(offsets)]


@dataclass(frozen=True)
class Stream:
    """A stream that reads and writes as much as the two-shot all-reduce in the window."""

    group: pycomm.Group
    algorithm: str
    stream: Callable[[torch.Tensor, torch.Tensor], object]
    impl: str = "floor"
    buffer: str = "window"
    compression: str = "none"

    def supports(self, case: Case) -> bool:
        """True for all-reduces that are too large for the caches."""
        on_cpu = case.collective == "all_reduce" and case.device == "cpu"
        return on_cpu and case.nbytes >= STREAMED

    def prepare(self, case: Case) -> Prepared:
        """The same bytes as fp32, since fp32 loops are limited only by memory."""
        source, target = torch.zeros(2, case.nbytes // 4, dtype=torch.float32).unbind()

        def call() -> None:
            self.stream(source, target)
            # Without it, ranks that share a core could stream one after the other, unnoticed.
            pycomm.barrier(group=self.group)

        return Prepared(source, source, call, torch.zeros_like(source))


@dataclass(frozen=True)
class Alone(Pycomm):
    """An all-reduce of this rank only."""

    impl: str = "one rank"

    def supports(self, case: Case) -> bool:
        """True if the call is a part of the time."""
        return case.collective == "all_reduce" and case.nbytes <= SMALL


def probes(group: pycomm.Group, alone: pycomm.Group, buffers: tuple[str, ...]) -> list[Contestant]:
    """All probes.

    Args:
        group: the ranks.
        alone: a group of this rank only.
        buffers: whose floors are wanted.
    """
    found: list[Contestant] = [Crossing(group, Route.one_shot, 0, "tensor")]
    found += [Crossing(group, Route.two_shot, tile, "tensor") for tile in TILES]
    if "window" in buffers:
        found += [Crossing(group, Route.window, tile, "window") for tile in TILES]
        found += [
            Stream(group, "x += x", lambda source, _: source.add_(source)),
            Stream(group, "x *= 1", lambda source, _: source.mul_(1.0)),
            Stream(group, "y = x", lambda source, target: target.copy_(source)),
        ]
    return [*found, Alone(alone, "auto", "tensor")]


def fastest(rows: list[dict[str, Any]], buffer: str) -> dict[str, Any] | None:
    """The floor of a size: the entry of ``meta["floor"]`` with the least time.

    Args:
        rows: the entries of this size.
        buffer: for tensors in the window, every probe counts.
    """
    able = [row for row in rows if row["impl"] == "floor" and row["buffer"] in ("tensor", buffer)]
    return min(able, key=lambda row: row["time_us"], default=None)
