"""Signals and bytes per rank that each all-reduce should cost, from the papers' step counts."""

from __future__ import annotations

from typing import NamedTuple

from golden import cut, double_tree, slot_elements

PIECE_BYTES = 64 << 10  # of the pipelined algorithms


class Cost(NamedTuple):
    """As ``Group.traffic()`` gives it."""

    steps: int
    bytes_in: int
    bytes_out: int


def tiles_of(count: int, tile: int) -> list[int]:
    """Lengths of the tiles that `count` elements fall into."""
    whole, rest = divmod(count, tile) if tile else (0, 0)
    return [tile] * whole + [rest] * (rest > 0)


def lengths(count: int, parts: int, itemsize: int) -> list[int]:
    return [part.stop - part.start for part in cut(count, parts, itemsize)]


def one_shot(count: int, rank: int, size: int, itemsize: int, slot: int, zero_copy: bool) -> Cost:
    """Everybody reads everything; the announcement stands for the first tile's signal.

    What fits a cache line is written to the others instead, with a number beside every four bytes.
    """
    del rank, zero_copy
    nbytes = count * itemsize
    if nbytes <= 64:
        return Cost(0, 0, (size - 1) * 2 * 4 * -(-nbytes // 4))
    tiles = len(tiles_of(count, slot))
    return Cost(max(tiles - 1, 0), (size - 1) * nbytes, 0)


def two_shot(count: int, rank: int, size: int, itemsize: int, slot: int, zero_copy: bool) -> Cost:
    """Reduce the own chunk from all others, then read every other chunk (or write the own one)."""
    tiles = tiles_of(count, count if zero_copy else slot)
    own = sum(lengths(tile, size, itemsize)[rank] for tile in tiles) * itemsize
    if zero_copy:
        return Cost(len(tiles), (size - 1) * own, (size - 1) * own)
    others = count * itemsize - own
    return Cost(2 * len(tiles), (size - 1) * own + others, 0)


def ring(count: int, rank: int, size: int, itemsize: int, slot: int, zero_copy: bool) -> Cost:
    """n-1 hops that add and n-1 that copy, each of one chunk from the left neighbour."""
    steps = read = 0
    for tile in tiles_of(count, count if zero_copy else slot):
        chunks = lengths(tile, size, itemsize)
        pieces = -(-chunks[0] * itemsize // PIECE_BYTES)
        steps += pieces * (1 + (size - 1) + (size - 1))
        adding = [chunks[(rank - hop) % size] for hop in range(1, size)]
        copying = [chunks[(rank - hop + 1) % size] for hop in range(1, size)]
        read += sum(adding) + sum(copying)
    return Cost(steps, read * itemsize, 0)


def tree(count: int, rank: int, size: int, itemsize: int, slot: int, zero_copy: bool) -> Cost:
    """In each tree, half the tensor from each child on the way up and from the parent down."""
    line = 64 // itemsize
    piece = PIECE_BYTES // itemsize
    if not zero_copy:
        piece = min(piece, slot // 2 // line * line)
    steps = read = 0
    for root, half in zip(double_tree(size), lengths(count, 2, itemsize), strict=True):
        node = next(node for node in root.walk() if node.rank == rank)
        neighbours = len(node.children()) + (node is not root)
        steps += 2 * len(tiles_of(half, piece))
        read += neighbours * half
    return Cost(steps, read * itemsize, 0)


FORMULAS = {"one_shot": one_shot, "two_shot": two_shot, "ring": ring, "tree": tree}


def cost(
    algorithm: str,
    *,
    count: int,
    rank: int,
    size: int,
    itemsize: int,
    staging_bytes: int,
    zero_copy: bool,
) -> Cost:
    if size == 1:
        return Cost(0, 0, 0)
    slot = slot_elements(staging_bytes, itemsize)
    return FORMULAS[algorithm](count, rank, size, itemsize, slot, zero_copy)
