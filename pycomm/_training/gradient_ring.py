"""Gradients that are divided among the ranks: each rank keeps its part of the averages.

Backward's gradients are copied into one of three slots in the window, and freed. While backward
goes on, each rank averages its part of the slot into memory of its own. A bucket that is larger
than a slot goes through several, of which each has some elements of every owner.

Between backward and step, a parameter's gradient is a stand-in that takes no memory: all its
elements are one NaN, so that nobody mistakes it for the gradient. It shows what others do with the
gradient: if they drop it, the stand-in is gone; if they zero it, the NaN is.

On CUDA, copies and averages run in order on a stream of their own, so that no slot is waited for;
the stream of the step waits for the last average.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm import _C
from pycomm._inputs.dtypes import DTYPES
from pycomm._training.divided import ADVICE, DividedGradient
from pycomm._training.flat import place_of_states
from pycomm._training.shards import Shards, part_of
from pycomm._training.zeros import zeros
from pycomm._work import Work

if TYPE_CHECKING:
    from pycomm._training.buckets import Bucket
    from pycomm._training.weighing import Weighing

SLOTS = 3
_LINE = 64  # bytes


class Run(NamedTuple):
    """Neighbouring elements of one of a bucket's parameters, of one owner, in a slot."""

    number: int  # of the parameter
    begin: int
    end: int
    offset: int  # in the slot, in elements
    rank: int


class _StandIn:
    """Stands for a parameter's gradient, and shows whether it has been written.

    On CUDA its value is read only after a write that torch has counted, because that waits.
    """

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        self._number = torch.full((), math.nan, dtype=dtype, device=parameter.device)
        values = self._number.expand(parameter.shape)
        self.tensor = DividedGradient.of(values, parameter.numel())
        self._version = self.tensor._version

    def is_whole(self) -> bool:
        """True if nothing has written to it, as torch counts and as it looks."""
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


