"""Gradients in flat memory in the window, cut into buckets, and the ranks' weights in a mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NoReturn

import torch

from pycomm._training.flat import Layout, Place
from pycomm.collectives import broadcast
from pycomm.group import Group

_MIB = 1 << 20
_FEWEST = 16  # so that all but the last sixteenth of an exchange can overlap backward
_SMALLEST = _MIB


class Bucket:
    """Gradients that are exchanged together.

    Attributes:
        flat: all gradients, with zeros as padding.
        parameters: the parameters of these gradients.
        ids: ids of the parameters.
        begins: the offset in `flat` of each gradient.
        waiting: ids of the parameters whose gradients have not arrived in this backward.
        sent: True once the exchange of this backward has been started.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        self.parameters = list(parameters)
        self.ids = set(map(id, parameters))
        first, last = places[0], places[-1]
        self._piece, kind = first.piece, first.piece.kind
        self._gradient_kind = torch.strided, kind.grad_dtype, kind.device
        end = last.offset + self.parameters[-1].numel()
        self.flat = first.piece.gradients[first.offset : end]
        self.begins = [place.offset - first.offset for place in places]
        self.waiting: set[int] = set()
        self.sent = False
        self._views = {
            id(parameter): place.of(place.piece.gradients, parameter)
            for parameter, place in zip(parameters, places, strict=True)
        }
        self.reset()

    def reset(self) -> None:
        """Prepares for a backward: no gradient has arrived."""
        self.waiting = set(self.ids)
        self.sent = False

    @property
    def arrived(self) -> int:
        """The number of gradients that have arrived."""
        return len(self.parameters) - len(self.waiting)

    def complete(self) -> list[torch.Tensor]:
        """Fills in gradients that have not arrived; returns the parameters without a gradient."""
        late = [parameter for parameter in self.parameters if id(parameter) in self.waiting]
        missing = [parameter for parameter in late if parameter.grad is None]
        for parameter in late:
            self.put(parameter)
        return missing

    def put(self, parameter: torch.Tensor) -> None:
        """Moves a gradient into the bucket. A missing one counts as zeros and stays missing."""
        view, gradient = self._views[id(parameter)], parameter.grad
        if gradient is not None:
            kind = gradient.layout, gradient.dtype, gradient.device
            if kind != self._gradient_kind:
                self._refuse(*kind)
        if not view.is_meta:  # else it is moved when the bucket is sent
            self._piece.put(parameter, view)
        self.waiting.discard(id(parameter))

    def _refuse(self, layout: torch.layout, dtype: torch.dtype, device: torch.device) -> NoReturn:
        """Raises ValueError for a gradient of this kind."""
        wanted, of_dtype, on_device = self._gradient_kind
        if layout != wanted:
            raise ValueError(f"gradients must be dense, got one of layout {layout}")
        raise ValueError(
            f"gradients must be {of_dtype} on {on_device}, as when the module was wrapped, "
            f"got {dtype} on {device}: wrap it anew"
        )

    def adopt(self, parameter: torch.Tensor) -> None:
        """Makes the bucket's values the parameter's gradient."""
        self._piece.give(parameter, self._views[id(parameter)])


class Slab:
    """The memory of all buckets, one piece per kind. New buckets reuse it.

    Flattened parameters keep their gradients in place, whether they were flattened before or after.
    Buckets are then runs of neighbouring gradients; only the order of buckets follows backward.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], limit: float, layout: Layout) -> None:
        self.limit = bucket_limit(parameters, limit)
        self._layout = layout

    def cut(self, parameters: Sequence[torch.Tensor]) -> list[Bucket]:
        """Buckets for the gradients of the parameters, ordered by when they will be full."""
        self._layout.arrange(parameters)
        order = {id(parameter): index for index, parameter in enumerate(parameters)}
        buckets = [Bucket(run, [self._layout[p] for p in run]) for run in self._runs(parameters)]
        return sorted(buckets, key=lambda bucket: max(order[id(p)] for p in bucket.parameters))

    def _runs(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Lists of parameters that lie directly one after the other, up to the limit."""
        number = {piece: index for index, piece in enumerate(self._layout.pieces)}

        def begin(parameter: torch.Tensor) -> tuple[int, int]:
            place = self._layout[parameter]
            return number[place.piece], place.offset

        stretch: dict[int, tuple[int, int]] = {}  # its beginning, by the parameter's id
        first = end = (-1, 0)
        lying = sorted(parameters, key=begin)
        for parameter in lying:
            if begin(parameter) != end:
                first = begin(parameter)
            stretch[id(parameter)] = first
            end = begin(parameter)[0], begin(parameter)[1] + self._layout.room(parameter)
        return partition(lying, self.limit, lambda parameter: stretch[id(parameter)])


