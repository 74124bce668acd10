"""Compressed all-reduces on CUDA tensors of a group that spans nodes, over NCCL.

Phases and bits are the same as in csrc/cpu/internode/group.h:

  1. Collect: each node adds the gradients and residuals of its ranks in fp32. Each carrier gets its
     stripe of the sums.
  2. Stage: each carrier encodes each node's part of its stripe, and sends each node its part. The
     encoding's error stays in the residual.
  3. Reduce: the owner adds the parts in node order, encodes the sums, and sends them to all nodes.
  4. Gather: each carrier decodes the sums, and its node collects the stripes.

Top-k selects from the whole stripe before phase 2, and in phase 3 the owner sends its share of the
largest sums (csrc/core/codecs/topk.h). The host reads nothing that a device has computed, so a
CUDA graph can capture the operation. If a stripe takes S encoded bytes, each of H nodes sends and
receives (H-1)/H S in phase 2 and again in phase 3; lists of top-k take twice that in phase 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs import CODECS, DTYPES, OPS
from pycomm._nccl.collectives import (
    NcclExchange,
    NodeTopology,
    check_two_shot,
    rounded,
    run_tiles,
)
from pycomm._runtime.cuda import Codecs
from pycomm.compression import VALUES, Compression, Int8, TopK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pycomm._nccl.process_groups import Transfer

# A compressed operation that spans nodes, and the ranks' checks before they send anything.

# A function such as all_reduce(). It returns whether a value was not finite, or None if not asked.
Flow = Callable[[NodeTopology, bool], torch.Tensor | None]


@dataclass(frozen=True)
class CodedCall:
    """A compressed all-reduce of flat tensors.

    Attributes:
        source: this rank's gradient.
        result: receives the sum or mean; may be the same tensor.
        compression: the compression.
        op: ``"sum"`` or ``"avg"``.
        step: the training step, for random bits.
        offset: the index of the first element in a larger whole.
        residual: values that this rank has not sent yet, in fp32; or None.
        velocity: momentum for momentum correction, in fp32; or None.
        scale: the loss scale of the gradient, or None. Residual and velocity are unscaled.
        hold_unused: keep residuals if the gradient is zero on all ranks.
        residual_before: receives a copy of the old residual; or None.
        velocity_before: receives a copy of the old velocity; or None.
        density_step: the step that a density depends on; by default `step`.
    """

    source: torch.Tensor
    result: torch.Tensor
    compression: Compression
    op: str
    step: int = 0
    offset: int = 0
    residual: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    hold_unused: bool = False
    residual_before: torch.Tensor | None = None
    velocity_before: torch.Tensor | None = None
    density_step: int | None = None

    @property
    def codec(self) -> _C.Codec:
        """The codec of the whole tensor."""
        return self.compression.codec(self.source.numel(), self.source.dtype, self._density_step)

    @property
    def k(self) -> int:
        """The number of elements of the whole tensor that top-k sends; 0 for other codecs."""
        if not isinstance(self.compression, TopK):
            return 0
        return self.compression.count(self.source.numel(), self._density_step)

    @property
    def _density_step(self) -> int:
        return self.step if self.density_step is None else self.density_step

    def largest(self, between: NodeTopology) -> float:
        """The largest contribution of a node that keeps all sums finite."""
        dtype, op = DTYPES[self.source.dtype], OPS[self.op]
        return _C.largest_safe(self.codec, dtype, op, between.nodes, between.world)

    def divisor(self, between: NodeTopology) -> int:
        """The divisor of sums."""
        return between.world if self.op == "avg" else 1


@dataclass(frozen=True)
class Preflight:
    """The ranks' checks of all contributions before they send them.

    The flags are on the device, and the host does not read them.

    Attributes:
        overflow: a sum might not be finite. Residuals stay as they are.
        unused: all gradients are zero. Nothing is sent, and residuals stay as they are. None if it
            is not checked.
    """

    overflow: torch.Tensor
    unused: torch.Tensor | None

    @property
    def keeps(self) -> torch.Tensor:
        """True if residuals change."""
        stays = self.overflow if self.unused is None else self.overflow | self.unused
        return stays.logical_not()


def preflight(
    between: NodeTopology, call: CodedCall, value: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Two flags of a contribution: it may overflow, and its gradient is used."""
    flags = torch.zeros(2, dtype=torch.uint8, device=value.device)
    if value.numel() and call.residual is not None:
        flags[0] = (value.abs().amax() <= call.largest(between)).logical_not()  # also for NaNs
        flags[1] = gradient.any() if call.hold_unused else 1
    return flags


