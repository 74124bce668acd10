"""Compressed reduce-scatters on CUDA tensors of a group that spans nodes, over NCCL.

Phases and bits are the same as in csrc/cpu/internode/group.h. A node's ranks add their gradients in
fp32. The blocks of each node are consecutive, and each carrier has a stripe of them. The carrier
encodes its part for each node and sends it there. The node adds these parts, and its ranks collect
the stripes. Sums are not encoded again.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pycomm._nccl.collectives import NcclExchange, NodeTopology, rounded
from pycomm._nccl.compressed import (
    CodedCall,
    ShardCodec,
    agree,
    divided,
    nonfinite,
    part_of,
    preflight,
    sendable,
)
from pycomm.compression import SMALLEST_BLOCK, Int8

if TYPE_CHECKING:
    from collections.abc import Iterable


def reduce_scatter(between: NodeTopology, looks: bool, call: CodedCall) -> torch.Tensor | None:
    """Runs the operation: `call.source` holds a block per rank, and each rank gets its own.

    Returns:
        Whether a value was not finite, or too large, on any rank; None without `looks`.
    """
    if not call.result.numel():
        return None
    cuts = _Cuts(between, call)
    value = gradient = cuts.collect(between, call.source.float())
    residual = None if call.residual is None else between.in_node_order(call.residual)
    mine = cuts.of(between.index) if between.carries else []
    if residual is not None and mine:
        value = gradient + _joined(residual, mine)
    flags = preflight(between, call, value, gradient) if mine else None
    found = agree(between, call, flags)
    made = lost = None
    if mine:
        value = sendable(between, call, value, found)
        made, lost = _exchange(between, call, value, mine)
    cuts.spread(between, made, call.result)
    if call.residual is None:
        flag = nonfinite(call.result).view(1).to(torch.uint8)
        NcclExchange(between, flag, flag, "bor", 0).all_reduce()
        return flag[0].bool() if looks else None
    assert found is not None
    assert residual is not None
    if lost is not None:
        new = residual.clone()
        for part, values in zip(mine, lost, strict=True):
            new[part] = values
        new = between.in_rank_order(new)
        call.residual.copy_(torch.where(found.keeps, new, call.residual))
    return found.overflow | nonfinite(call.result) if looks else None  # all ranks know already


def _exchange(
    between: NodeTopology, call: CodedCall, value: torch.Tensor, mine: list[slice]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """This node's sums of this rank's stripe, and the new residuals of the parts sent."""
    counts = [part.stop - part.start for part in mine]
    values = torch.split(value, counts)
    wires = ShardCodec(call.compression, call.step, value.device, call.codec, len(value), 0)
    outgoing = wires.rooms(counts)
    stream = between.here * between.stripes + between.index
    lost = []
    for part, given, wire in zip(mine, values, outgoing, strict=True):
        wires.encode(given, wire, stream=stream, places=(call.offset + part.start, 0, 0))
        decoded = torch.empty_like(given)
        if call.residual is not None:
            wires.decode(wire, decoded)
            lost.append(given - decoded)
    incoming = torch.empty_like(outgoing)
    between.carriers.all_to_all(incoming, outgoing).wait()
    total = torch.empty_like(values[between.here])
    for node, wire in enumerate(incoming):
        wires.decode(wire, total, add=node > 0)
    divisor = call.divisor(between)
    mean = divided(total, divisor)
    made = rounded(mean, call.result.dtype)
    if lost and made.dtype != mean.dtype:
        lost[between.here] += (mean - made.float()) * divisor
    return made, lost


class _Cuts:
    """Each stripe's parts of the blocks of all nodes, in node order."""

    def __init__(self, between: NodeTopology, call: CodedCall) -> None:
        block, compression = call.result.numel(), call.compression
        unit = compression.block if isinstance(compression, Int8) else SMALLEST_BLOCK
        sizes = [ranks * block for ranks in between.sizes]
        begins = [0, *itertools.accumulate(sizes)]
        self._here = slice(begins[between.here], begins[between.here + 1])
        self._stripes = [
            [_moved(part_of(size, between.stripes, stripe, unit), begin)
             for size, begin in zip(sizes, begins, strict=False)]
            for stripe in range(between.stripes)
        ]  # fmt: skip

    def of(self, stripe: int) -> list[slice]:
        """The stripe's part of each node's blocks."""
        return self._stripes[stripe]

    def collect(self, between: NodeTopology, wide: torch.Tensor) -> torch.Tensor:
        """This node's sums; a carrier gets its stripe, and other ranks' results are unused."""
        ordered = between.in_node_order(wide)
        if between.single:
            return ordered
        rows = _rows(ordered, self._stripes)
        row = between.sum_to_carriers(rows, "sum")
        if not between.carries:
            return row
        return row[: sum(part.stop - part.start for part in self.of(between.index))]

    def spread(
        self, between: NodeTopology, made: torch.Tensor | None, result: torch.Tensor
    ) -> None:
        """Writes this node's blocks to its ranks."""
        if between.single and made is not None:
            result.copy_(made)
            return
        parts = [parts[between.here] for parts in self._stripes]
        width = max(part.stop - part.start for part in parts)
        rows = result.new_zeros((between.stripes, width))
        row = result.new_zeros(width)
        if made is not None:
            row[: len(made)] = made
        between.gather_from_carriers(rows, row)
        blocks = torch.cat(
            [row[: part.stop - part.start] for row, part in zip(rows, parts, strict=True)]
        )
        result.copy_(blocks.view(-1, result.numel())[between.index])


def _moved(part: slice, begin: int) -> slice:
    return slice(begin + part.start, begin + part.stop)


def _joined(tensor: torch.Tensor, parts: Iterable[slice]) -> torch.Tensor:
    return torch.cat([tensor[part] for part in parts])


def _rows(tensor: torch.Tensor, stripes: list[list[slice]]) -> torch.Tensor:
    """One row per stripe with its parts."""
    made = [_joined(tensor, parts) for parts in stripes]
    rows = tensor.new_zeros((len(made), max(map(len, made))))
    for row, values in zip(rows, made, strict=True):
        row[: len(values)] = values
    return rows
