"""What operations that span nodes have in common: their ranks and their tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch

from pycomm import _C, _work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycomm._runtime.carriers import Carriers
    from pycomm._runtime.span import Span
    from pycomm.group import Group


class Between:
    """The ranks of this node, and the ranks of other nodes that carry the same stripe."""

    def __init__(self, span: Span, device: torch.device) -> None:
        self.here, self.index, self.stripes = span.here, span.index, span.stripes
        self.nodes, self.world, self.rank = len(span.nodes), span.world, span.rank
        self.even, self.place_of = span.even, span.place_of
        self.single = self.nodes == self.world
        self.by_index = span.by_index(device) if span.even else None
        self.sizes = [len(ranks) for ranks in span.nodes]
        self._order = span.node_order(device)
        self._node = cast("Group | None", span.node)
        self._carriers = span.carriers

    @property
    def carriers(self) -> Carriers:
        """The carriers of this rank's stripe."""
        assert self._carriers is not None
        return self._carriers

    @property
    def carries(self) -> bool:
        """True if this rank carries a stripe."""
        return self._carriers is not None

    def in_node_order(self, blocks: torch.Tensor) -> torch.Tensor:
        """Flat blocks of all ranks, those of a node one behind the other."""
        if self._order is None:
            return blocks
        return blocks.view(self.world, -1)[self._order].view(-1)

    def in_rank_order(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`in_node_order`."""
        if self._order is None:
            return blocks
        ordered = torch.empty_like(blocks)
        ordered.view(self.world, -1)[self._order] = blocks.view(self.world, -1)
        return ordered

    def sum_to_carriers(self, stripes: torch.Tensor, op: str) -> torch.Tensor:
        """This node's sums of a row per stripe; a carrier gets its own, the others something."""
        op = "sum" if op == "avg" else op  # divided once, between nodes
        mine = stripes[min(self.index, self.stripes - 1)]
        if self._node is None:
            return mine
        if self.even:
            sums = torch.empty_like(mine)
            self._inside("reduce_scatter", stripes, sums, sums.shape, op)
            return sums
        for i, stripe in enumerate(stripes):
            self._inside("reduce", stripe, stripe, stripe.shape, op, i)
        return mine

    def gather_from_carriers(self, stripes: torch.Tensor, mine: torch.Tensor) -> None:
        """Every rank of this node gets all rows, of which a carrier has its own."""
        if self._node is None:
            copy(stripes[0], mine)
        elif self.even:
            self._inside("all_gather", mine, stripes, mine.shape)
        else:
            if self.carries:
                copy(stripes[self.index], mine)
            for i, stripe in enumerate(stripes):
                self.broadcast_inside(stripe, i)

    def broadcast_inside(self, data: torch.Tensor, index: int) -> None:
        """Copies the tensor of one of this node's ranks to the others."""
        if self._node is not None:
            self._inside("broadcast", data, data, data.shape, root=index)

    def _inside(
        self,
        collective: str,
        source: torch.Tensor,
        result: torch.Tensor,
        shape: torch.Size,
        op: str = "sum",
        root: int = 0,
    ) -> None:
        assert self._node is not None
        _work.launch(
            self._node, collective, source, result, shape, op, label="", root=root,
            written=collective != "reduce" or root == self.index, async_op=False,
        )  # fmt: skip


def check_two_shot(algorithm: str) -> None:
    """Raises ValueError for an algorithm that does not span nodes."""
    if algorithm not in ("auto", "two_shot"):
        raise ValueError(
            f"algorithm must be auto or two_shot in a group that spans nodes, got {algorithm}"
        )


class Tile(Protocol):
    """The stages of a part of an operation; those of several parts overlap."""

    def stage(self) -> None:
        """Starts to send contributions."""

    def reduce(self) -> None:
        """Adds up what has come, and starts to send the result."""

    def gather(self) -> None:
        """Takes the results that have come."""


def run_tiles(tiles: Sequence[Tile]) -> None:
    """Runs the stages of all tiles; while one tile is added up, others are on the wire."""
    depth = _C.pipeline_depth
    for step in range(len(tiles) + 2 * depth):
        if step < len(tiles):
            tiles[step].stage()
        if 0 <= step - depth < len(tiles):
            tiles[step - depth].reduce()
        if step >= 2 * depth:
            tiles[step - 2 * depth].gather()


def copy(to: torch.Tensor, given: torch.Tensor) -> None:
    if to.data_ptr() != given.data_ptr():
        to.copy_(given)
