"""The expected results of compressed reduce-scatters, computed with numpy without pycomm.

A node's ranks add up first, in order. For each node's blocks, the rank that carries a stripe adds
its residual to the stripe and encodes it. The decoded values add up in the order of nodes, and are
divided once. On one node, every rank acts as a node of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import golden
import golden_compression as reference
import numpy as np
import torch
from golden_nodes import summed


@dataclass
class Scatter:
    """One reduce-scatter of flat tensors; residuals change in place.

    Attributes:
        inputs: a tensor per rank.
        nodes: the ranks of each node.
        codec: how contributions are encoded.
        op: "avg" or "sum".
        residuals: one per rank, or None.
        offset: the index of the first element, for random bits.
    """

    inputs: list[torch.Tensor]
    nodes: list[list[int]]
    codec: reference.Codec
    op: str = "avg"
    residuals: list[np.ndarray] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        self.dtype = self.inputs[0].dtype
        self.order = list(chain(*self.nodes))
        self.block = self.inputs[0].numel() // len(self.order)
        self.divisor = np.float32(len(self.order) if self.op == "avg" else 1)
        self.stripes = min(map(len, self.nodes))
        # Where the elements lie in a tensor, in the order of nodes.
        self.places = np.concatenate(
            [np.arange(rank * self.block, (rank + 1) * self.block) for rank in self.order]
        )
        self.wide = [golden.widen(x) for x in self.inputs]

    def part(self, begin: int, count: int, stripe: int) -> np.ndarray:
        """A stripe of so many elements, cut at whole blocks of the codec."""
        unit = self.codec.unit
        pieces = np.array_split(np.arange(-(-count // unit)), self.stripes)
        ends = np.minimum(np.cumsum([len(piece) for piece in pieces]) * unit, count)
        bounds = [0, *ends]
        return np.arange(begin + bounds[stripe], begin + bounds[stripe + 1])

    def contribution(self, node: int, stripe: int, index: np.ndarray) -> np.ndarray:
        """What a node sends of the elements with these indices, in the order of nodes."""
        ranks, places = self.nodes[node], self.places[index]
        with np.errstate(all="ignore"):
            values = summed([self.wide[rank][places] for rank in ranks])
            if self.residuals is not None:
                values = values + self.residuals[ranks[stripe]][places]
            stream = node * self.stripes + stripe
            sent = self.codec.through(values, stream, self.offset + index)
            if self.residuals is not None:
                self.residuals[ranks[stripe]][places] = values - sent
        return sent

    def run(self) -> list[torch.Tensor]:
        """Every rank's block of the result."""
        made = torch.empty(len(self.places), dtype=self.dtype)
        begin = 0
        for ranks in self.nodes:
            count = len(ranks) * self.block
            for stripe in range(self.stripes):
                index = self.part(begin, count, stripe)
                sent = [self.contribution(m, stripe, index) for m in range(len(self.nodes))]
                with np.errstate(all="ignore"):
                    mean = sent[0]
                    for one in sent[1:]:
                        mean = mean + one
                    mean = mean / self.divisor
                stored = golden.narrow(mean, self.dtype)
                made[torch.from_numpy(index)] = stored
                if self.residuals is not None and self.dtype != torch.float32:
                    lost = (mean - golden.widen(stored)) * self.divisor
                    self.residuals[ranks[stripe]][self.places[index]] += lost
            begin += count
        blocks = made.split(self.block) if self.block else [made] * len(self.order)
        return [blocks[self.order.index(rank)] for rank in range(len(self.order))]