def bucket_limit(parameters: Iterable[torch.Tensor], limit: float) -> float:
    """The largest size of a bucket of several parameters, in bytes; at most `limit`."""
    nbytes = sum(parameter.nbytes for parameter in parameters)
    return min(limit, max(_SMALLEST, nbytes // _FEWEST))


def partition(
    tensors: Iterable[torch.Tensor],
    limit: float,
    kind: Callable[[torch.Tensor], Hashable] = lambda tensor: (tensor.dtype, tensor.device),
) -> list[list[torch.Tensor]]:
    """Cuts a sequence into lists of one kind, by default dtype and device, of about `limit` bytes.

    The lists are in the order of their last members.
    """
    filling: dict[Hashable, list[torch.Tensor]] = {}
    left: dict[Hashable, float] = {}
    ends: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        key = kind(tensor)
        if key not in filling or tensor.nbytes > left[key]:
            filling[key], left[key] = [], limit
        filling[key].append(tensor)
        left[key] -= tensor.nbytes
        ends[id(filling[key])] = index, filling[key]
    return [members for _, members in sorted(ends.values(), key=lambda end: end[0])]


def broadcast_all(
    tensors: Iterable[torch.Tensor],
    source: int,
    group: Group,
    receives: bool = True,
    keeps_equal: bool = False,
) -> None:
    """Sends one rank's tensors to all ranks that receive them, many small tensors at a time.

    Args:
        tensors: the tensors.
        source: the rank that sends.
        group: the ranks.
        receives: False on ranks that keep their own tensors.
        keeps_equal: True does not write tensors with equal bits, so that their version counters
            stay; on CUDA, this synchronises.
    """
    for members in partition((tensor.detach() for tensor in tensors), _MIB):
        flat = torch.cat([member.reshape(-1) for member in members])
        broadcast(flat.view(torch.uint8), source, group=group)
        begin = 0
        for member in members if receives and group.rank != source else ():
            end = begin + member.numel()
            new = flat[begin:end]
            if not (keeps_equal and _same_bits(new, member)):
                member.copy_(new.view(member.shape))
            begin = end


def _same_bits(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    return torch.equal(flat.view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def window_layout(parameters: Sequence[torch.Tensor], group: Group) -> Layout:
    """A layout of parameters whose gradients lie in the window."""
    return Layout(parameters, functools.partial(gradient_memory, group))


def gradient_memory(
    group: Group, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocates memory in the window; on CUDA, outside of it if the window is full."""
    try:
        return group.empty(count, dtype=dtype, device=device)
    except MemoryError:
        if device.type == "cpu":
            raise
        return torch.empty(count, dtype=dtype, device=device)


# Weights of ranks in a mean.


class WeightedMean:
    """This rank's weight.

    Attributes:
        weight: the weight.
        total: the sum of all ranks' weights, which the announcement of an exchange brings.
    """

    def __init__(self, weight: float, group: Group) -> None:
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight must be finite and not negative, got {weight}")
        self.weight, self.total = float(weight), 0.0
        self._size = group.size

    @property
    def is_zero(self) -> bool:
        """True if this rank's weight is 0."""
        return self.weight == 0

    def scale(self, gradients: torch.Tensor) -> None:
        """Scales gradients so that their mean is the weighted one. Weight 0 zeroes even NaN."""
        if self.total == 0:
            raise ValueError("weight must be positive on some rank, got 0 on all")
        if self.is_zero:
            gradients.zero_()
        else:
            gradients.mul_(self.weight * self._size / self.total)
