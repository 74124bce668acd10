"""The expected bits of every all-reduce, computed with numpy without pycomm.

The arithmetic follows the promises: 16- and 32-bit floats add in fp32, doubles in fp64, integers in
their own type and wrap; AVG divides once at the end; a stored NaN is the canonical one. The orders
follow the papers: rank order for one-shot and two-shot, around the ring, up the double binary tree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
import torch

CACHE_LINE = 64
SLOTS = 4  # staging slots that the algorithms rotate through
CANONICAL_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that comparing sees signs of zero and payloads of NaN."""
    return tensor.detach().contiguous().view(BITS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def tensors_in(saved: Any) -> dict[str, torch.Tensor]:
    """All tensors in nested dicts and lists, by their path."""
    if isinstance(saved, torch.Tensor):
        return {"": saved}
    items = saved.items() if isinstance(saved, dict) else enumerate(saved)
    return {
        f"{key}.{path}": tensor
        for key, value in items
        if isinstance(value, (dict, list, torch.Tensor))
        for path, tensor in tensors_in(value).items()
    }


def same_tensors(one: Any, other: Any) -> bool:
    """True if both have the same tensors, bit for bit."""
    one, other = tensors_in(one), tensors_in(other)
    assert one.keys() == other.keys()
    return all(same_bits(one[path], other[path]) for path in one)


def slot_elements(staging_bytes: int, itemsize: int) -> int:
    """Half the staging serves an operation; a slot is a quarter of that, in whole cache lines."""
    return staging_bytes // 2 // SLOTS // CACHE_LINE * CACHE_LINE // itemsize


@cache
def cut(count: int, parts: int, itemsize: int) -> tuple[slice, ...]:
    """`count` elements cut at cache lines as evenly as possible, the longer parts first."""
    per_line = CACHE_LINE // itemsize
    lines = np.array_split(np.arange(-(-count // per_line)), parts)
    ends = np.minimum(np.cumsum([len(part) for part in lines]) * per_line, count)
    return tuple(slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True))


# Arithmetic.


def widen(tensor: torch.Tensor) -> np.ndarray:
    """A contribution in the type that it accumulates in."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float().numpy()
    return tensor.numpy()


def in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """By numpy if it is in fp16: which NaN torch makes of one depends on processor and length."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.float16:
        return torch.from_numpy(tensor.numpy().astype(np.float32))
    return tensor.float()


def narrow(accumulated: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to nearest even, and gives a NaN its one canonical form."""
    tensor = torch.from_numpy(np.ascontiguousarray(accumulated)).to(dtype)
    if dtype.is_floating_point:
        nan = tensor.isnan()
        if dtype in CANONICAL_NAN:
            bits(tensor)[nan] = CANONICAL_NAN[dtype]
        else:
            tensor[nan] = float("nan")
    return tensor


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """NaN wins; the right one of equals, which matters for zeros of different sign."""
    return np.where((a < b) | (a != a), a, b)


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a > b) | (a != a), a, b)


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * b


COMBINE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": add,
    "avg": add,
    "min": smaller,
    "max": larger,
    "prod": times,
}


def finish(accumulated: np.ndarray, op: str, size: int) -> np.ndarray:
    """AVG's one division; integers truncate towards zero."""
    if op != "avg":
        return accumulated
    if accumulated.dtype.kind == "f":
        return accumulated / accumulated.dtype.type(size)
    quotient, rest = np.divmod(accumulated, accumulated.dtype.type(size))
    return (quotient + ((accumulated < 0) & (rest != 0))).astype(accumulated.dtype)


def fold(terms: list[torch.Tensor], op: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return reduce(COMBINE[op], [widen(term) for term in terms])


def complete(accumulated: np.ndarray, op: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return narrow(finish(accumulated, op, size), dtype)


# Orders.


def in_rank_order(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """One-shot and two-shot: rank 0, 1, ..., rounded once."""
    return complete(fold(inputs, op), op, len(inputs), inputs[0].dtype)


def around_the_ring(
    inputs: list[torch.Tensor], op: str, tile: int, ranks: int | None = None
) -> torch.Tensor:
    """Chunk c of a tile adds up from rank c on around the ring, rounded at every hop.

    `ranks`: how many an average is over, if not one per input.
    """
    size, dtype, count = len(inputs), inputs[0].dtype, inputs[0].numel()
    chunk_of = np.empty(count, dtype=np.int64)
    for begin in range(0, count, max(tile, 1)):
        in_tile = chunk_of[begin : begin + tile]
        for chunk, part in enumerate(cut(len(in_tile), size, dtype.itemsize)):
            in_tile[part] = chunk
    result = torch.empty_like(inputs[0])
    for chunk in range(size):
        mine = torch.from_numpy(np.flatnonzero(chunk_of == chunk))
        travelling, *others = [inputs[(chunk + hop) % size][mine] for hop in range(size)]
        for own in others[:-1]:
            travelling = narrow(fold([travelling, own], op), dtype)
        result[mine] = complete(fold([travelling, others[-1]], op), op, ranks or size, dtype)
    return result


class Node:
    """A node of a binary tree over consecutive numbers, numbered in order."""

    def __init__(self, first: int, count: int) -> None:
        power = 1 << (count.bit_length() - 1)  # the largest power of two that fits is the root
        self.rank = first + power - 1
        self.left = Node(first, power - 1) if power > 1 else None
        self.right = Node(first + power, count - power) if count > power else None

    def renumber(self, new_rank: Callable[[int], int]) -> Node:
        self.rank = new_rank(self.rank)
        for child in self.children():
            child.renumber(new_rank)
        return self

    def children(self) -> list[Node]:
        return [child for child in (self.left, self.right) if child is not None]

    def walk(self) -> list[Node]:
        return [self, *(node for child in self.children() for node in child.walk())]


@cache
def double_tree(size: int) -> tuple[Node, Node]:
    """Sanders, Speck, Traeff: the second tree mirrors an even world and shifts an odd one."""

    def second(number: int) -> int:
        return size - 1 - number if size % 2 == 0 else (number + 1) % size

    return Node(0, size), Node(0, size).renumber(second)


def up_the_trees(inputs: list[torch.Tensor], op: str, ranks: int | None = None) -> torch.Tensor:
    """Each half climbs its tree: left child, own, right child, rounded at every inner node."""
    size, dtype = len(inputs), inputs[0].dtype
    result = torch.empty_like(inputs[0])
    for root, half in zip(double_tree(size), cut(result.numel(), 2, dtype.itemsize), strict=True):

        def gathered(node: Node, half: slice = half) -> np.ndarray:
            terms = [inputs[node.rank][half]]
            if node.left is not None:
                terms.insert(0, partial(node.left))
            if node.right is not None:
                terms.append(partial(node.right))
            return fold(terms, op)

        def partial(node: Node, half: slice = half) -> torch.Tensor:
            if not node.children():
                return inputs[node.rank][half]
            return narrow(gathered(node), dtype)

        result[half] = complete(gathered(root), op, ranks or size, dtype)
    return result


def all_reduced(
    algorithm: str, inputs: list[torch.Tensor], op: str, *, staging_bytes: int, zero_copy: bool
) -> torch.Tensor:
    """The result of an all-reduce of flat tensors, one per rank."""
    if len(inputs) == 1:
        return inputs[0].clone()
    if algorithm == "ring":
        count, itemsize = inputs[0].numel(), inputs[0].element_size()
        tile = count if zero_copy else slot_elements(staging_bytes, itemsize)
        return around_the_ring(inputs, op, tile)
    if algorithm == "tree":
        return up_the_trees(inputs, op)
    return in_rank_order(inputs, op)
