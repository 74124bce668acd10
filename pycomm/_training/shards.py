"""Shards: which rank holds the optimizer states of which elements of a model.

Parameters lie in one allocation in the window, the arena, with the same layout on all ranks. On one
node, gradients that a step averages itself lie there, too. Each bucket is divided into equal
blocks, one per rank. Every parameter begins at a multiple of 1,024 elements, and every bucket has a
multiple of 1,024 elements per rank, so that blocks of 8-bit states, sums of norms and cache lines
stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from pycomm import _C
from pycomm._training.buckets import partition
from pycomm._training.exchange import dense_wire_bytes
from pycomm._training.flat import ALIGN, Kind, Layout, Memory, Piece, Place, kind_of
from pycomm._training.parameters import complete_parts, count_division, known_of, record_of
from pycomm._training.shard_exchange import Blocks, ParamAllGather, Spread, encoded_bytes
from pycomm._training.step_guard import Snapshot, StepGuard
from pycomm._work import launch
from pycomm.collectives import all_reduce, broadcast
from pycomm.p2p import OWN_TAG, recv, send

if TYPE_CHECKING:
    from pycomm.compression import Compression
    from pycomm.group import Group

# The division of parameters among ranks.

UNIT: int = _C.sum_block  # elements between possible cuts


class OwnedRange(NamedTuple):
    """Elements of a parameter that one rank owns, in the order in which they lie in memory."""

    rank: int
    begin: int
    end: int


# Shards: which rank holds the optimizer states of which elements of a model.

_LINE = 64  # bytes


class OwnGradients(Protocol):
    """Divided gradients: pycomm/_training/grad_shards.py."""

    memory: torch.Tensor
    buffers: list[torch.Tensor]

    def is_divided(self, parameter: torch.Tensor) -> bool:
        """True if this rank has only its part of the parameter's gradient."""

    def has_gathered(self, parameter: torch.Tensor) -> bool:
        """True if the parameter's gradient is one that :meth:`gather` has made whole."""

    def forget_dropped(self, parameter: torch.Tensor) -> None:
        """Forgets a gradient that the user has dropped, since a new one has come."""

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter's gradient, flat."""

    def gather(self, parameters: Iterable[torch.Tensor], noted: bool = False) -> None:
        """Makes divided gradients whole; all ranks must call this."""


