"""What an all-reduce will do: algorithm, steps and bytes, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.dtypes import ALGORITHMS, check_choice

if TYPE_CHECKING:
    from collections.abc import Sequence

LINE = 64
PIECE = 64 << 10  # of the pipelined algorithms
PACKET_BYTES = 64  # the largest tensor that travels in packets, at twice its size


@dataclass(frozen=True)
class Plan:
    """One rank's part in an all-reduce.

    Attributes:
        algorithm: what runs.
        why: what chose it.
        device: ``"cpu"`` or ``"cuda"``.
        path: on the CPU, ``"staged"`` through the shared window, ``"window"`` where the tensors lie
            in it, ``"alone"`` in a world of one, or how many nodes and stripes there are; on
            CUDA, what joins the ranks: ``"threads"``, ``"peer memory"`` or
            ``"pinned host memory"``.
        steps: signals that this rank gives the others; None on CUDA and between nodes, where
            nobody counts, and for an algorithm that has no formula here.
        bytes_in: bytes that it reads from other ranks' memory, or of several nodes receives from
            the others; None on CUDA.
        bytes_out: bytes that it writes to other ranks' memory, or sends to other nodes; None on
            CUDA.
    """

    algorithm: str
    why: str
    device: str
    path: str
    steps: int | None
    bytes_in: int | None
    bytes_out: int | None


def part_of(count: int, parts: int, index: int, unit: int) -> tuple[int, int]:
    """Begin and length of part `index` of `count` elements, cut at multiples of `unit`."""
    base, longer = divmod(-(-count // unit), parts)
    begin = min((index * base + min(index, longer)) * unit, count)
    end = min(((index + 1) * base + min(index + 1, longer)) * unit, count)
    return begin, end - begin


def tiles_of(count: int, size: int) -> list[int]:
    """Lengths of the tiles of `count` elements."""
    return [min(size, count - begin) for begin in range(0, count, size)] if size else []


def select(nbytes: int, size: int, device: str = "cpu") -> str:
    """What ``algorithm="auto"`` picks."""
    return _C.select_algorithm(nbytes, size, device)


def make_plan(
    *,
    nbytes: int,
    dtype: torch.dtype,
    rank: int,
    size: int,
    algorithm: str,
    in_window: bool,
    slot_bytes: int,
) -> Plan:
    """The plan of one rank; see :meth:`pycomm.Group.explain`."""
    check_choice("algorithm", algorithm, ALGORITHMS)
    _check_bytes(nbytes, dtype)
    chosen = select(nbytes, size) if algorithm == "auto" else algorithm
    why = "named by the caller"
    if algorithm == "auto":
        why = f"measured best for {nbytes} bytes among {size} ranks on cpu"
    if size == 1:
        return Plan(chosen, "a world of one", "cpu", "alone", 0, 0, 0)
    direct = in_window and chosen in _C.zero_copy_algorithms
    path = "window" if direct else "staged"
    counting = _COUNTING.get(chosen)
    if counting is None:
        return Plan(chosen, why, "cpu", path, None, None, None)
    steps, elements_in, elements_out = counting(
        nbytes // dtype.itemsize, rank, size, direct, slot_bytes // dtype.itemsize, dtype.itemsize
    )
    item = dtype.itemsize
    return Plan(chosen, why, "cpu", path, steps, elements_in * item, elements_out * item)


def make_spanning_plan(
    nbytes: int, dtype: torch.dtype, rank: int, hosts: Sequence[Sequence[int]], algorithm: str
) -> Plan:
    """The plan of one rank of a group that spans nodes: what goes between these."""
    _check_bytes(nbytes, dtype)
    if algorithm not in ("auto", "two_shot"):
        raise ValueError(
            f"algorithm must be auto or two_shot in a group that spans nodes, got {algorithm!r}"
        )
    stripes = min(map(len, hosts))
    here = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    path = f"{len(hosts)} nodes, {stripes} stripe{'s' if stripes > 1 else ''}"
    why = "two-shot between nodes, whatever the size"
    index = list(hosts[here]).index(rank)
    if index >= stripes:
        return Plan("two_shot", why, "cpu", path, None, 0, 0)
    line = LINE // dtype.itemsize
    _, stripe = part_of(nbytes // dtype.itemsize, stripes, index, line)
    _, owned = part_of(stripe, len(hosts), here, line)
    # Contributions one way, results the other: as many both ways.
    moved = (len(hosts) - 1) * owned + stripe - owned
    return Plan("two_shot", why, "cpu", path, None, moved * dtype.itemsize, moved * dtype.itemsize)


def make_cuda_plan(nbytes: int, size: int, algorithm: str, transport: str) -> Plan:
    """The plan of every rank on CUDA, where nobody counts."""
    chosen = select(nbytes, size, "cuda") if algorithm == "auto" else algorithm
    why = "named by the caller" if chosen == algorithm else f"the table's choice for {nbytes} B"
    return Plan(chosen, why, "cuda", transport, None, None, None)


def _check_bytes(nbytes: int, dtype: torch.dtype) -> None:
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise ValueError(
            f"nbytes must be a multiple of {dtype.itemsize}, the size of {dtype}, got {nbytes}"
        )


Counts = tuple[int, int, int]


def _one_shot(count: int, rank: int, size: int, direct: bool, slot: int, item: int) -> Counts:  # noqa: ARG001
    if count * item <= PACKET_BYTES:
        words = -(-count * item // 4)
        return 0, 0, (size - 1) * words * 8 // item
    return len(tiles_of(count, slot)) - 1, (size - 1) * count, 0


def _two_shot(count: int, rank: int, size: int, direct: bool, slot: int, item: int) -> Counts:
    tiles = tiles_of(count, count if direct else slot)
    owned = sum(part_of(tile, size, rank, LINE // item)[1] for tile in tiles)
    if direct:
        return len(tiles), (size - 1) * owned, (size - 1) * owned
    return 2 * len(tiles), (size - 1) * owned + count - owned, 0


def _ring(count: int, rank: int, size: int, direct: bool, slot: int, item: int) -> Counts:
    steps = read = 0
    for tile in tiles_of(count, count if direct else slot):
        chunks = [part_of(tile, size, c, LINE // item)[1] for c in range(size)]
        steps += (2 * size - 1) * len(tiles_of(chunks[0], PIECE // item))
        # Every chunk comes by twice, but once the one this rank starts and the one it owns.
        read += 2 * tile - chunks[rank] - chunks[(rank + 1) % size]
    return steps, read, 0


def _tree(count: int, rank: int, size: int, direct: bool, slot: int, item: int) -> Counts:
    line = LINE // item
    piece = PIECE // item if direct else min(PIECE // item, slot // 2 // line * line)
    steps = read = 0
    for index in range(2):
        _, half = part_of(count, 2, index, line)
        parent, left, right = _C.tree_node(index, rank, size)
        steps += 2 * len(tiles_of(half, piece))
        read += half * sum(neighbour >= 0 for neighbour in (parent, left, right))
    return steps, read, 0


_COUNTING = {"one_shot": _one_shot, "two_shot": _two_shot, "ring": _ring, "tree": _tree}
