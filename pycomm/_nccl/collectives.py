"""Collectives on CUDA tensors of a group that spans nodes, over NCCL.

Phases and bits are the same as in csrc/cpu/internode/group.h. Inside a node, a group of the node's
ranks runs collectives. Between nodes, NCCL sends the data (pycomm/_nccl/process_groups.py). Torch
adds it up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.autograd.graph import increment_version

from pycomm import _C, _work
from pycomm._inputs import operation_of
from pycomm._runtime import host
from pycomm._work import Work, dense_stand_ins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pycomm._nccl.process_groups import (
        Collective,
        InternodeProcessGroups,
        StripePeers,
        Transfer,
    )
    from pycomm.group import Group

# Ranks and tiles of operations that span nodes.


class NodeTopology:
    """The ranks of this node, and the ranks of other nodes that carry the same stripe."""

    def __init__(self, span: InternodeProcessGroups, device: torch.device) -> None:
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
    def carriers(self) -> StripePeers:
        """The carriers of this rank's stripe."""
        assert self._carriers is not None
        return self._carriers

    @property
    def carries(self) -> bool:
        """True if this rank carries a stripe."""
        return self._carriers is not None

    def in_node_order(self, blocks: torch.Tensor) -> torch.Tensor:
        """Flat blocks of all ranks, node by node."""
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
        """This node's sums of each stripe's row; a carrier gets its own, others an unused row."""
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
        """Every rank of this node gets all rows; each carrier has one."""
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
    """Raises ValueError for an algorithm that does not run over NCCL."""
    if algorithm not in ("auto", "two_shot"):
        raise ValueError(
            f"algorithm must be auto or two_shot between nodes over NCCL, got {algorithm}"
        )


class Tile(Protocol):
    """The stages of a part of an operation; stages of several parts overlap."""

    def stage(self) -> None:
        """Starts to send contributions."""

    def reduce(self) -> None:
        """Adds up the received contributions, and starts to send the result."""

    def gather(self) -> None:
        """Stores the received results."""


def run_tiles(tiles: Sequence[Tile]) -> None:
    """Runs the stages of all tiles; while one tile is added up, others are sent."""
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


# Reductions over the parts of several nodes as operations of torch.
#
# The bits are the same as in csrc/core/reduce.h: 16-bit floats accumulate in fp32, integers wrap
# around, the mean divides once, and NaNs are canonical.

# Torch lacks arithmetic on these types; signed types give the same bits of sums and products.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OF_BOOL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


def _least(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.where((total < part) | (total != total), total, part)


def _most(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.where((total > part) | (total != total), total, part)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "min": _least,
    "max": _most,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def combine(parts: torch.Tensor, op: str, ranks: int) -> torch.Tensor:
    """Reduces over the first dimension, in its order.

    Args:
        parts: the contributions, contiguous, of a dtype that has the reduction. Overwritten.
        op: the reduction, by pycomm's name.
        ranks: the number of ranks that have contributed; the mean's divisor.

    Returns:
        A tensor of the same dtype, which may lie in `parts`.
    """
    dtype = parts.dtype
    if dtype.is_complex:
        real = torch.view_as_real(parts)
        return torch.view_as_complex(combine(real, op, ranks))
    if dtype == torch.bool:
        return combine(parts.view(torch.uint8), _OF_BOOL.get(op, op), ranks).view(dtype)
    if dtype in _SIGNED:
        return combine(parts.view(_SIGNED[dtype]), op, ranks).view(dtype)
    wide = _WIDE.get(dtype, dtype)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _FOLDS[op](total, part.to(wide))
    if op == "avg":
        # A tensor, because CUDA multiplies with the inverse of a number.
        divisor = torch.full((), ranks, dtype=wide, device=parts.device)
        total.div_(divisor, rounding_mode=None if wide.is_floating_point else "trunc")
    return rounded(total, dtype)


def rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum in the dtype of its result, with canonical NaNs; it may be the same tensor."""
    result = total.to(dtype)
    if dtype.is_floating_point:
        result.masked_fill_(result.isnan(), math.nan)  # processors make different NaNs
    return result


# Collectives on CUDA tensors of a group that spans nodes, over NCCL.

_TILE_BYTES = 4 << 20  # of one stripe


@dataclass(frozen=True)
class NcclExchange:
    """One collective on flat tensors."""

    between: NodeTopology
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
            NcclExchange(between, whole, whole, self.op, 0).all_reduce()
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
        if not between.even:  # other ranks' blocks are zeros
            own = self.source.clone()  # the source may lie in the result
            self.result.zero_().view(between.world, count)[between.rank] = own
            bits = self.result.view(torch.uint8)
            NcclExchange(between, bits, bits, "bor", 0).all_reduce()
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


def mean_flow(tensor: torch.Tensor, algorithm: str) -> Callable[[NodeTopology, int], None]:
    """A function that averages a part of a bucket in place, at a step."""
    check_two_shot(algorithm)
    return lambda between, _: NcclExchange(between, tensor, tensor, "avg", 0).all_reduce()


def _enqueued(collective: str, flow: Callable[[NcclExchange], None]) -> Collective:
    def run(
        span: InternodeProcessGroups,
        source: torch.Tensor,
        result: torch.Tensor,
        op: str,
        *,
        algorithm: str,
        root: int,
        async_op: bool,
    ) -> Any:
        check_two_shot(algorithm)
        operation_of(collective, algorithm, source.dtype, op, root)  # refuses wrong reductions
        increment_version(result)
        given, made, finish = dense_stand_ins(source, result)
        if given.numel():
            flat = given.view(-1)
            flat_result = flat if made is given else made.view(-1)
            exchange = NcclExchange(NodeTopology(span, source.device), flat, flat_result, op, root)
            span.enqueue(source.device, lambda: flow(exchange), (given, made))
        finish()
        return Work(None) if async_op else result

    return run


# Collectives that pycomm._work.launch() runs over NCCL; others go through host memory.
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _enqueued("all_reduce", NcclExchange.all_reduce),
    "reduce_scatter": _enqueued("reduce_scatter", NcclExchange.reduce_scatter),
    "all_gather": _enqueued("all_gather", NcclExchange.all_gather),
    "broadcast": _enqueued("broadcast", NcclExchange.broadcast),
}


class _Tile:
    """A part of a tensor's all-reduce: the stages of csrc/core/algorithms/internode.h.

    `spare` holds memory of finished tiles, for new tiles.
    """

    def __init__(
        self, between: NodeTopology, op: str, data: torch.Tensor, spare: list[torch.Tensor]
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
        """Adds up the elements that this node owns, in the order of nodes, and sends the sums."""
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
    """A tensor's elements, padded with zeros to a multiple of `unit`."""
    missing = -data.numel() % unit
    return torch.cat([data, data.new_zeros(missing)]) if missing else data