class Part(NamedTuple):
    """This rank's elements of a parameter.

    Attributes:
        shards: the shards that they belong to.
        group: the ranks that have the other elements.
        ranges: the elements of every rank that has any.
        strides: the parameter's strides, in whose order elements are counted; its memory format may
            have changed since.
        first: the first element.
        own: a flat view of the elements in the parameter; empty if there are none.
        in_pieces: True if a rank may have several ranges: it keeps lost ranks' ranges until the
            next step. Then `own` is a copy, and `first` is 0.
    """

    shards: Shards
    group: Group
    ranges: tuple[OwnedRange, ...]
    strides: tuple[int, ...]
    first: int
    own: torch.Tensor
    in_pieces: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a dense tensor with the parameter's shape, in its `strides`.

        The result is a view, unless the elements are in pieces.
        """
        if self.in_pieces:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            mine = [flat[own.begin : own.end] for own in self.ranges if own.rank == self.group.rank]
            return torch.cat(mine) if mine else flat[:0]
        begin = int(tensor.storage_offset()) + self.first
        return tensor.detach().as_strided((self.own.numel(),), (1,), begin)

    def units_of(self, values: torch.Tensor, unit: int) -> torch.Tensor:
        """The same elements of a tensor that has one value for every `unit` elements."""
        return values[self.first // unit : -(-(self.first + self.own.numel()) // unit)].clone()

    def gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The same elements of the parameter's gradient, flat."""
        kept = self.shards.own_gradients
        if kept is not None and kept.is_divided(parameter):
            return kept.own(parameter)
        return self.of(gradient)

    def is_divided(self, parameter: torch.Tensor) -> bool:
        """True if this rank has only these elements of the gradient."""
        kept = self.shards.own_gradients
        return kept is not None and kept.is_divided(parameter)

    def waits_for_step(self, parameter: torch.Tensor) -> bool:
        """True if a step must average the parameter's gradient.

        Raises:
            RuntimeError: the gradient has been changed since its backward.
        """
        return self.shards.is_local(parameter) and self.shards.averages

    def moved(self, parameter: torch.Tensor, group: Group, owners: Mapping[int, int]) -> Part:
        """The same elements in another group, which has this division's ranks.

        Args:
            parameter: the parameter; its memory may have changed.
            group: the other group.
            owners: ranks of the other group, by their ranks in the present group.
        """
        ranges = [OwnedRange(owners[rank], begin, end) for rank, begin, end in self.ranges]
        return Part.held(self.shards, group, ranges, parameter)

    @classmethod
    def held(
        cls, shards: Shards, group: Group, ranges: Sequence[OwnedRange], parameter: torch.Tensor
    ) -> Part:
        """The elements whose states this rank has until they move to their owners.

        Args:
            shards: the shards that they belong to.
            group: the ranks.
            ranges: the elements of each rank; a rank may have several ranges.
            parameter: the parameter.
        """
        flat = parameter.detach().as_strided((parameter.numel(),), (1,))
        strides = shards.layout[parameter].strides
        if len({own.rank for own in ranges}) < len(ranges):
            part = cls(shards, group, tuple(ranges), strides, 0, flat[:0], in_pieces=True)
            return part._replace(own=part.of(parameter))
        _, begin, end = next(
            (o for o in ranges if o.rank == group.rank), OwnedRange(group.rank, 0, 0)
        )
        return cls(shards, group, tuple(ranges), strides, begin, flat[begin:end])

    def gather(
        self, own: torch.Tensor, like: torch.Tensor, unit: int = 1, *, to: int | None = None
    ) -> torch.Tensor:
        """All ranks' elements, in the shape of `like`.

        All ranks must call this.

        Args:
            own: this rank's elements, in the order of its ranges, or one value for every `unit`.
            like: the parameter; for other units, a flat tensor of the result's size.
            unit: a divisor of 1,024.
            to: the only rank that gets the elements; None for all. Others get an empty tensor.
        """
        group = self.group
        receives = to in (None, group.rank)
        strides = self.strides if unit == 1 else like.stride()
        size, strides = (like.shape, strides) if receives else ((0,), (1,))
        whole = like.new_empty_strided(size, strides, dtype=own.dtype)
        flat = whole.as_strided((whole.numel(),), (1,))
        given = 0
        for rank, first, last in self.ranges:
            begin, end = first // unit, -(-last // unit)
            elements = flat[begin:end] if receives else own[:0]
            if rank == group.rank:
                mine = own[given : given + end - begin]
                given += len(mine)
                elements = elements.copy_(mine) if receives else mine
            if to is None:
                what = "shards that all ranks gather, as in state_dict()"
                broadcast(elements.view(torch.uint8), rank, group=group, tag=what)
            elif to == rank:
                continue  # it has copied them
            elif receives:
                recv(elements, rank, tag=OWN_TAG, group=group)
            elif rank == group.rank:
                send(elements, to, tag=OWN_TAG, group=group)
        return whole


