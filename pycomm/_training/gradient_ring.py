"""Gradients that are divided among the ranks: each rank keeps its part of the averages.

Backward's gradients are copied into one of three buckets in the window, and freed. While backward
goes on, each rank averages its part of the bucket into memory of its own. Another bucket then takes
the same place.

Between backward and step, a parameter's gradient is a stand-in that takes no memory: all its
elements are one NaN, so that nobody mistakes it for the gradient. It shows whether gradients have
been dropped: then it is gone.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.dtypes import DTYPES
from pycomm._training.flat import place_of_states
from pycomm._training.shards import Shards, part_of
from pycomm._training.zeros import zeros
from pycomm._work import Work

if TYPE_CHECKING:
    from pycomm._training.buckets import Bucket
    from pycomm._training.weighing import Weighing

SLOTS = 3


class GradientRing:
    """The parts of a wrapper's averaged gradients that this rank keeps.

    Args:
        shards: the division of the parameters.
        buckets: the parameters of each bucket.

    Attributes:
        memory: the buckets in the window, as bytes.
        buffers: memory of the averages.
    """

    def __init__(self, shards: Shards, buckets: Sequence[Bucket]) -> None:
        self._shards = shards
        self._slot_bytes = max(bucket.flat.nbytes for bucket in buckets)
        self._slot_bytes = -(-self._slot_bytes // 64) * 64
        self.memory = shards.group.empty(SLOTS * self._slot_bytes, dtype=torch.uint8)
        self.buffers: list[torch.Tensor] = []
        self._own: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
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
            stand_in = torch.full((), math.nan, dtype=kind.grad_dtype)
            self._stand_ins[id(parameter)] = stand_in.expand(parameter.shape)
        self.buffers = list(made.values())
        self._adds: set[int] = set()  # ids of parameters whose averages are added to
        self._works: list[tuple[Work, _C.ShardedAverage] | None] = [None] * SLOTS
        self._sent = 0

    def holds(self, parameter: torch.Tensor) -> bool:
        """True if this rank's part of the parameter's gradient lies here."""
        return parameter.grad is not None and parameter.grad is self._stand_ins[id(parameter)]

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter's averaged gradient, flat."""
        return self._own[id(parameter)]

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prepares for a backward, whose gradients will be added to those that lie here."""
        self._adds.clear()
        for parameter in filter(self.holds, parameters):
            self._adds.add(id(parameter))
            parameter.grad = None  # backward would add to it

    def send(self, bucket: Bucket, weighing: Weighing | None) -> None:
        """Takes the gradients of a bucket, and starts to average them."""
        slot, self._sent = self._sent % SLOTS, self._sent + 1
        self._wait(slot)
        begin = slot * self._slot_bytes
        flat = self.memory[begin : begin + bucket.flat.nbytes].view(bucket.flat.dtype)
        for parameter, view in bucket.places_in(flat):
            self._take(parameter, view)
        if weighing is not None:
            weighing.scale(flat)
        average = _C.ShardedAverage(
            self.memory.data_ptr(), self.memory.nbytes, array("q", self._rows(bucket, flat))
        )
        adds = "".join(str(int(id(parameter) in self._adds)) for parameter in bucket.parameters)
        label = f"{bucket.flat.numel()} gradients, slot {slot}, adds {int(adds, 2):x}"
        work = Work(average.submit(self._shards.group._core, label), (self.memory, *self.buffers))
        self._works[slot] = work, average

    def finish(self) -> None:
        """Waits until all buckets have been averaged."""
        for slot in range(SLOTS):
            self._wait(slot)
        self._sent = 0

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the averages the gradients of these parameters."""
        for parameter in parameters:
            parameter.grad = self._stand_ins[id(parameter)]

    def was_added_to(self, parameter: torch.Tensor) -> bool:
        """True if the parameter had a gradient before the last backward."""
        return id(parameter) in self._adds

    def gather(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes gradients that lie here whole; all ranks must call this."""
        for parameter in filter(self.holds, parameters):
            part = part_of(parameter)
            assert part is not None
            parameter.grad = part.gather(self.own(parameter), parameter.detach())

    def _take(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Moves a gradient to its place in a bucket."""
        gradient = parameter.grad
        if gradient is not None:
            view.copy_(gradient.detach())
            parameter.grad = None
        else:  # -0 leaves what it is added to as it is
            view.fill_(-0.0 if id(parameter) in self._adds else 0.0)

    def _rows(self, bucket: Bucket, flat: torch.Tensor) -> Iterator[int]:
        """The words that describe this rank's part: csrc/cpu/optim/sharded_average.h."""
        for parameter, begin in zip(bucket.parameters, bucket.begins, strict=True):
            part, own = part_of(parameter), self.own(parameter)
            assert part is not None
            yield flat.data_ptr() + (begin + part.first) * flat.itemsize
            yield own.data_ptr()
            yield own.numel()
            yield int(id(parameter) in self._adds)
            yield DTYPES[flat.dtype]

    def _wait(self, slot: int) -> None:
        flight, self._works[slot] = self._works[slot], None
        if flight is not None:
            flight[0].wait()
