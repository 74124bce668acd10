"""Gradients that are divided among the ranks: each rank keeps its part of the averages.

Backward's gradients are copied into one of three slots in the window, and freed. While backward
goes on, a reduce-scatter averages each block of the slot into its owner's memory. A bucket that is
larger than a slot goes through several slots, a range of every block at a time.

If a rank has averages of earlier backwards, an all-gather first brings all ranks' averages into the
slot. Each rank adds its gradients to them, and the sums are averaged. So the result has the same
bits as without division.

Between backward and step, a parameter's gradient is a stand-in that takes no memory: all its
elements share one NaN, so that nobody mistakes it for the gradient. It shows what the program does
with the gradient: a dropped gradient removes the stand-in, and a zeroed one overwrites the NaN.

On CUDA, copies and averages run in order on a stream of their own, so that the host waits for no
slot; the stream of the step waits for the last average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from pycomm._runtime.host import huge_page_zeros
from pycomm._runtime.torch_private import no_dispatch, no_torch_function, pytree, schema_of
from pycomm._training.parameters import part_of
from pycomm._training.shards import OwnedRange, Part, Shards
from pycomm._work import Work, launch

if TYPE_CHECKING:
    from pycomm._training.buckets import Bucket, WeightedMean

# The tensor in ``p.grad`` if a rank has only its part of a gradient.

ADVICE = (
    "this rank has only a part of it: call reduce_gradients() of the wrapper before changing "
    "gradients; to clip them, give max_norm to the optimizer; to scale the loss, use "
    "pycomm.optim.GradScaler"
)


class DividedGradient(torch.Tensor):
    """A tensor whose elements share memory, so that it can only be zeroed as a whole.

    Other writes raise an error that says why. Views are divided gradients, too; results of other
    operations are plain tensors.

    Attributes:
        whole: the number of elements of the whole gradient, also in a view.
    """

    __torch_function__ = no_torch_function  # makes attributes as fast as a plain tensor's
    whole: int

    @classmethod
    def of(cls, values: torch.Tensor, whole: int) -> DividedGradient:
        """Wraps a view of a gradient with `whole` elements."""
        made = values.as_subclass(cls)
        made.whole = whole
        return made

    def __repr__(self) -> str:  # type: ignore[override] # torch's stubs have another signature
        return repr(self.clone())

    def tolist(self) -> Any:
        """See :meth:`torch.Tensor.tolist`."""
        return self.clone().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stubs have another signature
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, unless it writes only some elements, or values other than 0."""
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            if not (_zeroes(func, args) and tensor.numel() == tensor.whole):
                raise RuntimeError(f"{func} on a divided gradient: {ADVICE}")
        with no_dispatch():
            made = func(*args, **kwargs)
            if not func.is_view:
                return made
            return pytree.tree_map(lambda view: cls.of(view, args[0].whole), made)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DividedGradient]:
    """The divided gradients that an operation writes to."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    values = [named[a.name] for a in schema.arguments if a.is_write and a.name in named]
    return [one for one in pytree.tree_leaves(values) if isinstance(one, DividedGradient)]


def _zeroes(func: Any, args: Sequence[Any]) -> bool:
    """True for an operation that sets all elements to 0."""
    name = schema_of(func).name
    return name in ("aten::zero_", "aten::_foreach_zero_") or (
        name == "aten::fill_" and not args[1]
    )


# Gradients that are divided among the ranks: each rank keeps its part of the averages.

SLOTS = 3
_LINE = 64  # bytes


class _Span(NamedTuple):
    """The elements of one parameter of a bucket that one rank owns."""

    number: int  # of the parameter
    owned: OwnedRange
    place: int  # in the rank's block


class _Run(NamedTuple):
    """Neighbouring elements of one parameter of a bucket that one rank owns, in a slot."""

    number: int  # of the parameter
    begin: int
    end: int
    offset: int  # in the slot, in elements


class _Portion(NamedTuple):
    """A range of every block of a bucket, which goes through a slot at once.

    Attributes:
        own: this rank's averages, padding included.
        runs: the gradients.
    """

    own: torch.Tensor
    runs: list[_Run]


class _StandIn:
    """Stands for a parameter's gradient, and shows whether it has been written.

    On CUDA its value is read only after a write that torch has counted, because reading waits.
    """

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        self._number = torch.full((), math.nan, dtype=dtype, device=parameter.device)
        values = self._number.expand(parameter.shape)
        self.tensor = DividedGradient.of(values, parameter.numel())
        self._version = self.tensor._version

    def is_whole(self) -> bool:
        """True if nothing has written to it, by torch's version counter and by its value."""
        if self.tensor.numel() == 0:
            return True
        same = self.tensor.data_ptr() == self._number.data_ptr()
        if not same or self.tensor._version != self._version:
            return False
        return self._number.is_cuda or math.isnan(self._number)

    def is_zeroed(self) -> bool:
        """True if it has been zeroed."""
        return self.tensor.data_ptr() == self._number.data_ptr() and not bool(self._number)

    def renew(self) -> None:
        """Makes it NaN again."""
        self._number.fill_(math.nan)
        self._version = self.tensor._version


