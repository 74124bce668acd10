"""Compressed all-reduces on CUDA tensors of a group that spans nodes, over NCCL.

The phases are those of csrc/cpu/internode/group.h, and so are the bits:

  1. Collect: each node adds the gradients and residuals of its ranks in fp32. Each carrier gets its
     stripe of the sums.
  2. Stage: each carrier encodes the parts that the nodes own of its stripe, and sends each node
     its part. What the encoding loses stays in the residual.
  3. Reduce: the owner adds the parts in node order, encodes the sums, and sends them to all nodes.
  4. Gather: each carrier decodes the sums, and its node collects the stripes.

Top-k selects from the whole stripe before phase 2, and in phase 3 the owner sends its share of the
largest sums (csrc/core/codecs/topk.h). The host reads nothing that a device has computed, so a
CUDA graph can capture the operation. If a stripe takes S encoded bytes, each of H nodes sends and
receives (H-1)/H S in phase 2 and again in phase 3; lists of top-k take twice that in phase 2.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._spanning.between import Between, run_tiles
from pycomm._spanning.call import (
    CodedCall,
    Found,
    agree,
    divided,
    findings,
    nonfinite,
    sendable,
)
from pycomm._spanning.combine import rounded
from pycomm._spanning.deal import Deal
from pycomm._spanning.wires import Wires
from pycomm.compression import Compression, Int8, TopK

if TYPE_CHECKING:
    from pycomm._runtime.carriers import Transfer

_TILE_ELEMENTS = 4 << 20


def all_reduce(between: Between, looks: bool, call: CodedCall) -> torch.Tensor | None:
    """Runs the operation.

    Returns:
        Whether a value was not finite, or too large; None if it does not look.
    """
    for kept, copy in (
        (call.residual, call.residual_before),
        (call.velocity, call.velocity_before),
    ):
        if kept is not None and copy is not None:
            copy.copy_(kept)
    if not call.source.numel():
        return None
    turn = between.nodes * _owned(call.compression)
    stripes = Deal(call.offset, call.source.numel(), turn, between.stripes)
    gradient = _collect(between, stripes, call.source)
    residual, velocity = (
        None if kept is None else _collect(between, stripes, kept)
        for kept in (call.residual, call.velocity)
    )
    stripe = None
    if between.carries:
        stripe = _Stripe(between, call, stripes, gradient, residual, velocity)
    flags = None if stripe is None else stripe.find()
    found = agree(between, call, flags)
    result = None if stripe is None else stripe.exchange(found)
    _spread(between, stripes, result, call.result)
    for kept, made in (
        (call.residual, None if stripe is None else stripe.residual),
        (call.velocity, None if stripe is None else stripe.velocity),
    ):
        if kept is not None and found is not None:
            _store(between, stripes, made, kept, found.keeps)
    if not looks:
        return None
    seen = nonfinite(call.result)
    return seen if found is None else seen | found.overflow


def _owned(compression: Compression) -> int:
    """The number of elements after which the next node owns."""
    return _C.topk_chunk if isinstance(compression, TopK) else _C.owned_elements


def _collect(between: Between, stripes: Deal, tensor: torch.Tensor) -> torch.Tensor:
    """This node's sums in fp32: a carrier gets its stripe, other ranks something."""
    wide = tensor.float()
    if between.single:
        return wide
    rows = stripes.rows(wide)
    if rows.data_ptr() == tensor.data_ptr():
        rows = rows.clone()  # sums may be made in place
    return between.sum_to_carriers(rows, "sum")[stripes.part(between.index)]


def _spread(
    between: Between, stripes: Deal, mine: torch.Tensor | None, result: torch.Tensor
) -> None:
    """Writes all stripes to this node's ranks."""
    if between.single:
        return
    rows = result.new_empty((between.stripes, stripes.width))
    row = rows[0]
    if mine is not None:
        row = result.new_zeros(stripes.width)
        row[stripes.part(between.index)] = rounded(mine, result.dtype)
    between.gather_from_carriers(rows, row)
    stripes.collect(rows, result)


