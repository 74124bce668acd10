"""The expected results of groups that span nodes, computed with numpy without pycomm.

The ranks of a node add up first, in order, then the nodes do, in order. Uncompressed, what a
node's ranks make together is rounded to the tensor's type. Compressed, a node is one rank of
the one-node model, with the sums of its ranks' gradients, residuals and velocities, stripe by
stripe; the rank that carries a stripe keeps what is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import golden
import golden_compression as reference
import numpy as np
import torch


def by_node(things: list, nodes: list[int]) -> list[list]:
    ends = list(itertools.accumulate(nodes))
    return [things[end - count : end] for count, end in zip(nodes, ends, strict=True)]


def ring_tile(count: int, nodes: int, unit: int, itemsize: int) -> int:
    """Elements of a ring's tiles: as few equal ones as keep a node's chunk within a MiB."""
    period = nodes * unit
    tiles = -(-count // (nodes * (1 << 20) // itemsize)) or 1
    return -(-count // (tiles * period)) * period


def all_reduced(
    inputs: list[torch.Tensor], op: str, nodes: list[int], algorithm: str = "two_shot"
) -> torch.Tensor:
    dtype, itemsize = inputs[0].dtype, inputs[0].element_size()
    partial = [
        own[0] if len(own) == 1 else golden.narrow(golden.fold(own, op), dtype)
        for own in by_node(inputs, nodes)
    ]
    if algorithm == "two_shot":
        return golden.complete(golden.fold(partial, op), op, len(inputs), dtype)
    stripes = []
    for part in golden.cut(inputs[0].numel(), min(nodes), itemsize):
        stripe = [x[part] for x in partial]
        if algorithm == "tree":
            stripes.append(golden.up_the_trees(stripe, op, len(inputs)))
            continue
        per_line = golden.CACHE_LINE // itemsize
        tile = ring_tile(stripe[0].numel(), len(nodes), per_line, itemsize)
        stripes.append(golden.around_the_ring(stripe, op, tile, len(inputs)))
    return torch.cat(stripes)


def summed(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0] + np.float32(0)
    for array in arrays[1:]:
        total = total + array
    return total


@dataclass
class Striped(reference.Reduction):
    """Nodes as ranks: results are means over all ranks, and each stripe has its random bits."""

    ranks: int = 1
    stripes: int = 1
    stripe: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.divisor = np.float32(self.ranks if self.op == "avg" else 1)

    def pass_on(self, rank: int, values: np.ndarray, at: np.ndarray) -> np.ndarray:
        sent = self.codec.through(values, rank * self.stripes + self.stripe, self.index[at])
        self.kept[rank][at] = values - sent
        return sent

    def slot(self) -> int:
        unit = self.codec.unit
        return ring_tile(self.count, self.size, unit, self.codec.payload_size) or unit


@dataclass
class Exchange:
    """One compressed all-reduce of flat tensors; residuals change in place."""

    inputs: list[torch.Tensor]
    nodes: list[int]
    op: str = "avg"
    residuals: list[np.ndarray] | None = None
    velocities: list[np.ndarray] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        self.count, self.dtype = self.inputs[0].numel(), self.inputs[0].dtype
        self.stripes = min(self.nodes)
        self.index = np.arange(self.offset, self.offset + self.count)
        self.result = torch.zeros(self.count, dtype=self.dtype)

    def of_nodes(self, arrays: list[np.ndarray] | None, at: np.ndarray) -> list | None:
        if arrays is None:
            return None
        return [summed([a[at] for a in own]) for own in by_node(arrays, self.nodes)]

    def keep(self, arrays: list[np.ndarray] | None, kept: list | None, at: np.ndarray, s: int):
        """The rank that carries the stripe has it all."""
        if arrays is None:
            return
        for own, carried in zip(by_node(arrays, self.nodes), kept, strict=True):
            for i, array in enumerate(own):
                array[at] = carried if i == s else 0

    def stripe(self, s: int, turn: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Its elements, the index of the first among all the stripe's, the owners' nodes."""
        length = turn * len(self.nodes)
        whole = np.arange(self.offset + self.count)
        mine = whole // length % self.stripes == s
        at = np.flatnonzero(mine[self.offset :])
        return at, int(mine[: self.offset].sum()), self.index[at] % length // turn

    def put(self, made: torch.Tensor, at: np.ndarray, owners: np.ndarray, kept: list | None):
        """The result in the tensor's type; its owner's residual keeps the rounding error."""
        self.result[torch.from_numpy(at)] = golden.narrow(made.numpy(), self.dtype)
        divisor = np.float32(len(self.inputs) if self.op == "avg" else 1)
        lost = (made.numpy() - reference.rounded(made.numpy(), self.dtype)) * divisor
        for node, residual in enumerate(kept or []):
            residual[owners == node] += lost[owners == node]

    def blocks(self, codec: reference.Codec, algorithm: str = "two_shot") -> torch.Tensor:
        reduce = reference.ALGORITHMS[algorithm]
        if max(self.nodes) == 1:  # as on one node
            ranks = len(self.inputs)
            work = Striped(self.inputs, codec, self.op, self.residuals, self.offset, ranks=ranks)
            return reduce(work)
        for s in range(self.stripes):
            at, offset, owners = self.stripe(s, reference.OWNED)
            if not len(at):
                continue
            gradients = self.of_nodes([golden.widen(x) for x in self.inputs], at)
            residuals = self.of_nodes(self.residuals, at)
            work = Striped(
                [torch.from_numpy(g) for g in gradients],
                codec,
                self.op,
                residuals,
                offset,
                ranks=len(self.inputs),
                stripes=self.stripes,
                stripe=s,
            )
            made = reduce(work)
            self.put(made, at, owners, residuals)
            self.keep(self.residuals, residuals, at, s)
        return self.result

    def top_k(self, k: int, values: torch.dtype, momentum: float) -> torch.Tensor:
        for s in range(self.stripes):
            at, offset, owners = self.stripe(s, reference.CHUNK)
            if not len(at):
                continue
            gradients = self.of_nodes([golden.widen(x) for x in self.inputs], at)
            residuals = self.of_nodes(self.residuals, at)
            velocities = self.of_nodes(self.velocities, at)
            made = reference.top_k(
                [torch.from_numpy(g) for g in gradients],
                -(-k * len(at) // self.count),
                values,
                self.op,
                residuals,
                velocities,
                momentum,
                offset,
                ranks=len(self.inputs),
            )
            self.put(made, at, owners, residuals)
            self.keep(self.residuals, residuals, at, s)
            self.keep(self.velocities, velocities, at, s)
        return self.result