def slots_bytes(slot_bytes: int, ranks: int) -> int:
    """The bytes of all slots, if each has at least this size."""
    return SLOTS * -(-slot_bytes // (ranks * _LINE)) * ranks * _LINE


class GradShardBuffers:
    """The parts of a wrapper's averaged gradients that this rank keeps.

    Args:
        shards: the division of the parameters.
        buckets: the buckets.
        slot_bytes: the size of a slot.

    Attributes:
        memory: the slots in the window, as bytes.
        buffers: this rank's block of each bucket.
    """

    def __init__(self, shards: Shards, buckets: Sequence[Bucket], slot_bytes: int) -> None:
        self._group, self._layout = shards.group, shards.layout  # shards have this object
        ranks = shards.group.size
        nbytes = slots_bytes(slot_bytes, ranks)
        self._slot_bytes = nbytes // SLOTS
        device = buckets[0].parameters[0].device if buckets else torch.device("cpu")
        self.memory = shards.group.empty(nbytes, dtype=torch.uint8, device=device)
        self.memory.zero_()  # padding is sent, too
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._own: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, _StandIn] = {}
        self._kept: set[int] = set()  # ids of parameters whose gradient is the stand-in
        self._gathered: dict[int, TensorWeakRef] = {}  # whole gradients, by the parameter's id
        self.buffers: list[torch.Tensor] = []
        self._portions = {
            id(bucket.parameters[0]): self._divide(shards, bucket) for bucket in buckets
        }
        self._adds: set[int] = set()  # ids of parameters whose averages are added to
        self._zeroed: set[int] = set()  # ids of parameters whose stand-in was zeroed
        self._works: list[Work | None] = [None] * SLOTS
        self._sent = self._gathered_bytes = 0

    def _divide(self, shards: Shards, bucket: Bucket) -> list[_Portion]:
        """Makes this rank's memory for a bucket, and cuts the bucket into portions."""
        ranks, dtype = self._group.size, bucket.flat.dtype
        spans, count = _spans(shards, bucket.parameters)
        block = huge_page_zeros(count, dtype, self.memory.device)
        self.buffers.append(block)
        for parameter in bucket.parameters:
            self._own[id(parameter)] = block[:0]
            self._stand_ins[id(parameter)] = _StandIn(parameter, dtype)
        for span in spans:
            if span.owned.rank == self._group.rank:
                place = block[span.place : span.place + span.owned.end - span.owned.begin]
                self._own[id(bucket.parameters[span.number])] = place
        room = self._slot_bytes // ranks // dtype.itemsize
        portions = (
            _portion(spans, block, at, min(at + room, count)) for at in range(0, count, room)
        )
        return [portion for portion in portions if portion.runs]  # others are padding

    def is_divided(self, parameter: torch.Tensor) -> bool:
        """True if this rank's part of the parameter's gradient lies here.

        Raises:
            RuntimeError: the gradient has been changed or replaced since.
        """
        stand_in, gradient = self._stand_ins[id(parameter)], parameter.grad
        if gradient is None or id(parameter) not in self._kept:
            return False
        if gradient is stand_in.tensor and stand_in.is_whole():
            return True
        if gradient is stand_in.tensor and stand_in.is_zeroed():
            self.own(parameter).zero_()
            stand_in.renew()
            self._zeroed.add(id(parameter))
            return True
        raise RuntimeError(
            f"gradient of a parameter of shape {tuple(parameter.shape)} has been changed, but "
            f"{ADVICE}"
        )

    def has_gathered(self, parameter: torch.Tensor) -> bool:
        """True if the parameter's gradient is one that :meth:`gather` has made whole."""
        gathered = self._gathered.get(id(parameter))
        return gathered is not None and gathered() is parameter.grad

    def forget_dropped(self, parameter: torch.Tensor) -> None:
        """Forgets a gradient that the user has dropped, since a new one has come."""
        if parameter.grad is not self._stand_ins[id(parameter)].tensor:
            self._kept.discard(id(parameter))

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter's averaged gradient, flat."""
        return self._own[id(parameter)]

    def begin(self, parameters: Iterable[torch.Tensor], noted: bool = False) -> None:
        """Prepares for a backward, whose gradients will be added to the averages that lie here.

        Args:
            parameters: the parameters.
            noted: True takes the gradients as the last backward left them, whatever the program has
                done since: for a rank whose backward has raised, and whose result is dropped.
        """
        self._adds.clear()
        self._zeroed.clear()
        for parameter in parameters:
            if id(parameter) in self._kept if noted else self.is_divided(parameter):
                self._adds.add(id(parameter))
                parameter.grad = None  # backward would add to it
        self._kept.clear()

    def resume(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undoes :meth:`begin` after a backward that brought no gradients.

        Zeroed gradients stay None. A loss of this backward's results, such as a gradient penalty,
        may come next; its backward reaches parameters before the hook on the outputs.
        """
        self.keep(p for p in parameters if self.accumulates(p) and id(p) not in self._zeroed)
        self._adds.clear()

    @property
    def adds(self) -> bool:
        """True if the running backward adds to gradients that lie here."""
        return bool(self._adds)

    def send(self, bucket: Bucket, weighing: WeightedMean | None) -> None:
        """Takes the gradients of a bucket, and starts to average them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for portion in self._portions[id(bucket.parameters[0])]:
                slot = self._sent % SLOTS
                self._wait(slot)
                self._works[slot] = self._average(bucket.parameters, portion, slot, weighing)
                self._sent += 1
        for parameter in bucket.parameters:
            parameter.grad = None

    def finish(self) -> int:
        """Waits until all buckets have been averaged.

        Returns:
            The bytes of earlier backwards' averages that an all-gather has collected.
        """
        for slot in range(SLOTS):
            self._wait(slot)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            self._group.check()
        gathered, self._gathered_bytes, self._sent = self._gathered_bytes, 0, 0
        return gathered

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the averages the gradients of these parameters."""
        for parameter in parameters:
            stand_in = self._stand_ins[id(parameter)]
            if not stand_in.is_whole():  # zeroed after the last step, and then dropped
                stand_in.renew()
            parameter.grad = stand_in.tensor
            self._kept.add(id(parameter))

    def accumulates(self, parameter: torch.Tensor) -> bool:
        """True if the last backward added to a gradient that the parameter had."""
        return id(parameter) in self._adds

    def gather(self, parameters: Iterable[torch.Tensor], noted: bool = False) -> None:
        """Makes gradients that lie here whole; all ranks must call this. See :meth:`begin`."""
        parameters = list(parameters)
        for parameter in parameters:
            if not (id(parameter) in self._kept if noted else self.is_divided(parameter)):
                continue
            whole = _part(parameter).gather(self.own(parameter), parameter.detach())
            parameter.grad, self._gathered[id(parameter)] = whole, TensorWeakRef(whole)
        self._kept.difference_update(map(id, parameters))

    def _average(
        self,
        parameters: Sequence[torch.Tensor],
        portion: _Portion,
        slot: int,
        weighing: WeightedMean | None,
    ) -> Work:
        """Fills a slot, and starts to average each block at its owner."""
        group, (own, runs) = self._group, portion
        adds = [id(parameters[run.number]) in self._adds for run in runs]
        begin, nbytes = slot * self._slot_bytes, group.size * own.nbytes
        flat = self.memory[begin : begin + nbytes].view(own.dtype)
        bits = int("".join("01"[add] for add in adds), 2)
        label = f"slot {slot}, {len(runs)} runs, adds {bits:x}"
        if any(adds):
            launch(group, "all_gather", own, flat, own.shape, label=label, async_op=False)
            self._gathered_bytes += nbytes
        for run, add in zip(runs, adds, strict=True):
            self._take(parameters[run.number], run, flat, add)
        if weighing is not None:
            weighing.scale(flat)  # may raise, so nothing counts as sent before
        work: Work = launch(
            group, "reduce_scatter", flat, own, own.shape, "avg", label=label, async_op=True
        )
        return work

    def _take(self, parameter: torch.Tensor, run: _Run, flat: torch.Tensor, add: bool) -> None:
        """Copies a run of a gradient into a slot, or adds it to what is there."""
        gradient = parameter.grad
        place = flat[run.offset : run.offset + run.end - run.begin]
        if gradient is None:
            if not add:
                place.zero_()
            return
        if self._stream is not None:
            gradient.record_stream(self._stream)  # it is dropped before the copy has run
        strides = self._layout[parameter].strides
        if gradient.stride() != strides:
            dense = gradient.new_empty_strided(gradient.shape, strides)
            gradient = parameter.grad = dense.copy_(gradient.detach())
        begin = int(gradient.storage_offset()) + run.begin
        values = gradient.detach().as_strided(place.shape, (1,), begin)
        place.add_(values) if add else place.copy_(values)

    def _wait(self, slot: int) -> None:
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            work.wait()


def _spans(shards: Shards, parameters: Sequence[torch.Tensor]) -> tuple[list[_Span], int]:
    """The places of a bucket's parameters in blocks, and the size of a block."""
    spans = []
    first, last = shards.extent(parameters)
    count = (last - first) // shards.group.size
    for number, parameter in enumerate(parameters):
        begin = shards.layout[parameter].offset - first
        for owned in _part(parameter).ranges:
            place = begin + owned.begin - owned.rank * count
            spans.append(_Span(number, owned, place))
    return spans, count


def _part(parameter: torch.Tensor) -> Part:
    part: Part = part_of(parameter)
    return part


def _portion(spans: Iterable[_Span], block: torch.Tensor, first: int, last: int) -> _Portion:
    """Elements [first, last) of each block."""
    runs = []
    for number, (rank, begin, end), place in spans:
        low, high = max(place, first), min(place + end - begin, last)
        if low < high:
            offset = rank * (last - first) + low - first
            runs.append(_Run(number, begin + low - place, begin + high - place, offset))
    return _Portion(block[first:last], runs)
