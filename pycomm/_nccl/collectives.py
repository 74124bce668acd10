"""Collectives on CUDA tensors of a group that spans nodes, over NCCL.

Phases and bits are the same as in csrc/cpu/internode/group.h: reduce inside the nodes to stripes,
two-shot between nodes, and all-gather inside the nodes. Inside a node, a group of the node's ranks
runs collectives. Between nodes, NCCL sends the data (pycomm/_nccl/process_groups.py), and torch
adds it up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from pycomm import _C, _work
from pycomm._inputs import operation_of
from pycomm._runtime.cuda import current_stream
from pycomm._runtime.plan import check_over_nccl
from pycomm._work import Work, dense_stand_ins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pycomm._nccl.process_groups import Collective, InternodeProcessGroups
    from pycomm.group import Group

# The phases inside a node. A tensor with a row per stripe has them in order.


def sum_to_carriers(span: InternodeProcessGroups, rows: torch.Tensor, op: str) -> torch.Tensor:
    """This node's sums of each row; a carrier gets its own, others an unused row."""
    op = "sum" if op == "avg" else op  # divided once, between nodes
    mine = rows[span.stripe]
    if span.node is None:
        return mine
    if span.even:
        sums = torch.empty_like(mine)
        _inside(span, "reduce_scatter", rows, sums, op=op)
        return sums
    for i, row in enumerate(rows):
        _inside(span, "reduce", row, row, op=op, root=i)
    return mine


def gather_from_carriers(
    span: InternodeProcessGroups, rows: torch.Tensor, mine: torch.Tensor
) -> None:
    """Every rank of this node gets all rows; each carrier has one."""
    if span.even and span.node is not None:
        _inside(span, "all_gather", mine, rows)
        return
    if span.carries:
        copy(rows[span.index], mine)
    for i, row in enumerate(rows):
        broadcast_inside(span, row, i)


def broadcast_inside(span: InternodeProcessGroups, data: torch.Tensor, index: int) -> None:
    """Copies the tensor of one of this node's ranks to the others."""
    if span.node is not None:
        _inside(span, "broadcast", data, data, root=index)


def _inside(
    span: InternodeProcessGroups,
    collective: str,
    source: torch.Tensor,
    result: torch.Tensor,
    op: str = "sum",
    root: int = 0,
) -> None:
    block = min(source, result, key=torch.Tensor.numel)
    _work.launch(
        cast("Group", span.node), collective, source, result, block.shape, op, label="", root=root,
        written=collective != "reduce" or root == span.index, async_op=False,
    )  # fmt: skip


def copy(to: torch.Tensor, given: torch.Tensor) -> None:
    if to.data_ptr() != given.data_ptr():
        to.copy_(given)


# The phases between nodes. Parts of a tensor overlap: while one is added up, others are sent.


def run_parts(parts: Sequence[Iterator[None]]) -> None:
    """Runs generators that stop after they have sent this node's contribution, and its result."""
    depth = _C.pipeline_depth
    for step in range(len(parts) + 2 * depth):
        for begun in (step, step - depth, step - 2 * depth):
            if 0 <= begun < len(parts):
                next(parts[begun], None)


# Reductions over the parts of several nodes as operations of torch.
#
# The bits are the same as in csrc/core/reduce.h: 16-bit floats accumulate in fp32, integers wrap
# around, the mean divides once, and NaNs are canonical.

# Torch lacks arithmetic on some types; these give the same bits of sums and products.
_ALIKE = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
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
    if dtype in _ALIKE:
        op = _OF_BOOL.get(op, op) if dtype == torch.bool else op
        return combine(parts.view(_ALIKE[dtype]), op, ranks).view(dtype)
    wide = _WIDE.get(dtype, dtype)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _FOLDS[op](total, part.to(wide))
    return rounded(divided(total, ranks) if op == "avg" else total, dtype)


