"""Sums of the squares of gradients, which the exchange makes for an optimizer that clips.

The rank that averages a part of a bucket adds up the squares of every 1,024 elements while they are
in its cache (csrc/cpu/optim/measured_average.h). After backward all ranks have the sums of all
gradients. They have the bits that the optimizer's own pass would find, so an optimizer takes them
instead of reading the gradients, unless a gradient has been changed since.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._training.cuts import UNIT
from pycomm._training.flat import kind_of
from pycomm._training.snapshots import Snapshot, take_snapshots
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm._training.buckets import Bucket
    from pycomm.group import Group

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SquareSums:
    """The sums of one wrapper's gradients, which exchanges make if an optimizer wants them.

    Attributes:
        wanted: True if an optimizer has measured these gradients since the last exchange.
    """

    wanted = False

    def __init__(self) -> None:
        self._agreed = False  # whether the next exchange makes sums, on all ranks alike
        self._makes = False  # whether this one does
        self._measured: dict[int, Snapshot] = {}  # gradients, by the parameter's id

    def lay_out(self, buckets: Iterable[Bucket]) -> None:
        """Makes memory for the sums of these buckets."""
        self._begins: dict[int, int] = {}  # by the parameter's id
        self._ranges: dict[int, slice] = {}  # by the bucket's id
        end = 0
        for bucket in buckets:
            first = end
            for parameter in bucket.parameters:
                self._begins[id(parameter)] = end
                end += -(-parameter.numel() // UNIT)
                _of[id(parameter)] = self
            self._ranges[id(bucket)] = slice(first, end)
        self._memory = torch.zeros(end, dtype=torch.float64)
        self._measured = {}

    def begin(self) -> None:
        """Begins an exchange, before which gradients change."""
        self._measured = {}
        self._makes = self._agreed

    def of(self, bucket: Bucket) -> torch.Tensor | None:
        """The memory for a bucket's sums in this exchange, if it makes any."""
        return self._memory[self._ranges[id(bucket)]] if self._makes else None

    def finish(self, group: Group) -> None:
        """Gives all ranks all sums; each has zeros for those that other ranks have made."""
        if self._makes:
            all_reduce(self._memory, "sum", group=group)

    def agree(self, wanted_anywhere: bool) -> None:
        """Decides on the next exchange."""
        self._agreed, self.wanted = wanted_anywhere, False

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records that the sums of this exchange are those of the parameters' gradients."""
        if self._makes:
            self._measured = take_snapshots(parameters)

    def address(self, parameter: torch.Tensor, gradient: torch.Tensor) -> int:
        """The address of a gradient's sums; 0 if they are not known, or not those of its values."""
        measured = self._measured.get(id(parameter))
        if measured is None or not measured.is_still(gradient):
            return 0
        return self._memory.data_ptr() + self._begins[id(parameter)] * self._memory.itemsize


def can_sum(parameters: Sequence[torch.Tensor], group: Group) -> bool:
    """True if exchanges of the parameters' gradients can add up squares."""
    kinds = map(kind_of, parameters)
    alone = group.size == 1 or len(group.nodes) > 1 or group._spans(torch.device("cpu"))
    return not alone and all(k.device.type == "cpu" and k.grad_dtype in _FLOATS for k in kinds)


# The sums of each parameter's gradients, by its id.
_of: weakref.WeakValueDictionary[int, SquareSums] = weakref.WeakValueDictionary()


def known_sums(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> tuple[array[int], set[SquareSums]]:
    """The address of each gradient's sums, or 0, and what must stay alive for them.

    This makes the next exchanges of the parameters' gradients make sums.
    """
    addresses, owners = array("q"), set()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        sums = _of.get(id(parameter))
        if sums is not None:
            sums.wanted = True
            owners.add(sums)
        addresses.append(0 if sums is None else sums.address(parameter, gradient))
    return addresses, owners