class GradientRing:
    """The parts of a wrapper's averaged gradients that this rank keeps.

    Args:
        shards: the division of the parameters.
        buckets: the buckets.
        slot_bytes: the size of a slot.

    Attributes:
        memory: the slots in the window, as bytes.
        buffers: memory of the averages.
    """

    def __init__(self, shards: Shards, buckets: Sequence[Bucket], slot_bytes: int) -> None:
        self._shards = shards
        ranks = shards.group.size
        self._slot_bytes = -(-slot_bytes // (ranks * _LINE)) * ranks * _LINE
        device = buckets[0].parameters[0].device if buckets else torch.device("cpu")
        self.memory = shards.group.empty(SLOTS * self._slot_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._plans = {
            id(bucket.parameters[0]): _plan(bucket, ranks, self._slot_bytes) for bucket in buckets
        }
        self._own: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, _StandIn] = {}
        self._kept: set[int] = set()  # ids of parameters that have got their stand-ins
        made: dict[object, torch.Tensor] = {}
        for parameter in (p for bucket in buckets for p in bucket.parameters):
            part = part_of(parameter)
            assert part is not None
            place = place_of_states(part.own)
            assert place is not None
            kind = place.piece.kind
            if place.piece not in made:
                length = len(place.piece.gradients)
                made[place.piece] = zeros(length, kind.grad_dtype, kind.device)
            self._own[id(parameter)] = place.of(made[place.piece], part.own)
            self._stand_ins[id(parameter)] = _StandIn(parameter, kind.grad_dtype)
        self.buffers = list(made.values())
        self._adds: set[int] = set()  # ids of parameters whose averages are added to
        self._landings: list[Callable[[], object] | None] = [None] * SLOTS  # wait for averages
        self._sent = 0

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
            return True
        raise RuntimeError(
            f"gradient of a parameter of shape {tuple(parameter.shape)} has been changed, but "
            f"{ADVICE}"
        )

    def is_zeroed(self, parameter: torch.Tensor) -> bool:
        """True if the part that lies here is to be zeroed, as its stand-in has been."""
        stand_in = self._stand_ins[id(parameter)]
        if id(parameter) not in self._kept or parameter.grad is not stand_in.tensor:
            return False
        return stand_in.is_zeroed()

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter's averaged gradient, flat."""
        return self._own[id(parameter)]

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prepares for a backward, whose gradients will be added to those that lie here."""
        self._adds.clear()
        for parameter in filter(self.is_divided, parameters):
            self._adds.add(id(parameter))
            parameter.grad = None  # backward would add to it
        self._kept.clear()

    def send(self, bucket: Bucket, weighing: Weighing | None) -> None:
        """Takes the gradients of a bucket, and starts to average them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for runs in self._plans[id(bucket.parameters[0])]:
                slot = self._sent % SLOTS
                self._wait(slot)
                begin = slot * self._slot_bytes
                flat = self.memory[begin : begin + self._slot_bytes].view(bucket.flat.dtype)
                for run in runs:
                    self._take(bucket.parameters[run.number], run, flat)
                if weighing is not None:
                    weighing.scale(flat)  # may raise, so nothing counts as sent before
                self._sent += 1
                self._landings[slot] = self._average(bucket.parameters, runs, flat)
        for parameter in bucket.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Waits until all buckets have been averaged."""
        for slot in range(SLOTS):
            self._wait(slot)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            self._shards.group.check()
        self._sent = 0

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the averages the gradients of these parameters."""
        for parameter in parameters:
            parameter.grad = self._stand_ins[id(parameter)].tensor
            self._kept.add(id(parameter))

    def accumulates(self, parameter: torch.Tensor) -> bool:
        """True if the last backward added to a gradient that the parameter had."""
        return id(parameter) in self._adds

    def gather(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes gradients that lie here whole; all ranks must call this."""
        parameters = list(parameters)
        for parameter in filter(self.is_divided, parameters):
            part = part_of(parameter)
            assert part is not None
            parameter.grad = part.gather(self.own(parameter), parameter.detach())
        self._kept.difference_update(map(id, parameters))

    def _take(self, parameter: torch.Tensor, run: Run, flat: torch.Tensor) -> None:
        """Copies a run of a gradient into a slot."""
        gradient = parameter.grad
        place = flat[run.offset : run.offset + run.end - run.begin]
        if gradient is None:  # -0 leaves what it is added to as it is
            place.fill_(-0.0 if id(parameter) in self._adds else 0.0)
            return
        if self._stream is not None:
            gradient.record_stream(self._stream)  # it is dropped before the copy has run
        strides = self._shards.layout[parameter].strides
        if gradient.stride() != strides:
            dense = gradient.new_empty_strided(gradient.shape, strides)
            gradient = parameter.grad = dense.copy_(gradient.detach())
        begin = int(gradient.storage_offset()) + run.begin
        place.copy_(gradient.detach().as_strided(place.shape, (1,), begin))

    def _average(
        self, parameters: Sequence[torch.Tensor], runs: Iterable[Run], flat: torch.Tensor
    ) -> Callable[[], object] | None:
        """Starts to average this rank's part of a slot; returns what waits for it."""
        group, mine, adds = self._shards.group, array("q"), []
        for number, begin, end, offset, rank in runs:
            parameter = parameters[number]
            adds.append(str(int(id(parameter) in self._adds)))
            if rank == group.rank:  # struct OwnGradient of csrc/core/optim/shard.h
                part = part_of(parameter)
                assert part is not None
                own = self.own(parameter)[begin - part.first : end - part.first]
                mine.extend((flat.data_ptr() + offset * flat.itemsize, own.data_ptr(), end - begin))
                mine.extend((int(adds[-1]), DTYPES[flat.dtype]))
        label = f"slot {self._sent % SLOTS}, {len(adds)} runs, adds {int('0' + ''.join(adds), 2):x}"
        arena = self.memory.data_ptr(), self.memory.nbytes
        if self._stream is None:
            average = _C.ShardedAverage(*arena, mine)
            used = (self.memory, *self.buffers, average)
            work = Work(average.submit(group._core, label), used)
            return functools.partial(_wait_for, work, average)
        on_device = _C.CudaShardedAverage(*arena, mine)
        table = torch.empty(on_device.bytes, dtype=torch.uint8, device=flat.device)
        side = group._cuda_side(flat.device)
        place = table.data_ptr(), side.device.index, self._stream.cuda_stream
        on_device.run(side._core, *place, label)
        return None

    def _wait(self, slot: int) -> None:
        land, self._landings[slot] = self._landings[slot], None
        if land is not None:
            land()


def _wait_for(work: Work, _average: _C.ShardedAverage) -> None:
    """Waits for an average, which must live until then."""
    work.wait()


def _plan(bucket: Bucket, ranks: int, slot_bytes: int) -> list[list[Run]]:
    """Divides a bucket among slots, each with an equal share of every owner's elements."""
    item = bucket.flat.itemsize
    room, line = slot_bytes // ranks // item, _LINE // item
    plan: list[list[Run]] = []
    used = [0] * ranks  # elements of each owner so far, padding included
    for number, parameter in enumerate(bucket.parameters):
        part = part_of(parameter)
        assert part is not None
        for rank, first, end in part.ranges:
            begin = first
            while begin < end:
                slot, place = divmod(used[rank], room)
                count = min(end - begin, room - place)
                if slot == len(plan):
                    plan.append([])
                plan[slot].append(Run(number, begin, begin + count, rank * room + place, rank))
                begin += count
                used[rank] += -(-count // line) * line
    return plan