class Shards:
    """The parameters of one wrapper, divided among the ranks of a group.

    Moves the parameters into the arena.

    Args:
        parameters: the parameters, each once, in their order in memory.
        group: the ranks that divide them.
        gradients: allocates memory for gradients; None puts them into the arena, where a step can
            average them itself: on one node only.
        limit: the size of a bucket of several parameters, in bytes.
        scatters: True if backward averages gradients at their owners only.
        publish: compression of the changes of parameters between nodes; None sends parameters.
        replicates: True if optimizers keep replicas of their states.

    Attributes:
        group: the ranks that divide the parameters.
        averages: True if a step averages gradients.
        leaves_local: True if backward leaves gradients local: all of them, or other ranks' parts.
        layout: the places of parameters and gradients.
        arena: the arena, as bytes.
        sums: the exchanged sums, in the arena.
        local: snapshots of gradients that are still local, by the parameter's id.
        own_gradients: divided gradients; None if gradients are not divided.
        blocks: the gradients of each bucket, by the id of its first parameter.
        all_gather: sends new parameters to other nodes; None on one node.
        replicates: True if optimizers keep replicas of their states.
        exchange_group: the ranks that exchange gradients: `group`, and perhaps more ranks.
        guard: watches the parameters between steps.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group: Group,
        gradients: Memory | None,
        limit: float,
        *,
        scatters: bool = False,
        publish: Compression | None = None,
        replicates: bool = False,
    ) -> None:
        complete_parts(parameters)
        self.group, self.replicates, self._publish = group, replicates, publish
        self.averages = gradients is None
        self.leaves_local = self.averages or scatters
        self.guard = StepGuard(parameters, group)
        self.own_gradients: OwnGradients | None = None
        self.blocks: dict[int, Blocks] = {}
        self.all_gather: ParamAllGather | None = None
        self.exchange_group = group
        self.local: dict[int, Snapshot] = {}
        plan = plan_arena(parameters, group.size, limit, self.averages)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.arena = group.empty(plan.nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.sums = self._take(_C.shard_sums * plan.units, torch.float64)
        self.layout = Layout(parameters, gradients or self._take, False, plan.rooms)
        for piece in self.layout.pieces:
            kind = piece.kind
            piece.parameters = self._take(len(piece.gradients), kind.dtype, kind.device).zero_()
        for parameter in parameters:
            self.layout[parameter].take_in(parameter)
        self._addresses = {id(parameter): parameter.data_ptr() for parameter in parameters}

    def extent(self, bucket: Sequence[torch.Tensor]) -> tuple[int, int]:
        """The first and the last element of a bucket in its piece, padding included."""
        first, last = self.layout[bucket[0]], self.layout[bucket[-1]]
        return first.offset, last.offset + self.layout.room(bucket[-1])

    def _cut(self, bucket: Sequence[torch.Tensor]) -> list[tuple[OwnedRange, ...]]:
        """The ranges of each parameter of a bucket; the parameters lie one after the other."""
        size, (begin, end) = self.group.size, self.extent(bucket)
        block = (end - begin) // size
        parts = []
        for parameter in bucket:
            first = self.layout[parameter].offset - begin
            last = first + parameter.numel()
            owners = range(first // block, -(-last // block))
            cuts = [(r, max(first, r * block), min(last, (r + 1) * block)) for r in owners]
            parts.append(tuple(OwnedRange(r, a - first, b - first) for r, a, b in cuts if a < b))
        return parts

    def assign(self, buckets: Iterable[Sequence[torch.Tensor]]) -> None:
        """Divides the parameters of each bucket."""
        spreads: list[Spread] = []
        parts: list[tuple[torch.Tensor, tuple[OwnedRange, ...], OwnedRange, int]] = []
        owned: dict[Piece, int] = {}  # elements of this rank
        first = 0
        for bucket in buckets:
            cuts, piece = self._cut(bucket), self.layout[bucket[0]].piece
            self.blocks[id(bucket[0])] = blocks = self._blocks(bucket, first)
            first += len(blocks.gradients)
            spreads.append(self._spread(bucket, cuts))
            for parameter, ranges in zip(bucket, cuts, strict=True):
                own, offset = self._own_range(ranges), owned.get(piece, 0)
                owned[piece] = offset + -(-(own.end - own.begin) // ALIGN) * ALIGN
                parts.append((parameter, ranges, own, offset))
        described = {
            piece: Piece(piece.kind, torch.empty(count, dtype=piece.kind.grad_dtype, device="meta"))
            for piece, count in owned.items()
        }
        for parameter, ranges, own, offset in parts:
            begin = int(parameter.storage_offset()) + own.begin
            flat = parameter.detach().as_strided((own.end - own.begin,), (1,), begin)
            place = Place(described[self.layout[parameter].piece], offset, (1,))
            record_of(flat).states_place = place
            strides = self.layout[parameter].strides
            record_of(parameter).part = Part(self, self.group, ranges, strides, own.begin, flat)
        if len(self.group.nodes) > 1:
            spreads.reverse()  # parameters whose gradients come last are used first
            self.all_gather = ParamAllGather(self.group, self._publish, spreads)
        count_division()

    def _blocks(self, bucket: Sequence[torch.Tensor], first: int) -> Blocks:
        """A bucket's gradients; `first` is their offset in all buckets together."""
        begin, end = self.extent(bucket)
        gradients = self.layout[bucket[0]].piece.gradients[begin:end]
        begins = {id(p): self.layout[p].offset - begin for p in bucket}
        return Blocks(gradients, self._own(gradients), begins, first)

    def _spread(self, bucket: Sequence[torch.Tensor], cuts: list[tuple[OwnedRange, ...]]) -> Spread:
        """A bucket's parameters, with this rank's ranges of `cuts`."""
        memory, (begin, end) = self.layout[bucket[0]].piece.parameters, self.extent(bucket)
        assert memory is not None
        own, ranges = self._own(memory[begin:end]), []
        for parameter, of_ranks in zip(bucket, cuts, strict=True):
            at = self.layout[parameter].offset - begin - self.group.rank * len(own)
            mine = self._own_range(of_ranks)
            ranges.append((TensorWeakRef(parameter), at + mine.begin, at + mine.end))
        return Spread(memory[begin:end], own, tuple(ranges))

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's block of a bucket."""
        return flat.view(self.group.size, -1)[self.group.rank]

    def _own_range(self, ranges: Iterable[OwnedRange]) -> OwnedRange:
        rank = self.group.rank
        return next((own for own in ranges if own.rank == rank), OwnedRange(rank, 0, 0))

    def moved(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have been moved out of the arena."""
        return [p for p in parameters if p.data_ptr() != self._addresses[id(p)]]

    def wire_bytes(self, nbytes: int) -> int:
        """Bytes that a rank reads or receives: for gradients of `nbytes`, and for parameters."""
        if self.all_gather is None:
            return dense_wire_bytes(nbytes, self.group)
        for bucket in self.blocks.values():
            nbytes += encoded_bytes(self._publish, bucket.gradients)
        return dense_wire_bytes(nbytes, self.group) // 2

    def buffers(self) -> list[torch.Tensor]:
        """The memory of all parameters."""
        return [p.parameters for p in self.layout.pieces if p.parameters is not None]

    def end_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records that a step has written these parameters."""
        parameters = list(parameters)
        self.guard.note_step(parameters)
        if self.all_gather is not None:
            self.all_gather.end_step(parameters)

    # Gradients.

    def note_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records that the gradients of a backward are still local."""
        self.local = {id(p): Snapshot.of(p.grad) for p in parameters if p.grad is not None}

    def is_local(self, parameter: torch.Tensor) -> bool:
        """True if the parameter's gradient is still local, except perhaps for this rank's part.

        Raises:
            RuntimeError: the gradient has been changed since its backward.
        """
        local, gradient = self.local, parameter.grad
        noted = local.get(id(parameter))
        if noted is None or gradient is None:
            return False
        if noted.is_still(gradient):
            return True
        if gradient.any():
            raise RuntimeError(
                f"gradient of a parameter of shape {tuple(parameter.shape)} has been changed "
                "before step() has averaged it: call reduce_gradients() of the wrapper before "
                "changing gradients; to clip them, give max_norm to the optimizer"
            )
        del local[id(parameter)]  # zeroed
        return False

    def is_assigned(self, parameter: torch.Tensor) -> bool:
        """True if the program has assigned the gradient, which may not be an average."""
        gradient = parameter.grad
        if gradient is None or gradient.numel() == 0:
            return False
        if self.own_gradients is not None:
            return not (
                self.own_gradients.is_divided(parameter)
                or self.own_gradients.has_gathered(parameter)
            )
        return not self.layout[parameter].holds_gradient(gradient)

    def forget_local(self, parameter: torch.Tensor) -> None:
        """Forgets the last backward's gradient, since a new one came before it was averaged.

        The new gradient is local, too, and so is their sum.
        """
        self.local.pop(id(parameter), None)
        if self.own_gradients is not None:
            self.own_gradients.forget_dropped(parameter)

    def forget_dropped(self, parameter: torch.Tensor) -> None:
        """Forgets a gradient that the user has dropped, since a new one has come."""
        noted = self.local.get(id(parameter))
        if noted is not None and noted.gradient() is not parameter.grad:
            del self.local[id(parameter)]
        if self.own_gradients is not None:
            self.own_gradients.forget_dropped(parameter)

    def has_pending(self, parameters: Iterable[torch.Tensor]) -> bool:
        """True if any gradient is still local, or divided."""
        return any(self.is_local(p) or known_of(p).part.is_divided(p) for p in parameters)

    def average(self, parameters: Iterable[torch.Tensor], noted: bool = False) -> None:
        """Averages gradients that are still local, and makes divided ones whole.

        All ranks must call this.

        Args:
            parameters: the parameters.
            noted: True takes gradients as the last backward left them, whatever the program has
                done since: for a rank whose backward has raised, and whose result is dropped.
        """
        parameters = list(parameters)
        if self.own_gradients is not None:
            self.own_gradients.gather(parameters, noted)
        local = [p for p in parameters if (id(p) in self.local if noted else self.is_local(p))]
        self._average_local(local)
        for parameter in parameters:
            self.local.pop(id(parameter), None)
        self.guard.note_step(parameters)

    def complete(self, parameter: torch.Tensor) -> None:
        """Averages a gradient before another wrapper takes the parameter; all ranks must call this.

        If the parameter has been moved, as by ``model.half()``, its gradient was moved before it
        was whole, so it is dropped after its step.

        Raises:
            RuntimeError: it has been moved before its step.
        """
        if self.layout[parameter].holds(parameter):
            self.average([parameter])
            return
        gradient, own = parameter.grad, self.own_gradients
        divided = own is not None and not own.has_gathered(parameter)
        if gradient is None or not (divided or id(parameter) in self.local):
            return
        if id(parameter) in self.guard.awaiting and gradient.any():
            raise RuntimeError(
                f"gradient of a parameter of shape {tuple(parameter.shape)} waits for a step, but "
                "the parameter has been moved: step or zero the gradients before you move the model"
            )
        parameter.grad = None

    def _average_local(self, local: Sequence[torch.Tensor]) -> None:
        """Averages local gradients, or gathers their averages from the owners of blocks."""
        if not self.averages:
            self._gather_blocks(local)
            return
        number = {piece: index for index, piece in enumerate(self.layout.pieces)}

        def lie(parameter: torch.Tensor) -> tuple[int, int]:
            place = self.layout[parameter]
            return number[place.piece], place.offset

        runs: list[tuple[Piece, int, int]] = []
        for parameter in sorted(local, key=lie):
            piece, begin, _ = self.layout[parameter]
            end = begin + self.layout.room(parameter)
            if runs and runs[-1][0] is piece and runs[-1][2] == begin:
                begin = runs.pop()[1]
            runs.append((piece, begin, end))
        for piece, begin, end in runs:
            all_reduce(piece.gradients[begin:end], "avg", group=self.group, deterministic=True)

    def _gather_blocks(self, local: Sequence[torch.Tensor]) -> None:
        """Collects the blocks of the buckets that these gradients lie in."""
        ids, works = set(map(id, local)), []
        for blocks in self.blocks.values():
            if not ids.isdisjoint(blocks.begins):
                own, whole = blocks.own, blocks.gradients
                works.append(
                    launch(
                        self.group, "all_gather", own, whole, own.shape,
                        label="gradients to all", async_op=True,
                    )
                )  # fmt: skip
        for work in works:
            work.wait()

    def _take(
        self,
        count: int,
        dtype: torch.dtype,
        device: torch.device | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """The next part of the arena."""
        begin = -(-self._used // _LINE) * _LINE
        self._used = begin + count * dtype.itemsize
        return self.arena[begin : self._used].view(dtype)


class ArenaPlan(NamedTuple):
    """What an arena will hold.

    Attributes:
        rooms: the elements that each parameter takes, by its id.
        units: the number of units of which sums are exchanged.
        nbytes: the bytes of the arena.
    """

    rooms: dict[int, int]
    units: int
    nbytes: int


def plan_arena(
    parameters: Sequence[torch.Tensor], ranks: int, limit: float, averages: bool
) -> ArenaPlan:
    """Plans the arena of parameters, with their gradients if a step averages them."""
    rooms: dict[int, int] = {}
    for bucket in partition(parameters, limit, kind_of):
        rooms |= _rooms(bucket, ranks)
    sizes: dict[Kind, int] = {}
    for parameter in parameters:
        sizes[kind_of(parameter)] = sizes.get(kind_of(parameter), 0) + rooms[id(parameter)]
    units = sum(-(-parameter.numel() // UNIT) for parameter in parameters)
    total = _C.shard_sums * units * 8 + len(sizes) * 2 * _LINE
    for kind, count in sizes.items():
        of_gradients = kind.grad_dtype.itemsize if averages else 0
        total += count * (kind.dtype.itemsize + of_gradients)
    return ArenaPlan(rooms, units, total)


def _rooms(bucket: Sequence[torch.Tensor], ranks: int) -> dict[int, int]:
    """The elements that each parameter of a bucket takes, by its id."""
    rooms = {id(p): -(-max(p.numel(), 1) // UNIT) * UNIT for p in bucket}
    total, unit = sum(rooms.values()), ranks * UNIT
    rooms[id(bucket[-1])] += -total % unit
    return rooms
