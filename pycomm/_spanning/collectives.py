"""Collectives on CUDA tensors of a group that spans nodes, over NCCL.

The phases are those of csrc/cpu/internode/group.h, and so are the bits. Inside the nodes they are
collectives of a group of the node's ranks, between the nodes operations of NCCL
(pycomm/_runtime/carriers.py), and the sums in between are operations of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _work
from pycomm._inputs import host
from pycomm._inputs.dtypes import operation_of
from pycomm._spanning.between import Between, check_two_shot, copy, run_tiles
from pycomm._spanning.combine import combine
from pycomm._work import Work, dense_stand_ins

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm._runtime.carriers import Transfer
    from pycomm.group import Group

_TILE_BYTES = 4 << 20  # of one stripe


def launch(
    group: Group,
    collective: str,
    source: torch.Tensor,
    result: torch.Tensor,
    shape: torch.Size,
    op: str = "sum",
    *,
    label: str,
    algorithm: str = "two_shot",
    root: int = 0,
    written: bool = True,
    async_op: bool,
) -> Any:
    """Runs an operation over NCCL if the group has it and the tensors lie on a CUDA device.

    The arguments are those of :func:`pycomm._work.launch`, which runs all others.
    """
    span = group._span
    if span is None or not source.is_cuda or collective not in _FLOWS:
        return _work.launch(
            group, collective, source, result, shape, op, label=label, algorithm=algorithm,
            root=root, written=written, async_op=async_op,
        )  # fmt: skip
    check_two_shot(algorithm)
    operation_of(collective, algorithm, source.dtype, op, root)  # refuses what the dtype lacks
    increment_version(result)
    given, made, finish = dense_stand_ins(source, result)
    if given.numel():
        flat = given.view(-1)
        flat_result = flat if made is given else made.view(-1)
        exchange = Exchange(Between(span, source.device), flat, flat_result, op, root)
        span.enqueue(source.device, lambda: _FLOWS[collective](exchange), (given, made))
    finish()
    return Work(None) if async_op else result


@dataclass(frozen=True)
class Exchange:
    """One collective on flat tensors."""

    between: Between
    source: torch.Tensor
    result: torch.Tensor
    op: str
    root: int

    def all_reduce(self) -> None:
        """Reduces inside the nodes to stripes, then between nodes, and gathers."""
        if self.result is not self.source:
            self.result.copy_(self.source)
        unit = self.between.stripes * self.between.nodes
        tile = _TILE_BYTES // self.result.element_size() // self.between.nodes * unit
        spare: list[torch.Tensor] = []
        parts = torch.split(self.result, tile)
        run_tiles([_Tile(self.between, self.op, part, spare) for part in parts])

    def reduce_scatter(self) -> None:
        """Every rank gets the sums of its own block."""
        between, count = self.between, self.result.numel()
        if not between.even:
            whole = self.source.clone()
            Exchange(between, whole, whole, self.op, 0).all_reduce()
            self.result.copy_(whole.view(between.world, count)[between.rank])
            return
        # The i-th rank of a node adds up the blocks of the i-th ranks of all nodes.
        blocks = self.source.view(between.world, count)[between.by_index]
        mine = between.sum_to_carriers(blocks.view(between.stripes, -1), self.op)
        parts = torch.empty_like(mine)
        between.carriers.all_to_all(parts, mine).wait()
        self.result.copy_(combine(parts.view(between.nodes, count), self.op, between.world))

    def all_gather(self) -> None:
        """Every rank gets all blocks."""
        between, count = self.between, self.source.numel()
        if not between.even:  # the blocks of others are zeros
            own = self.source.clone()  # it may lie in the result
            self.result.zero_().view(between.world, count)[between.rank] = own
            bits = self.result.view(torch.uint8)
            Exchange(between, bits, bits, "bor", 0).all_reduce()
            return
        mine = self.source.new_empty(between.nodes * count)
        between.carriers.all_gather(mine, self.source).wait()
        blocks = self.source.new_empty((between.stripes, between.nodes * count))
        between.gather_from_carriers(blocks, mine)
        order = between.by_index
        self.result.view(between.world, count)[order] = blocks.view(between.world, count)

    def broadcast(self) -> None:
        """Sends the root's tensor inside its node, in stripes between nodes, and gathers them."""
        between, data = self.between, self.result
        node, index = between.place_of(self.root)
        if node == between.here:
            between.broadcast_inside(data, index)
        whole = _padded(data, between.stripes)
        stripes = whole.view(between.stripes, -1)
        mine = stripes[min(between.index, between.stripes - 1)].clone()
        if between.carries:
            between.carriers.broadcast(mine, node).wait()
        if node != between.here:
            between.gather_from_carriers(stripes, mine)
            data.copy_(whole[: data.numel()])


_FLOWS: dict[str, Callable[[Exchange], None]] = {
    "all_reduce": Exchange.all_reduce,
    "reduce_scatter": Exchange.reduce_scatter,
    "all_gather": Exchange.all_gather,
    "broadcast": Exchange.broadcast,
}


class _Tile:
    """A part of a tensor's all-reduce: the stages of csrc/core/algorithms/internode.h.

    `spare` holds memory of tiles that have ended, for those that begin.
    """

    def __init__(
        self, between: Between, op: str, data: torch.Tensor, spare: list[torch.Tensor]
    ) -> None:
        self._between, self._op, self._data, self._spare = between, op, data, spare
        self._whole = self._stripes = self._mine = self._parts = data
        self._transfer: Transfer | None = None

    def stage(self) -> None:
        """Adds up inside the node, and sends every node its part of this rank's stripe."""
        between = self._between
        self._whole = _padded(self._data, between.stripes * between.nodes)
        self._stripes = self._whole.view(between.stripes, -1)
        self._mine = between.sum_to_carriers(self._stripes, self._op)
        if between.carries:
            old = self._spare.pop() if self._spare else self._mine.new_empty(0)
            fits = old.numel() == self._mine.numel()
            self._parts = old if fits else host.ordinary(torch.empty_like, self._mine)
            self._transfer = between.carriers.all_to_all(self._parts, self._mine)

    def reduce(self) -> None:
        """Adds up what this node owns, in the order of nodes, and sends it to all."""
        between = self._between
        if self._transfer is not None:
            self._transfer.wait()
            sums = combine(self._parts.view(between.nodes, -1), self._op, between.world)
            self._transfer = between.carriers.all_gather(self._mine, sums)

    def gather(self) -> None:
        """Spreads the results inside the node."""
        if self._transfer is not None:
            self._transfer.wait()
            self._spare.append(self._parts)
        self._between.gather_from_carriers(self._stripes, self._mine)
        copy(self._data, self._whole[: self._data.numel()])


def _padded(data: torch.Tensor, unit: int) -> torch.Tensor:
    """A tensor's elements and so many zeros that their number is a multiple of `unit`."""
    missing = -data.numel() % unit
    return torch.cat([data, data.new_zeros(missing)]) if missing else data
