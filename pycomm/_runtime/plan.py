"""Explains how an all-reduce will run: algorithm, steps and bytes, in closed form."""

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
PACKET_BYTES = 64  # the largest tensor that is sent in packets, which double its size


@dataclass(frozen=True)
class Plan:
    """One rank's part in an all-reduce.

    Attributes:
        algorithm: the algorithm that runs.
        why: the reason for the choice.
        device: ``"cpu"`` or ``"cuda"``.
        path: on the CPU, ``"staged"`` (through staging areas), ``"window"`` (zero copy, as tensors
            lie in the window), ``"alone"`` (a single rank), or the numbers of nodes and stripes; on
            CUDA, ``"threads"``, ``"peer memory"`` or ``"pinned host memory"``.
        steps: signals that this rank sends; None on CUDA, between nodes, and for algorithms without
            a formula here.
        bytes_in: bytes that this rank reads from other ranks' memory, or receives from other nodes;
            None on CUDA.
        bytes_out: bytes that this rank writes to other ranks' memory, or sends to other nodes; None
            on CUDA.
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
    """The algorithm that ``algorithm="auto"`` picks."""
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
    zero_copy = in_window and chosen in _C.zero_copy_algorithms
    path = "window" if zero_copy else "staged"
    counting = _COUNTING.get(chosen)
    if counting is None:
        return Plan(chosen, why, "cpu", path, None, None, None)
    steps, elements_in, elements_out = counting(
        nbytes // dtype.itemsize,
        rank,
        size,
        zero_copy,
        slot_bytes // dtype.itemsize,
        dtype.itemsize,
    )
    item = dtype.itemsize
    return Plan(chosen, why, "cpu", path, steps, elements_in * item, elements_out * item)


def make_spanning_plan(
    nbytes: int, dtype: torch.dtype, rank: int, nodes: Sequence[Sequence[int]], algorithm: str
) -> Plan:
    """The plan of one rank of a group that spans nodes; it counts bytes between nodes."""
    _check_bytes(nbytes, dtype)
    if algorithm not in ("auto", "two_shot"):
        raise ValueError(
            f"algorithm must be auto or two_shot in a group that spans nodes, got {algorithm!r}"
        )
    stripes = min(map(len, nodes))
    here = next(i for i, ranks in enumerate(nodes) if rank in ranks)
    path = f"{len(nodes)} nodes, {stripes} stripe{'s' if stripes > 1 else ''}"
    why = "two-shot between nodes, whatever the size"
    index = list(nodes[here]).index(rank)
    if index >= stripes:
        return Plan("two_shot", why, "cpu", path, None, 0, 0)
    line = LINE // dtype.itemsize
    _, stripe = part_of(nbytes // dtype.itemsize, stripes, index, line)
    _, owned = part_of(stripe, len(nodes), here, line)
    # Contributions go one way and results the other, so both ways move the same.
    moved = (len(nodes) - 1) * owned + stripe - owned
    return Plan("two_shot", why, "cpu", path, None, moved * dtype.itemsize, moved * dtype.itemsize)


def make_cuda_plan(nbytes: int, size: int, algorithm: str, transport: str) -> Plan:
    """The plan of every rank on CUDA, without steps and bytes."""
    chosen = select(nbytes, size, "cuda") if algorithm == "auto" else algorithm
    why = "named by the caller" if chosen == algorithm else f"the table's choice for {nbytes} B"
    return Plan(chosen, why, "cuda", transport, None, None, None)


def _check_bytes(nbytes: int, dtype: torch.dtype) -> None:
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise ValueError(
            f"nbytes must be a multiple of {dtype.itemsize}, the size of {dtype}, got {nbytes}"
        )


Counts = tuple[int, int, int]


def _one_shot(count: int, rank: int, size: int, zero_copy: bool, slot: int, item: int) -> Counts:  # noqa: ARG001
    if count * item <= PACKET_BYTES:
        words = -(-count * item // 4)
        return 0, 0, (size - 1) * words * 8 // item
    return len(tiles_of(count, slot)) - 1, (size - 1) * count, 0


def _two_shot(count: int, rank: int, size: int, zero_copy: bool, slot: int, item: int) -> Counts:
    tiles = tiles_of(count, count if zero_copy else slot)
    owned = sum(part_of(tile, size, rank, LINE // item)[1] for tile in tiles)
    if zero_copy:
        return len(tiles), (size - 1) * owned, (size - 1) * owned
    return 2 * len(tiles), (size - 1) * owned + count - owned, 0


def _ring(count: int, rank: int, size: int, zero_copy: bool, slot: int, item: int) -> Counts:
    steps = read = 0
    for tile in tiles_of(count, count if zero_copy else slot):
        chunks = [part_of(tile, size, c, LINE // item)[1] for c in range(size)]
        steps += (2 * size - 1) * len(tiles_of(chunks[0], PIECE // item))
        # Every chunk passes twice, except for the one this rank starts and the one it owns.
        read += 2 * tile - chunks[rank] - chunks[(rank + 1) % size]
    return steps, read, 0


def _tree(count: int, rank: int, size: int, zero_copy: bool, slot: int, item: int) -> Counts:
    line = LINE // item
    piece = PIECE // item if zero_copy else min(PIECE // item, slot // 2 // line * line)
    steps = read = 0
    for index in range(2):
        _, half = part_of(count, 2, index, line)
        parent, left, right = _C.tree_node(index, rank, size)
        steps += 2 * len(tiles_of(half, piece))
        read += half * sum(neighbour >= 0 for neighbour in (parent, left, right))
    return steps, read, 0


_COUNTING = {"one_shot": _one_shot, "two_shot": _two_shot, "ring": _ring, "tree": _tree}
