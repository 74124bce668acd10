"""Tensors of all ranks where they lie in shared memory, for :meth:`pycomm.Group.peers`.

Ranks allocate memory each for itself, so that a tensor lies at another offset on every rank. They
exchange the offsets, and each then keeps the memory around its tensor for good: nothing tells a
rank when the others use a view for the last time.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs import check_memory, operation_of
from pycomm._runtime import host
from pycomm._runtime.torch_private import storage_at

if TYPE_CHECKING:
    from pycomm._runtime.cuda import CudaSide
    from pycomm._runtime.lifetime import Member

_ELSEWHERE = -1

# Tensors of ranks that are threads, by address, from which other threads take them.
_offered: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def peers(
    group: Member, window: _C.Window, side: CudaSide | None, tensor: torch.Tensor
) -> list[torch.Tensor]:
    """The tensor of every rank; see :meth:`pycomm.Group.peers`.

    Args:
        group: this rank's membership.
        window: the group's window.
        side: this rank's CUDA side, if there is one.
        tensor: this rank's tensor.
    """
    check_memory("tensor", tensor)
    if len(group.nodes) > 1:
        raise ValueError(
            f"group must lie on one node, got one on {len(group.nodes)}: ranks of other nodes have "
            "no memory in common"
        )
    if tensor.numel() == 0:
        raise ValueError(f"tensor must have elements, got shape {tuple(tensor.shape)}")
    found = _OnCpu(group, window, tensor) if tensor.is_cpu else _OnCuda(group, side, tensor)
    places = _exchange(group, found.place, tensor)
    lacking = [rank for rank, place in enumerate(places) if place == _ELSEWHERE]
    if lacking:
        raise ValueError(
            "tensor must lie in the group's shared memory, as those of group.empty() do, got "
            f"others on ranks {', '.join(map(str, lacking))}{found.hint}"
        )
    found.keep()
    made = [
        tensor.detach() if rank == group.rank else _view(tensor, *found.at(rank, place))
        for rank, place in enumerate(places)
    ]
    found.leave()
    return made


def _exchange(group: Member, place: int, tensor: torch.Tensor) -> list[int]:
    """Every rank's place; ranks compare what else they have been given."""
    mine = host.tensor([place])
    every = host.empty(group.size, dtype=torch.int64)
    label = f"peers of {tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
    if not tensor.is_contiguous():
        label += f", strides {tensor.stride()}"
    operation = operation_of("all_gather", "auto", torch.int64, "sum")
    group._core.run(operation, 1, mine.data_ptr(), every.data_ptr(), None, label)
    return [int(n) for n in every]


def _span(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.itemsize * (1 + sum((n - 1) * stride for n, stride in steps)))


def _view(like: torch.Tensor, address: int, keep: Any) -> torch.Tensor:
    """A tensor at an address; `keep` lives as long as its storage."""
    storage = storage_at(address, like.device, _span(like))
    weakref.finalize(storage, id, keep).atexit = False
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, 0, like.shape, like.stride())


class _OnCpu:
    """A tensor in the heap of this rank's window.

    Attributes:
        place: where the tensor lies.
        hint: why it may lie elsewhere.
    """

    hint = ""

    def __init__(self, group: Member, window: _C.Window, tensor: torch.Tensor) -> None:
        self._group, self._window, self._tensor = group, window, tensor
        self.place = group._core.offset_of(tensor.data_ptr())

    def keep(self) -> None:
        """Keeps the memory for good."""
        _C.Allocation.lend(self._tensor.data_ptr())

    def at(self, rank: int, place: int) -> tuple[int, Any]:
        """The address of a rank's tensor, and what keeps it mapped."""
        address = self._group._core.address(rank, place, _span(self._tensor))
        return address, self._window

    def leave(self) -> None:
        """Called when this rank has its views."""


class _OnCuda:
    """A tensor in the heap of this rank's CUDA window, or any if ranks are threads.

    Attributes:
        place: where the tensor lies.
        hint: why it may lie elsewhere.
    """

    def __init__(self, group: Member, side: CudaSide | None, tensor: torch.Tensor) -> None:
        self._group, self._tensor, self._side = group, tensor, side
        known = side is not None and side.device == tensor.device
        transport = side.transport if side is not None else ""
        self._in_threads = known and transport == "threads"
        self.place, self.hint = _ELSEWHERE, ""
        if transport == "pinned host memory":
            self.hint = ": the group's CUDA tensors go through pinned host memory"
        if self._in_threads:
            self.place = tensor.data_ptr()
            _offered[self.place] = tensor.untyped_storage()
        elif side is not None and known:
            self.place = side.place_of(tensor)

    def keep(self) -> None:
        """Keeps the memory for good; in threads, the views keep it."""
        if self._side is not None and not self._in_threads:
            self._side.lend(self._tensor)

    def at(self, rank: int, place: int) -> tuple[int, Any]:
        """The address of a rank's tensor, and what keeps it."""
        assert self._side is not None
        return (place, _offered[place]) if self._in_threads else self._side.at(rank, place)

    def leave(self) -> None:
        """Called when this rank has its views; in threads, the others may need its tensor yet."""
        if self._in_threads:
            barrier = operation_of("barrier", "one_shot", torch.uint8)
            self._group._core.run(barrier, 0, 0, 0)