def agree(between: NodeTopology, call: CodedCall, flags: torch.Tensor | None) -> Preflight | None:
    """The checks of all ranks together; None without residuals."""
    if call.residual is None:
        return None
    if flags is None:
        flags = torch.zeros(2, dtype=torch.uint8, device=call.source.device)
    NcclExchange(between, flags, flags, "bor", 0).all_reduce()
    overflow, used = flags.bool()
    return Preflight(overflow, used.logical_not() if call.hold_unused else None)


def sendable(
    between: NodeTopology, call: CodedCall, value: torch.Tensor, found: Preflight | None
) -> torch.Tensor:
    """The contribution: with infinities after an overflow, and zero if it is not used."""
    if found is None:
        return value
    largest = call.largest(between)
    limited = value.masked_fill(value > largest, math.inf)
    limited.masked_fill_(value < -largest, -math.inf)
    value = torch.where(found.overflow, limited, value)
    if found.unused is not None:
        value = torch.where(found.unused, torch.zeros_like(value), value)
    return value


def divided(sums: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divides sums."""
    if divisor == 1:
        return sums
    # A tensor, because CUDA multiplies with the inverse of a number.
    return sums / torch.full((), divisor, dtype=torch.float32, device=sums.device)


def nonfinite(result: torch.Tensor) -> torch.Tensor:
    """True if a value is not finite."""
    return result.isfinite().all().logical_not()


# A block-cyclic distribution of elements over nodes or stripes.


class BlockCyclic:
    """A block-cyclic distribution of a tensor's elements: `piece` elements to each party in turn.

    An element's party depends only on its index in the whole tensor, as in
    csrc/core/algorithms/stripes.h.

    Args:
        first: the index of the tensor's first element in the whole.
        count: the number of its elements.
        piece: the number of consecutive elements of a party.
        parties: the number of parties.

    Attributes:
        width: the length of a row.
    """

    def __init__(self, first: int, count: int, piece: int, parties: int) -> None:
        self._first, self._count, self._piece, self._parties = first, count, piece, parties
        begin, end = first // (piece * parties), -(-(first + count) // (piece * parties))
        self._rounds = end - begin if count else 0
        self._front = first - begin * piece * parties if count else 0
        self.width = count if parties == 1 else self._rounds * piece

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A row with the elements of each party; zeros where this tensor has no element."""
        if self._parties == 1:
            return tensor.view(1, -1)
        rows = tensor.new_empty((self._parties, self.width))
        dealt = rows.view(self._parties, self._rounds, self._piece)
        for edge in {0, self._rounds - 1} if self._rounds else ():
            dealt[:, edge] = 0
        for place, elements in self._pairs(dealt, tensor):
            place.copy_(elements)
        return rows

    def collect(self, rows: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes the elements of :meth:`rows` back to their places in the tensor."""
        if self._parties == 1:
            tensor.copy_(rows.view(-1))
            return
        dealt = rows.view(self._parties, self._rounds, self._piece)
        for place, elements in self._pairs(dealt, tensor):
            elements.copy_(place)

    def _pairs(
        self, dealt: torch.Tensor, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Places in rows, and the elements that belong there: whole rounds at a time."""
        turn = self._piece * self._parties
        first, last = -(-self._front // turn), (self._front + self._count) // turn
        if first < last:
            begin = first * turn - self._front
            whole = tensor[begin : begin + (last - first) * turn]
            yield (
                dealt[:, first:last].transpose(0, 1),
                whole.view(last - first, self._parties, self._piece),
            )
        for edge in {0, self._rounds - 1} - {*range(first, last)} if self._rounds else ():
            for party in range(self._parties):
                at = edge * turn + party * self._piece - self._front
                begin, end = max(at, 0), min(at + self._piece, self._count)
                if begin < end:
                    yield dealt[party, edge, begin - at : end - at], tensor[begin:end]

    def part(self, party: int) -> slice:
        """The range of a party's row that has elements of this tensor."""
        base = 0 if self._parties == 1 else self._before(self._first - self._front, party)
        begin, end = (self._before(self._first + i, party) for i in (0, self._count))
        return slice(begin - base, end - base) if self._parties > 1 else slice(0, self._count)

    def first(self, party: int) -> int:
        """The number of the party's elements in the whole before this tensor."""
        return self._before(self._first, party)

    def origin(self, party: int) -> int:
        """The index in the whole of the first element of the party's row."""
        return self._first - self._front + party * self._piece

    def _before(self, index: int, party: int) -> int:
        """The number of the party's elements before `index` in the whole."""
        turn, within = divmod(index, self._piece * self._parties)
        mine = min(max(within - party * self._piece, 0), self._piece)
        return turn * self._piece + mine


def part_of(count: int, parts: int, index: int, unit: int) -> slice:
    """A part of a tensor that is cut at multiples of `unit`, as in csrc/core/layout.h."""
    base, longer = divmod(-(-count // unit), parts)
    begin = (index * base + min(index, longer)) * unit
    end = begin + (base + (index < longer)) * unit
    return slice(min(begin, count), min(end, count))


# Encoded parts of a compressed operation, in the format of Compression.encode().
#
# The size of an encoded part depends only on the number of its elements, so the host reads nothing
# from the device.

_ALIGNMENT = 16  # bytes


class ShardCodec:
    """Encodes parts of a tensor and decodes them, on the tensor's device.

    Args:
        compression: the compression.
        step: the training step.
        device: the tensor's device.
        codec: the codec of the whole tensor.
        count: the number of its elements.
        k: the number of elements that top-k selects.
    """

    def __init__(
        self,
        compression: Compression,
        step: int,
        device: torch.device,
        codec: _C.Codec,
        count: int,
        k: int,
    ) -> None:
        self._compression, self._step, self._device = compression, step, device
        self._codec, self._count, self._k = codec, count, k
        self._codecs = Codecs(device, checks=False)

    def codec_of(self, count: int, spread: int = 1) -> _C.Codec:
        """The codec of a part; a list of top-k has room for `spread` times the part's share."""
        if not isinstance(self._compression, TopK):
            return self._codec
        return self._list(min(spread * self._share(count), count), self._compression.values)

    def rooms(self, counts: list[int], spread: int = 1) -> torch.Tensor:
        """Memory for encoded parts: rows of equal length."""
        most = max(_C.encoded_bytes(self.codec_of(count, spread), count) for count in counts)
        width = -(-most // _ALIGNMENT) * _ALIGNMENT
        return torch.empty((len(counts), width), dtype=torch.uint8, device=self._device)

    def encode(
        self,
        part: torch.Tensor,
        wire: torch.Tensor,
        spread: int = 1,
        *,
        stream: int,
        places: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Encodes fp32 elements.

        Args:
            part: the elements.
            wire: receives the bytes.
            spread: see :meth:`codec_of`.
            stream: a number that distinguishes the random bits.
            places: the index of the first element; and the length of runs and the distance between
                their beginnings, if the elements are not consecutive.
        """
        self._encode(self.codec_of(len(part), spread), part, wire, stream, places)

    def decode(
        self, wire: torch.Tensor, output: torch.Tensor, spread: int = 1, *, add: bool = False
    ) -> None:
        """Decodes a part, or adds it to `output`."""
        self._decode(self.codec_of(len(output), spread), wire, output, add)

    def largest(self, values: torch.Tensor, spread: int = 1) -> torch.Tensor:
        """The elements of a part that top-k selects; all others are zero."""
        count = len(values)
        codec = self._list(min(spread * self._share(count), count), torch.float32)
        nbytes = _C.encoded_bytes(codec, count)
        wire = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._encode(codec, values, wire, 0, (0, 0, 0))
        selected = torch.empty_like(values)
        self._decode(codec, wire, selected, False)
        return selected

    def _list(self, k: int, values: torch.dtype) -> _C.Codec:
        return _C.Codec(CODECS["topk"], values=VALUES[values], k=k)

    def _share(self, count: int) -> int:
        return -(-self._k * count // self._count)

    def _encode(
        self,
        codec: _C.Codec,
        part: torch.Tensor,
        wire: torch.Tensor,
        stream: int,
        places: tuple[int, int, int],
    ) -> None:
        first, run, stride = places
        self._codecs.encode(
            codec, DTYPES[torch.float32], part.data_ptr(), len(part), wire.data_ptr(),
            self._compression.seed, self._step, first, stream, run, stride,
        )  # fmt: skip

    def _decode(self, codec: _C.Codec, wire: torch.Tensor, output: torch.Tensor, add: bool) -> None:
        nbytes = _C.encoded_bytes(codec, len(output))
        self._codecs.decode(
            codec, wire.data_ptr(), nbytes, len(output), DTYPES[output.dtype], output.data_ptr(),
            add,
        )  # fmt: skip


# Compressed all-reduces on CUDA tensors of a group that spans nodes, over NCCL.

_TILE_ELEMENTS = 4 << 20


def all_reduce(between: NodeTopology, looks: bool, call: CodedCall) -> torch.Tensor | None:
    """Runs the operation.

    Returns:
        Whether a value was not finite, or too large; None without `looks`.
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
    stripes = BlockCyclic(call.offset, call.source.numel(), turn, between.stripes)
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


def coded_mean_flow(
    tensor: torch.Tensor,
    compression: Compression,
    offset: int,
    density_step: int,
    kept: dict[str, torch.Tensor],
    algorithm: str,
) -> Callable[[NodeTopology, int], object]:
    """A function that averages a part of a bucket in place, at a step."""
    check_two_shot(algorithm)
    call = CodedCall(
        tensor, tensor, compression, "avg", 0, offset, density_step=density_step,
        hold_unused=True, **kept,
    )  # fmt: skip
    return lambda between, step: all_reduce(between, False, replace(call, step=step))


def _owned(compression: Compression) -> int:
    """The number of consecutive elements that a node owns."""
    return _C.topk_chunk if isinstance(compression, TopK) else _C.owned_elements


def _collect(between: NodeTopology, stripes: BlockCyclic, tensor: torch.Tensor) -> torch.Tensor:
    """This node's sums in fp32: a carrier gets its stripe; other ranks' results are unused."""
    wide = tensor.float()
    if between.single:
        return wide
    rows = stripes.rows(wide)
    if rows.data_ptr() == tensor.data_ptr():
        rows = rows.clone()  # sums may be computed in place
    return between.sum_to_carriers(rows, "sum")[stripes.part(between.index)]


def _spread(
    between: NodeTopology, stripes: BlockCyclic, mine: torch.Tensor | None, result: torch.Tensor
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
    between: NodeTopology,
    stripes: BlockCyclic,
    mine: torch.Tensor | None,
    kept: torch.Tensor,
    keeps: torch.Tensor,
) -> None:
    """Writes the new values of this rank's stripe; values of other stripes become zero."""
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
        value: this node's contribution.
        residual: the new residual; None without one.
        velocity: the new velocity; None without one.
        first: the index of the first element in the whole tensor's stripe.
        count: the number of elements.
        wires: encodes parts of the stripe.
    """

    def __init__(
        self,
        between: NodeTopology,
        call: CodedCall,
        stripes: BlockCyclic,
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
        self.wires = ShardCodec(
            call.compression, call.step, gradient.device, call.codec, self.count, k
        )

    def _scaled(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self._scale is None else kept * self._scale

    def unscaled(self, values: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Values of a contribution, times a factor, in the unit of residuals."""
        if self._inverse is None:
            return values * factor if factor != 1 else values
        return values * (self._inverse * factor)

    def find(self) -> torch.Tensor:
        """See :func:`preflight`."""
        return preflight(self.between, self.call, self.value, self._gradient)

    def exchange(self, found: Preflight | None) -> torch.Tensor:
        """The sums or means of all nodes, decoded: in the call's result, or in fp32."""
        self.value = sendable(self.between, self.call, self.value, found)
        result = self.call.result
        if not self.between.single:
            result = torch.empty(self.count, dtype=torch.float32, device=self.value.device)
        if self.count:
            run_tiles([_CodedTile(self, part, result) for part in self._tiles()])
        return result

    def _tiles(self) -> list[slice]:
        """Parts that begin with elements of the first node; top-k has a single part."""
        if isinstance(self.call.compression, TopK):
            return [slice(0, self.count)]
        turn = self.between.nodes * _C.owned_elements
        length = max(_TILE_ELEMENTS // turn, 1) * turn
        cuts = [0, *range(length - self.first % length, self.count, length), self.count]
        return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


class _CodedTile:
    """A part of a stripe; see :func:`pycomm._nccl.collectives.run_tiles`."""

    def __init__(self, stripe: _Stripe, part: slice, result: torch.Tensor) -> None:
        self._stripe, self._part, self._result = stripe, part, result
        self._between, self._wires = stripe.between, stripe.wires
        compression, nodes = stripe.call.compression, stripe.between.nodes
        self._lists, piece = isinstance(compression, TopK), _owned(compression)
        first = stripe.first + part.start
        if self._lists:  # chunks begin with the stripe
            first = first // piece * piece
        self._deal = BlockCyclic(first, part.stop - part.start, piece, nodes)
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
        """Zeroes the velocity of the elements that are sent."""
        taken = torch.zeros_like(sent)
        for node, part, _ in self._owned_parts():
            taken[node][part] = self._wires.largest(sent[node][part], _C.topk_spread)
        assert self._stripe.velocity is not None
        mask = torch.empty_like(self._stripe.velocity, dtype=torch.bool)
        self._deal.collect(taken != 0, mask)
        self._stripe.velocity.masked_fill_(mask, 0)

    def reduce(self) -> None:
        """Adds up the elements that this node owns, in the order of nodes, and sends the sums."""
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
        """Encodes the sums that this node owns; its residual keeps the encoding's error."""
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
        """The nodes that own elements, the range in their rows, and the number of elements."""
        found = zip(range(len(self._counts)), self._slices, self._counts, strict=True)
        return [(node, part, count) for node, part, count in found if count]
