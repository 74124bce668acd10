"""Compressed operations on CUDA tensors of a group that spans nodes, over NCCL.

Phases and bits are the same as in csrc/cpu/internode/group.h:

  1. Collect: each node adds the gradients of its ranks in fp32. Each carrier gets its stripe of the
     sums.
  2. Stage: each carrier encodes each node's part of its stripe, and sends each node its part. The
     encoding's error stays in the residual.
  3. Reduce: the owner adds the parts in node order, encodes the sums, and sends them to all nodes.
  4. Gather: each carrier decodes the sums, and its node collects the stripes.

An all-reduce collects the ranks' residuals, too, and its stripes take turns by index. Top-k selects
from the whole stripe before phase 2, and in phase 3 the owner sends its share of the largest sums
(csrc/core/codecs/topk.h). In a reduce-scatter, the blocks of each node are consecutive, and each
carrier has a stripe of them. Its sums are not encoded again: each node keeps its own.

The host reads nothing that a device has computed, so a CUDA graph can capture the operation. If a
stripe takes S encoded bytes, each of H nodes sends and receives (H-1)/H S in phase 2 and again in
phase 3 of an all-reduce; lists of top-k take twice that in phase 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from pycomm import _C
from pycomm._inputs import CODECS, DTYPES, OPS
from pycomm._nccl.collectives import (
    divided,
    gather_from_carriers,
    reduce_in_place,
    rounded,
    run_parts,
    sum_to_carriers,
)
from pycomm._runtime.cuda import Codecs
from pycomm._runtime.plan import check_over_nccl
from pycomm.compression import SMALLEST_BLOCK, VALUES, Compression, Int8, TopK

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pycomm._nccl.process_groups import InternodeProcessGroups

    # A function such as all_reduce(). It returns whether a value was not finite, or None if not
    # asked.
    Flow: TypeAlias = Callable[[InternodeProcessGroups, bool], torch.Tensor | None]

# A compressed operation that spans nodes.


@dataclass(frozen=True)
class CodedCall:
    """A compressed operation on flat tensors.

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
    density_step: int | None = None

    @cached_property
    def codec(self) -> _C.Codec:
        """The codec of the whole tensor."""
        return self.compression.codec(self.source.numel(), self.source.dtype, self._density_step)

    @property
    def _density_step(self) -> int:
        return self.step if self.density_step is None else self.density_step

    def selected(self, count: int) -> int:
        """The number of elements that top-k selects of so many."""
        if not isinstance(self.compression, TopK):
            return 0
        whole = self.source.numel()
        return -(-self.compression.count(whole, self._density_step) * count // whole)


def nonfinite(result: torch.Tensor) -> torch.Tensor:
    """True if a value is not finite."""
    return result.isfinite().all().logical_not()


# A block-cyclic distribution of elements over nodes or stripes.


class BlockCyclic:
    """A block-cyclic distribution of a tensor's elements: `piece` elements to each party in turn.

    An element's party depends only on its index in the whole tensor, as in
    csrc/core/algorithms/stripes.h. The rows of several parties begin and end with whole turns; they
    have zeros where the tensor has no element.

    Args:
        first: the index of the tensor's first element in the whole.
        count: the number of its elements, at least one.
        piece: the number of consecutive elements of a party.
        parties: the number of parties.
        from_start: parts begin where rows begin.

    Attributes:
        width: the length of a row.
        places: by party, where the elements of its row lie in the whole, for Wires.encode().
    """

    def __init__(
        self, first: int, count: int, piece: int, parties: int, from_start: bool = False
    ) -> None:
        self._piece, self._parties, self._from_start = piece, parties, from_start
        turn = piece * parties if parties > 1 else 1
        self._first, self._end = first, first + count
        self._edges = (first % turn, -self._end % turn)
        self.width = (count + sum(self._edges)) // parties
        begin = first - self._edges[0]
        self.places = [(begin + i * piece, piece, turn) for i in range(parties)]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all parties; the tensor itself if there is only one."""
        if self._parties == 1:
            return tensor.view(1, -1)
        whole = pad(tensor, self._edges) if any(self._edges) else tensor
        turns = whole.view(-1, self._parties, self._piece)
        return turns.transpose(0, 1).reshape(self._parties, -1)

    def collect(self, rows: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes the elements of :meth:`rows` back to their places in the tensor."""
        if self._parties > 1:
            rows = rows.view(self._parties, -1, self._piece).transpose(0, 1)
        if any(self._edges):
            begin = self._edges[0]
            rows = rows.reshape(-1)[begin : begin + len(tensor)]
        tensor.view(rows.shape).copy_(rows)

    def part(self, party: int) -> slice:
        """The range of a party's row that has elements of the tensor; empty without a row."""
        if party >= self._parties:
            return slice(0, 0)
        base = (self._first - self._edges[0]) // self._parties
        begin = 0 if self._from_start else self.before(self._first, party) - base
        return slice(begin, self.before(self._end, party) - base)

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all rows."""
        return [row[self.part(party)] for party, row in enumerate(rows)]

    def before(self, index: int, party: int) -> int:
        """The number of the party's elements before `index` in the whole."""
        turn, within = divmod(index, self._piece * self._parties)
        return turn * self._piece + min(max(within - party * self._piece, 0), self._piece)


# Encoded parts, in the format of Compression.encode().

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Wires:
    """Encodes parts of a stripe in fp32 and decodes them, on the current stream.

    The size of an encoded part depends only on the number of its elements, so the host reads
    nothing from the device.

    Attributes:
        call: the call.
        count: the number of the stripe's elements.
        spread: a list of top-k has room for so many times the part's share of what it selects.
        exact: values of top-k are sent in fp32.
    """

    call: CodedCall
    count: int
    spread: int = 1
    exact: bool = False

    def rooms(self, counts: Sequence[int]) -> torch.Tensor:
        """Memory for encoded parts: rows of equal length."""
        most = max(_C.encoded_bytes(self._codec(count), count) for count in counts)
        shape = len(counts), -(-most // _ALIGNMENT) * _ALIGNMENT
        return torch.empty(shape, dtype=torch.uint8, device=self.call.source.device)

    def encode(
        self,
        part: torch.Tensor,
        wire: torch.Tensor,
        stream: int = 0,
        place: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Encodes a part.

        The random bits depend on `stream`, and on the place: the index of the first element; and
        the length of runs and the distance between their beginnings, if there are several.
        """
        if len(part):
            first, run, stride = place
            self._codecs.encode(
                self._codec(len(part)), DTYPES[part.dtype], part.data_ptr(), len(part),
                wire.data_ptr(), self.call.compression.seed, self.call.step, first, stream, run,
                stride,
            )  # fmt: skip

    def decode(self, wire: torch.Tensor, output: torch.Tensor, add: bool = False) -> None:
        """Decodes a part, or adds it to `output`."""
        if len(output):
            codec = self._codec(len(output))
            self._codecs.decode(
                codec, wire.data_ptr(), _C.encoded_bytes(codec, len(output)), len(output),
                DTYPES[output.dtype], output.data_ptr(), add,
            )  # fmt: skip

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The elements of a part that top-k selects; all others are zero."""
        exact = replace(self, exact=True)
        (wire,) = exact.rooms([len(values)])
        exact.encode(values, wire)
        selected = torch.empty_like(values)
        exact.decode(wire, selected)
        return selected

    @cached_property
    def _codecs(self) -> Codecs:
        return Codecs(self.call.source.device, checks=False)

    def _codec(self, count: int) -> _C.Codec:
        """The codec of a part."""
        compression = self.call.compression
        if not isinstance(compression, TopK):
            return self.call.codec
        share = -(-self.call.selected(self.count) * count // self.count)
        values = VALUES[torch.float32 if self.exact else compression.values]
        return _C.Codec(CODECS["topk"], values=values, k=min(self.spread * share, count))


# The phases of both operations.


@dataclass(frozen=True)
class Preflight:
    """What all ranks have found in their contributions. The host does not read it.

    Attributes:
        overflow: a sum might not be finite.
        stays: residuals stay as they are: after an overflow, or if nobody uses the gradient.
    """

    overflow: torch.Tensor
    stays: torch.Tensor

    def store(self, new: torch.Tensor, kept: torch.Tensor) -> None:
        """Writes a new residual or velocity, unless it stays as it is."""
        kept.copy_(torch.where(self.stays, kept, new))


class Stripe:
    """What this rank carries of a call; without elements if it carries no stripe.

    Args:
        span: the group.
        call: the call.
        gradient: this node's sums.
        residual: what has not been sent yet; None without residuals.
        velocity: momentum; None without one.

    Attributes:
        value: this node's contribution.
        residual: receives the new residual; None without one.
        velocity: the new velocity; None without one.
        divisor: the divisor of sums.
        wires: encodes results.
        contributions: encodes contributions.
    """

    def __init__(
        self,
        span: InternodeProcessGroups,
        call: CodedCall,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        velocity: torch.Tensor | None = None,
    ) -> None:
        self.span, self.call, self._gradient, self.value = span, call, gradient, gradient
        self.divisor = span.world if call.op == "avg" else 1
        self.wires = Wires(call, len(gradient))
        self.contributions = replace(self.wires, spread=_C.topk_spread)
        self._scale = self._inverse = self.velocity = self.residual = None
        if call.scale is not None:
            self._inverse = call.scale.reciprocal()
            self._scale = call.scale + (self._inverse - self._inverse)  # NaN without an inverse
        if velocity is not None:
            self.value = self._scaled(velocity) * call.compression.momentum + gradient
            self.velocity = self.unscaled(self.value)
        if residual is not None:
            self.value = self.value + self._scaled(residual)
            self.residual = torch.empty_like(residual)

    def _scaled(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self._scale is None else kept * self._scale

    def unscaled(self, values: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Values of a contribution, times a factor, in the unit of residuals."""
        if self._inverse is None:
            return values * factor if factor != 1 else values
        return values * (self._inverse * factor)

    def agree(self) -> Preflight | None:
        """All ranks' checks before they send anything; None without residuals.

        After an overflow, the contribution has infinities. It is zero if it is not used.
        """
        span, call = self.span, self.call
        if call.residual is None:
            return None
        dtype, op = DTYPES[call.source.dtype], OPS[call.op]
        largest = _C.largest_safe(call.codec, dtype, op, len(span.nodes), span.world)
        flags = torch.zeros(2, dtype=torch.uint8, device=call.source.device)
        if len(self.value):
            flags[0] = (self.value.abs().amax() <= largest).logical_not()  # also for NaNs
            if call.hold_unused:
                flags[1] = self._gradient.any()
        reduce_in_place(span, flags, "bor")
        overflow, used = flags.bool()
        limited = self.value.masked_fill(self.value > largest, math.inf)
        limited.masked_fill_(self.value < -largest, -math.inf)
        self.value = torch.where(overflow, limited, self.value)
        if not call.hold_unused:
            return Preflight(overflow, overflow)
        self.value = torch.where(used, self.value, torch.zeros_like(self.value))
        return Preflight(overflow, overflow | used.logical_not())

    def add_up(
        self,
        sent: torch.Tensor,
        given: torch.Tensor,
        cut: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        places: Sequence[tuple[int, int, int]],
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Phase 2, and the sums of phase 3: sends each node its part, and adds up this node's.

        Args:
            sent: what is sent.
            given: the contribution.
            cut: cuts these tensors into the nodes' parts.
            places: of each part, for :meth:`Wires.encode`.

        Returns:
            The sums; and what the contribution loses, like `given`, or None without residuals.
        """
        span, wires, parts = self.span, self.contributions, cut(sent)
        outgoing = wires.rooms([*map(len, parts)])
        stream = span.here * span.stripes + span.index
        for part, wire, place in zip(parts, outgoing, places, strict=True):
            wires.encode(part, wire, stream, place)
        incoming = torch.empty_like(outgoing)
        transfer = span.carriers.all_to_all(incoming, outgoing)
        lost = None
        if self.residual is not None:
            decoded = torch.zeros_like(given)
            for wire, part in zip(outgoing, cut(decoded), strict=True):
                wires.decode(wire, part)
            lost = self.unscaled(given - decoded)
        yield
        transfer.wait()
        total = torch.empty_like(parts[span.here])
        for node, wire in enumerate(incoming):
            wires.decode(wire, total, add=node > 0)
        return total, lost

    def keep_rounding(self, exact: torch.Tensor, lost: torch.Tensor) -> None:
        """Adds to `lost` what results lose in the result's dtype."""
        narrow = self.call.result.dtype
        if narrow != exact.dtype:
            lost.add_(self.unscaled(exact - rounded(exact, narrow).float(), self.divisor))


def _gather(
    span: InternodeProcessGroups, mine: torch.Tensor, begin: int, width: int
) -> torch.Tensor:
    """Rows of all stripes, with zeros around their elements; this rank's begin at `begin`."""
    row = pad(mine, (begin, width - begin - len(mine)))
    rows = row.new_empty((span.stripes, width))
    gather_from_carriers(span, rows, row)
    return rows


# The all-reduce.

_TILE_ELEMENTS = 4 << 20


def all_reduce(span: InternodeProcessGroups, looks: bool, call: CodedCall) -> torch.Tensor | None:
    """Runs the operation.

    Returns:
        Whether a value was not finite, or too large; None without `looks`.
    """
    if not call.source.numel():
        return None
    turn = len(span.nodes) * _owned(call.compression)
    stripes = BlockCyclic(call.offset, call.source.numel(), turn, span.stripes)
    stripe = Stripe(
        span, call, _collect(span, stripes, call.source),
        *(None if kept is None else _collect(span, stripes, kept)
          for kept in (call.residual, call.velocity)),
    )  # fmt: skip
    found = stripe.agree()
    result = call.result if span.single else torch.empty_like(stripe.value)
    first = stripes.before(call.offset, span.index)
    run_parts(
        [
            _all_reduce_part(stripe, first, part, result)
            for part in _tiles(call, turn, first, result)
        ]
    )
    mine = stripes.part(span.index)
    if not span.single:
        narrow = rounded(result, call.result.dtype)
        stripes.collect(_gather(span, narrow, mine.start, stripes.width), call.result)
    for kept, new in ((call.residual, stripe.residual), (call.velocity, stripe.velocity)):
        if kept is None or new is None or found is None:
            continue
        if not span.single:  # elements of other stripes become zero
            rows = kept.new_zeros((span.stripes, stripes.width))
            rows[span.stripe][mine] = new
            new = torch.empty_like(kept)
            stripes.collect(rows, new)
        found.store(new, kept)
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
) -> Callable[[InternodeProcessGroups, int], object]:
    """A function that averages a part of a bucket in place, at a step.

    A tensor of `kept` with a name such as ``residual_before`` receives the old residual.
    """
    check_over_nccl(algorithm)
    copied = [name for name in kept if f"{name}_before" in kept]
    call = CodedCall(
        tensor, tensor, compression, "avg", 0, offset, density_step=density_step, hold_unused=True,
        **{name: kept[name] for name in kept if not name.endswith("_before")},
    )  # fmt: skip

    def run(span: InternodeProcessGroups, step: int) -> None:
        for name in copied:
            kept[f"{name}_before"].copy_(kept[name])
        all_reduce(span, False, replace(call, step=step))

    return run


def _collect(
    span: InternodeProcessGroups, stripes: BlockCyclic, tensor: torch.Tensor
) -> torch.Tensor:
    """Phase 1: this rank's stripe of its node's sums."""
    wide = tensor.float()
    if span.single:
        return wide
    rows = stripes.rows(wide)
    if rows.data_ptr() == tensor.data_ptr():
        rows = rows.clone()  # sums may be computed in place
    return sum_to_carriers(span, rows, "sum")[stripes.part(span.index)]


def _owned(compression: Compression) -> int:
    """The number of consecutive elements that a node owns."""
    return _C.topk_chunk if isinstance(compression, TopK) else _C.owned_elements


def _tiles(call: CodedCall, turn: int, first: int, stripe: torch.Tensor) -> list[slice]:
    """Parts that begin with elements of the first node; top-k has a single part."""
    length, cuts = max(_TILE_ELEMENTS // turn, 1) * turn, range(0)
    if not isinstance(call.compression, TopK):
        cuts = range(length - first % length, len(stripe), length)
    ends = itertools.pairwise([0, *cuts, len(stripe)])
    return [slice(begin, end) for begin, end in ends if begin < end]


def _all_reduce_part(
    stripe: Stripe, first: int, part: slice, result: torch.Tensor
) -> Iterator[None]:
    """Phases 2 to 4 of a part of the stripe, which begins at `first` in the whole stripe."""
    span, compression, wires = stripe.span, stripe.call.compression, stripe.wires
    lists, piece = isinstance(compression, TopK), _owned(compression)
    first += part.start
    if lists:  # chunks begin with the stripe
        first = first // piece * piece
    # An element's random bits depend on its place.
    random = isinstance(compression, Int8) and compression.rounding == "stochastic"
    deal = BlockCyclic(first, part.stop - part.start, piece, len(span.nodes), from_start=random)
    value = stripe.value[part]
    sent = deal.rows(wires.largest(value) if lists else value)
    given = deal.rows(value) if lists else sent
    total, lost = yield from stripe.add_up(sent, given, deal.cut, deal.places)
    left = None if lost is None else deal.cut(lost)[span.here]  # of the elements that it owns
    sums = wires.largest(total) if lists else total
    if lists and left is not None:
        left.add_(stripe.unscaled(total.masked_fill(sums != 0, 0)))
    sums = divided(sums, stripe.divisor)
    results = wires.rooms([*map(len, deal.cut(sent))])
    mine = torch.empty_like(results[0])
    wires.encode(sums, mine, _C.result_stream, deal.places[span.here])
    if left is not None:
        decoded = torch.empty_like(sums, dtype=result.dtype)
        wires.decode(mine, decoded)
        left.add_(stripe.unscaled(sums - decoded.float(), stripe.divisor))
        stripe.keep_rounding(decoded, left)
    transfer = span.carriers.all_gather(results, mine)
    if stripe.velocity is not None:
        _mask_velocity(stripe.velocity, deal, sent, stripe.contributions)
    yield
    transfer.wait()
    rows = torch.empty_like(sent, dtype=result.dtype)
    for wire, target in zip(results, deal.cut(rows), strict=True):
        wires.decode(wire, target)
    deal.collect(rows, result[part])
    if lost is not None and stripe.residual is not None:
        deal.collect(lost, stripe.residual[part])


def _mask_velocity(
    velocity: torch.Tensor, deal: BlockCyclic, sent: torch.Tensor, wires: Wires
) -> None:
    """Zeroes the velocity of the elements that are sent."""
    taken = torch.zeros_like(sent)
    for target, part in zip(deal.cut(taken), deal.cut(sent), strict=True):
        target.copy_(wires.largest(part))
    mask = torch.empty_like(velocity, dtype=torch.bool)
    deal.collect(taken != 0, mask)
    velocity.masked_fill_(mask, 0)


# The reduce-scatter.


def reduce_scatter(
    span: InternodeProcessGroups, looks: bool, call: CodedCall
) -> torch.Tensor | None:
    """Runs the operation: `call.source` holds a block per rank, and each rank gets its own.

    Returns:
        Whether a value was not finite, or too large, on any rank; None without `looks`.
    """
    if not call.result.numel():
        return None
    order = span.node_order(call.source.device)

    def in_node_order(blocks: torch.Tensor) -> torch.Tensor:
        return blocks if span.ordered else blocks.view(span.world, -1)[order].view(-1)

    sizes = _sizes(span, call)
    mine = slice(span.index, None if span.carries else 0, span.stripes)
    counts = sizes[mine]
    gradient = in_node_order(call.source.float())
    if not span.single:
        parts = torch.split(gradient, sizes)
        stripes = [torch.cat(parts[stripe :: span.stripes]) for stripe in range(span.stripes)]
        rows = pad_sequence(stripes, batch_first=True)
        gradient = sum_to_carriers(span, rows, "sum")[: sum(counts)]
    residual = given = None
    if call.residual is not None:  # of this rank, not of its node
        residual = in_node_order(call.residual)
        given = torch.cat([gradient[:0], *torch.split(residual, sizes)[mine]])
    stripe = Stripe(span, call, gradient, given)
    found = stripe.agree()
    made = call.result.new_empty(counts[span.here] if counts else 0)
    if counts:
        begins = [*itertools.accumulate([call.offset, *sizes[:-1]])]
        run_parts([_reduce_scatter_part(stripe, counts, begins[mine], made)])
    here = sizes[span.here * span.stripes :][: span.stripes]
    rows = _gather(span, made, 0, max(here))
    blocks = torch.cat([row[:size] for row, size in zip(rows, here, strict=True)])
    call.result.copy_(blocks.view(-1, call.result.numel())[span.index])
    if found is None or residual is None or stripe.residual is None:
        flag = nonfinite(call.result).view(1).to(torch.uint8)
        reduce_in_place(span, flag, "bor")
        return flag[0].bool() if looks else None
    kept, new = torch.split(residual, sizes)[mine], torch.split(stripe.residual, counts)
    for to, values in zip(kept, new, strict=True):
        found.store(values, to)
    if not span.ordered and call.residual is not None:
        call.residual.view(span.world, -1)[order] = residual.view(span.world, -1)
    return found.overflow | nonfinite(call.result) if looks else None  # all ranks know already


def _sizes(span: InternodeProcessGroups, call: CodedCall) -> list[int]:
    """The number of elements that each stripe has of each node's blocks, node by node.

    Stripes begin at blocks of the codec, as in csrc/core/layout.h.
    """
    unit = call.compression.block if isinstance(call.compression, Int8) else SMALLEST_BLOCK
    sizes, stripes = [], span.stripes
    for ranks in span.nodes:
        count = len(ranks) * call.result.numel()
        base, longer = divmod(-(-count // unit), stripes)
        cuts = [min((i * base + min(i, longer)) * unit, count) for i in range(stripes + 1)]
        sizes += [end - begin for begin, end in itertools.pairwise(cuts)]
    return sizes


def _reduce_scatter_part(
    stripe: Stripe, counts: list[int], begins: list[int], result: torch.Tensor
) -> Iterator[None]:
    """Phases 2 and 3 of the stripe, with the sizes of its parts and where they begin."""
    value, places = stripe.value, [(begin, 0, 0) for begin in begins]
    total, lost = yield from stripe.add_up(
        value, value, lambda tensor: torch.split(tensor, counts), places
    )
    mean = divided(total, stripe.divisor)
    result.copy_(rounded(mean, result.dtype))
    if lost is not None and stripe.residual is not None:
        stripe.keep_rounding(mean, torch.split(lost, counts)[stripe.span.here])
        stripe.residual.copy_(lost)
