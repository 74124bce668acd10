"""Window memory of a process group that is used again instead of being freed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from pycomm._inputs import host
from pycomm._runtime.torch_private import backend_of, storage_users

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")


class Buffers:
    """Buffers for one process group.

    The kernel clears new memory of a window, which takes longer than exchanging it. So a buffer is
    kept and handed out again when no tensor shares its memory any more.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._users: list[int] = []  # of each buffer's memory, if only this list refers to it

    def take(self, group: ProcessGroup, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of `count` elements in CPU memory, in the window if possible."""
        nbytes = count * dtype.itemsize
        unused = [
            buffer
            for buffer, users in zip(self._kept, self._users, strict=True)
            if nbytes <= buffer.numel() <= 2 * nbytes and storage_users(buffer) == users
        ]
        buffer = min(unused, key=torch.Tensor.numel) if unused else self._add(group, nbytes)
        return buffer[:nbytes].view(dtype)

    def _add(self, group: ProcessGroup, nbytes: int) -> torch.Tensor:
        backend = backend_of(group, _CPU)
        with torch.inference_mode(False):  # else it could not be written outside of that mode
            if backend.supports_tensor_alloc(_CPU):
                buffer: torch.Tensor = backend.allocate_tensor(
                    nbytes, dtype=torch.uint8, device=_CPU
                )
            else:
                buffer = host.empty(nbytes, dtype=torch.uint8)
        self._kept.append(buffer)
        self._users.append(storage_users(buffer))
        return buffer


_buffers: weakref.WeakKeyDictionary[ProcessGroup, Buffers] = weakref.WeakKeyDictionary()


def buffers_of(group: ProcessGroup) -> Buffers:
    """The buffers of a process group."""
    return _buffers.setdefault(group, Buffers())