def divided(sums: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divides sums; integers are rounded toward zero."""
    if divisor == 1:
        return sums
    # By a tensor, because CUDA multiplies with the inverse of a number.
    by = torch.full((), divisor, dtype=sums.dtype, device=sums.device)
    return sums.div(by, rounding_mode=None if sums.dtype.is_floating_point else "trunc")


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

    span: InternodeProcessGroups
    source: torch.Tensor
    result: torch.Tensor
    op: str = "sum"
    root: int = 0

    def all_reduce(self) -> None:
        """Every rank gets the sums, in tiles."""
        if self.result is not self.source:
            self.result.copy_(self.source)
        unit = self.span.stripes * len(self.span.nodes)
        tile = _TILE_BYTES // self.result.element_size() // len(self.span.nodes) * unit
        run_parts([self._all_reduce(part, unit) for part in torch.split(self.result, tile)])

    def _all_reduce(self, data: torch.Tensor, unit: int) -> Iterator[None]:
        """A part; its phases are those of csrc/core/algorithms/internode.h."""
        span, whole = self.span, _padded(data, unit)
        rows = whole.view(span.stripes, -1)
        mine = sum_to_carriers(span, rows, self.op)
        if span.carries:
            parts = torch.empty_like(mine)
            transfer = span.carriers.all_to_all(parts, mine)
        yield
        if span.carries:
            transfer.wait()
            sums = self._combined(parts)
            transfer = span.carriers.all_gather(mine, sums)
        yield
        if span.carries:
            transfer.wait()
        gather_from_carriers(span, rows, mine)
        copy(data, whole[: data.numel()])

    def _combined(self, parts: torch.Tensor) -> torch.Tensor:
        """The sums of the nodes' contributions to what this node owns, in the order of nodes."""
        return combine(parts.view(len(self.span.nodes), -1), self.op, self.span.world)

    def reduce_scatter(self) -> None:
        """Every rank gets the sums of its own block."""
        span, count = self.span, self.result.numel()
        if not span.even:
            whole = self.source.clone()
            reduce_in_place(span, whole, self.op)
            self.result.copy_(whole.view(span.world, count)[span.rank])
            return
        # The i-th rank of a node adds up the blocks of the i-th ranks of all nodes.
        blocks = self.source.view(span.world, count)[self._by_index()]
        mine = sum_to_carriers(span, blocks.view(span.stripes, -1), self.op)
        parts = torch.empty_like(mine)
        span.carriers.all_to_all(parts, mine).wait()
        self.result.copy_(self._combined(parts))

    def all_gather(self) -> None:
        """Every rank gets all blocks."""
        span, count = self.span, self.source.numel()
        if not span.even:  # other ranks' blocks are zeros
            own = self.source.clone()  # the source may lie in the result
            self.result.zero_().view(span.world, count)[span.rank] = own
            reduce_in_place(span, self.result.view(torch.uint8), "bor")
            return
        mine = self.source.new_empty(len(span.nodes) * count)
        span.carriers.all_gather(mine, self.source).wait()
        rows = self.source.new_empty((span.stripes, len(span.nodes) * count))
        gather_from_carriers(span, rows, mine)
        alike = _ALIKE.get(self.source.dtype, self.source.dtype)
        blocks = self.result.view(alike).view(span.world, -1)
        blocks[self._by_index()] = rows.view(alike).view(span.world, -1)

    def _by_index(self) -> torch.Tensor:
        """The ranks of equal nodes: the first rank of every node, then the second."""
        return self.span.node_order(self.source.device).view(-1, self.span.stripes).t().flatten()

    def broadcast(self) -> None:
        """Sends the root's tensor inside its node, in stripes between nodes, and gathers them."""
        span, data = self.span, self.result
        node, index = span.place_of(self.root)
        if node == span.here:
            broadcast_inside(span, data, index)
        whole = _padded(data, span.stripes)
        rows = whole.view(span.stripes, -1)
        mine = rows[span.stripe].clone()
        if span.carries:
            span.carriers.broadcast(mine, node).wait()
        if node != span.here:
            gather_from_carriers(span, rows, mine)
            data.copy_(whole[: data.numel()])


def reduce_in_place(span: InternodeProcessGroups, data: torch.Tensor, op: str) -> None:
    """An all-reduce of a flat tensor."""
    NcclExchange(span, data, data, op).all_reduce()


def mean_flow(
    tensor: torch.Tensor, algorithm: str
) -> Callable[[InternodeProcessGroups, int], None]:
    """A function that averages a part of a bucket in place, at a step."""
    check_over_nccl(algorithm)
    return lambda span, _: reduce_in_place(span, tensor, "avg")


def _padded(data: torch.Tensor, unit: int) -> torch.Tensor:
    """A tensor's elements, padded with zeros to a multiple of `unit`."""
    missing = -data.numel() % unit
    return torch.cat([data, data.new_zeros(missing)]) if missing else data


def _enqueued(flow: Callable[[NcclExchange], None]) -> Collective:
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
        check_over_nccl(algorithm)
        operation_of(flow.__name__, algorithm, source.dtype, op, root)  # refuses wrong reductions
        increment_version(result)
        given, made, finish = dense_stand_ins(source, result)
        if given.numel():
            flat = given.view(-1)
            flat_result = flat if made is given else made.view(-1)
            exchange = NcclExchange(span, flat, flat_result, op, root)
            span.enqueue(source.device, lambda: flow(exchange), (given, made))
        finish()
        return Work(None, stream=current_stream(source)) if async_op else result

    return run


# Collectives that pycomm._work.launch() runs over NCCL; others go through host memory.
COLLECTIVES: dict[str, Collective] = {
    flow.__name__: _enqueued(flow)
    for flow in (
        NcclExchange.all_reduce,
        NcclExchange.reduce_scatter,
        NcclExchange.all_gather,
        NcclExchange.broadcast,
    )
}
