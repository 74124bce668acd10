"""Flat memory for gradients, in the shared window, cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._parameters import dense_strides

if TYPE_CHECKING:
    from pycomm.group import Group

_LINE = 64  # bytes; buckets begin at multiples
_FEWEST = 16  # so that all but the last sixteenth of an exchange can hide behind backward
_SMALLEST = 1 << 20

Kind = tuple[torch.dtype, torch.device]


class Bucket:
    """Gradients that are exchanged together.

    Attributes:
        flat: all of them, one behind the other.
        parameters: whose they are.
        waiting: ids of those that have not been put here in this backward.
        sent: whether the exchange of this backward has been started.
    """

    def __init__(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.parameters = list(parameters)
        self.waiting: set[int] = set()
        self.sent = False
        self._views = {}
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            self._views[id(parameter)] = flat[begin:end].as_strided(
                parameter.shape, dense_strides(parameter)
            )
            begin = end
        self.reset()

    def reset(self) -> None:
        """Before a backward: nothing is here."""
        self.waiting = set(map(id, self.parameters))
        self.sent = False

    @property
    def arrived(self) -> int:
        """How many have been put here."""
        return len(self.parameters) - len(self.waiting)

    def complete(self) -> list[torch.Tensor]:
        """Puts here what is waiting; returns whose that is."""
        missing = [parameter for parameter in self.parameters if id(parameter) in self.waiting]
        for parameter in missing:
            self.put(parameter)
        return missing

    def put(self, parameter: torch.Tensor) -> None:
        """Makes the parameter's gradient lie here; zeros stand for none, which stays none."""
        view = self._views[id(parameter)]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:
            raise ValueError(f"gradients must be dense, got one of layout {gradient.layout}")
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
            parameter.grad = view
        self.waiting.discard(id(parameter))

    def adopt(self, parameter: torch.Tensor) -> None:
        """Gives the parameter what lies here for its gradient."""
        parameter.grad = self._views[id(parameter)]


class Slab:
    """The memory of all buckets, one piece per dtype and device; new buckets use it again."""

    def __init__(self, parameters: Sequence[torch.Tensor], limit: float, group: Group) -> None:
        nbytes = sum(parameter.nbytes for parameter in parameters)
        self._limit = min(limit, max(_SMALLEST, nbytes // _FEWEST))
        self._pieces: dict[Kind, torch.Tensor] = {}
        for kind in dict.fromkeys(map(_kind, parameters)):
            # Wherever buckets are cut, each wastes less than a line.
            lines = sum(-(-p.nbytes // _LINE) for p in parameters if _kind(p) == kind)
            count = (lines * _LINE) // kind[0].itemsize
            self._pieces[kind] = _memory(count, *kind, group)

    def cut(self, parameters: Sequence[torch.Tensor]) -> list[Bucket]:
        """Buckets with the gradients of the parameters in that order; in that order they fill."""
        used = dict.fromkeys(self._pieces, 0)
        buckets = []
        for members in partition(parameters, self._limit):
            kind = _kind(members[0])
            begin, count = used[kind], sum(parameter.numel() for parameter in members)
            buckets.append(Bucket(self._pieces[kind][begin : begin + count], members))
            line = _LINE // kind[0].itemsize
            used[kind] = begin + -(-count // line) * line
        return buckets


def partition(tensors: Iterable[torch.Tensor], limit: float) -> list[list[torch.Tensor]]:
    """Cuts a sequence into lists of one dtype and device, of about `limit` bytes.

    The lists are in the order of their last members.
    """
    filling: dict[Kind, list[torch.Tensor]] = {}
    room: dict[Kind, float] = {}
    ends: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        kind = _kind(tensor)
        if kind not in filling or tensor.nbytes > room[kind]:
            filling[kind], room[kind] = [], limit
        filling[kind].append(tensor)
        room[kind] -= tensor.nbytes
        ends[id(filling[kind])] = index, filling[kind]
    return [members for _, members in sorted(ends.values(), key=lambda end: end[0])]


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device


def _memory(count: int, dtype: torch.dtype, device: torch.device, group: Group) -> torch.Tensor:
    """In the window where there is room."""
    try:
        return group.empty(count, dtype=dtype, device=device)
    except MemoryError:
        if device.type == "cpu":
            raise
        return torch.empty(count, dtype=dtype, device=device)