def _store(
    between: Between,
    stripes: Deal,
    mine: torch.Tensor | None,
    kept: torch.Tensor,
    keeps: torch.Tensor,
) -> None:
    """Writes the new values of this rank's stripe; those of other stripes become zero."""
    if between.single and mine is not None:
        kept.copy_(torch.where(keeps, mine, kept))
        return
    rows = kept.new_zeros((between.stripes, stripes.width))
    if mine is not None:
        rows[between.index][stripes.part(between.index)] = mine
    new = torch.empty_like(kept)
    stripes.collect(rows, new)
    kept.copy_(torch.where(keeps, new, kept))


class _Stripe:
    """This rank's stripe of a call.

    Attributes:
        value: what this node contributes.
        residual: the new residual; None without one.
        velocity: the new velocity; None without one.
        first: the index of the first element among those of the whole tensor's stripe.
        count: the number of elements.
        wires: encodes parts of it.
    """

    def __init__(
        self,
        between: Between,
        call: CodedCall,
        stripes: Deal,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        velocity: torch.Tensor | None,
    ) -> None:
        self.between, self.call = between, call
        self.first, self.count = stripes.first(between.index), gradient.numel()
        self._gradient = self.value = gradient
        self._scale = self._inverse = None
        if call.scale is not None:
            self._inverse = call.scale.reciprocal()
            self._scale = call.scale + (self._inverse - self._inverse)
        self.velocity = self.residual = None
        if velocity is not None:
            self.value = self._scaled(velocity) * call.compression.momentum + gradient
            self.velocity = self.unscaled(self.value)
        if residual is not None:
            self.value = self.value + self._scaled(residual)
            self.residual = torch.empty_like(residual)
        k = -(-call.k * self.count // call.source.numel())
        self.wires = Wires(call.compression, call.step, gradient.device, call.codec, self.count, k)

    def _scaled(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self._scale is None else kept * self._scale

    def unscaled(self, values: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Values of a contribution, times a factor, in the unit of residuals."""
        if self._inverse is None:
            return values * factor if factor != 1 else values
        return values * (self._inverse * factor)

    def find(self) -> torch.Tensor:
        """See :func:`findings`."""
        return findings(self.between, self.call, self.value, self._gradient)

    def exchange(self, found: Found | None) -> torch.Tensor:
        """The sums or means of all nodes, decoded: in the call's result, or in fp32."""
        self.value = sendable(self.between, self.call, self.value, found)
        result = self.call.result
        if not self.between.single:
            result = torch.empty(self.count, dtype=torch.float32, device=self.value.device)
        if self.count:
            run_tiles([_CodedTile(self, part, result) for part in self._tiles()])
        return result

    def _tiles(self) -> list[slice]:
        """Parts that begin where the first node has its turn; top-k has a single one."""
        if isinstance(self.call.compression, TopK):
            return [slice(0, self.count)]
        turn = self.between.nodes * _C.owned_elements
        length = max(_TILE_ELEMENTS // turn, 1) * turn
        cuts = [0, *range(length - self.first % length, self.count, length), self.count]
        return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


class _CodedTile:
    """A part of a stripe; see :func:`pycomm._spanning.between.run_tiles`."""

    def __init__(self, stripe: _Stripe, part: slice, result: torch.Tensor) -> None:
        self._stripe, self._part, self._result = stripe, part, result
        self._between, self._wires = stripe.between, stripe.wires
        compression, nodes = stripe.call.compression, stripe.between.nodes
        self._lists, piece = isinstance(compression, TopK), _owned(compression)
        first = stripe.first + part.start
        if self._lists:  # chunks begin with the stripe
            first = first // piece * piece
        self._deal = Deal(first, part.stop - part.start, piece, nodes)
        self._slices = [self._deal.part(node) for node in range(nodes)]
        self._places = [(0, 0, 0)] * nodes
        if isinstance(compression, Int8) and compression.rounding == "stochastic":
            # An element's random bits depend on its place.
            self._slices = [slice(0, part.stop) for part in self._slices]
            origins = map(self._deal.origin, range(nodes))
            self._places = [(origin, piece, piece * nodes) for origin in origins]
        self._counts = [part.stop - part.start for part in self._slices]
        self._transfer: Transfer | None = None
        self._lost: torch.Tensor | None = None

    def stage(self) -> None:
        """Encodes the parts of all owners, and sends them."""
        between, wires = self._between, self._wires
        value = self._stripe.value[self._part]
        sent = self._deal.rows(wires.largest(value) if self._lists else value)
        outgoing = wires.rooms(self._counts, _C.topk_spread)
        stream = between.here * between.stripes + between.index
        for node, part, _ in self._owned_parts():
            wires.encode(
                sent[node][part], outgoing[node], _C.topk_spread, stream=stream,
                places=self._places[node],
            )  # fmt: skip
        self._incoming = torch.empty_like(outgoing)
        self._transfer = between.carriers.all_to_all(self._incoming, outgoing)
        if self._stripe.residual is not None:
            rows = self._deal.rows(value) if self._lists else sent
            decoded = torch.zeros_like(rows)
            for node, part, _ in self._owned_parts():
                wires.decode(outgoing[node], decoded[node][part], _C.topk_spread)
            self._lost = self._stripe.unscaled(rows - decoded)
        if self._stripe.velocity is not None:
            self._mask_velocity(sent)

    def _mask_velocity(self, sent: torch.Tensor) -> None:
        """What is sent loses its velocity."""
        taken = torch.zeros_like(sent)
        for node, part, _ in self._owned_parts():
            taken[node][part] = self._wires.largest(sent[node][part], _C.topk_spread)
        assert self._stripe.velocity is not None
        mask = torch.empty_like(self._stripe.velocity, dtype=torch.bool)
        self._deal.collect(taken != 0, mask)
        self._stripe.velocity.masked_fill_(mask, 0)

    def reduce(self) -> None:
        """Adds up what this node owns, in the order of nodes, and sends it to all."""
        between, wires = self._between, self._wires
        assert self._transfer is not None
        self._transfer.wait()
        self._results = wires.rooms(self._counts)
        mine = torch.empty_like(self._results[0])
        for node, _, count in self._owned_parts():
            if node == between.here:
                total = torch.empty(count, dtype=torch.float32, device=mine.device)
                for other, wire in enumerate(self._incoming):
                    wires.decode(wire, total, _C.topk_spread, add=other > 0)
                self._conclude(total, mine)
        self._transfer = between.carriers.all_gather(self._results, mine)

    def _conclude(self, total: torch.Tensor, wire: torch.Tensor) -> None:
        """Encodes the sums that this node owns; its residual keeps what that loses."""
        stripe, wires, here = self._stripe, self._wires, self._between.here
        lost = None if self._lost is None else self._lost[here][self._slices[here]]
        sums = wires.largest(total) if self._lists else total
        if self._lists and lost is not None:
            lost.add_(stripe.unscaled(total.masked_fill(sums != 0, 0)))
        divisor = stripe.call.divisor(self._between)
        sums = divided(sums, divisor)
        wires.encode(sums, wire, stream=_C.result_stream, places=self._places[here])
        if lost is None:
            return
        decoded = torch.empty(len(sums), dtype=self._result.dtype, device=sums.device)
        wires.decode(wire, decoded)
        lost.add_(stripe.unscaled(sums - decoded.float(), divisor))
        narrow = stripe.call.result.dtype
        if narrow != decoded.dtype:
            lost.add_(stripe.unscaled(decoded - rounded(decoded, narrow).float(), divisor))

    def gather(self) -> None:
        """Decodes the results of all owners."""
        assert self._transfer is not None
        self._transfer.wait()
        rows = torch.empty(
            (len(self._counts), self._deal.width), dtype=self._result.dtype,
            device=self._result.device,
        )  # fmt: skip
        for node, part, _ in self._owned_parts():
            self._wires.decode(self._results[node], rows[node][part])
        self._deal.collect(rows, self._result[self._part])
        if self._lost is not None and self._stripe.residual is not None:
            self._deal.collect(self._lost, self._stripe.residual[self._part])

    def _owned_parts(self) -> list[tuple[int, slice, int]]:
        """The nodes that own something, where it lies in their rows, and how much it is."""
        found = zip(range(len(self._counts)), self._slices, self._counts, strict=True)
        return [(node, part, count) for node, part, count in found if count]
