"""Sends and receives between two ranks. Names follow torch.distributed."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from pycomm import _C, _work
from pycomm._init import resolve_group
from pycomm._inputs import (
    as_tensor,
    check_memory,
    check_no_gradient,
    check_no_overlap,
    on_stream_of_arrays,
    seconds,
)
from pycomm._runtime import host

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from pycomm.group import Group

    _Arrival: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, Callable[[bool], object]]

_ELEMENTS = {
    getattr(torch, name): number
    for name, number in _C.element_numbers.items()
    if hasattr(torch, name)
}
_TAGS = range(-(1 << 31), 1 << 31)
OWN_TAG = _TAGS[0]  # of the library's messages


class Request:
    """A running send or receive. It keeps its tensor alive."""

    def __init__(
        self,
        core: _C.Request,
        kept: tuple[torch.Tensor, ...],
        finish: Callable[[bool], object] | None = None,
    ) -> None:
        self._core = core
        self._kept = kept
        # Copies what was received to its tensor.
        self._finish = None if finish is None else lambda: finish(core.arrived_on_device)

    def wait(self) -> None:
        """Blocks until the operation is complete, and raises its error if it failed.

        For a send, "complete" means that the tensor may be changed; the receiver may not have
        called :func:`recv` yet.
        """
        self._core.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        """True if :meth:`wait` would return at once."""
        return self._core.completed()

    @property
    def source(self) -> int:
        """The rank that sent a received message. Waits."""
        self.wait()
        return self._core.source

    def __del__(self) -> None:
        # The operation still uses the tensor's memory, so it must not be freed yet.
        if not self._core.completed():
            _work.keep_alive(self._core, self._kept)


@on_stream_of_arrays
def send(
    tensor: Any,
    dst: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Sends a tensor to rank `dst`, which receives it with :func:`recv`.

    Returns when `tensor` may be changed. Small messages (up to 16 KiB) are then on their way; for
    larger ones this waits for the receiver. Between nodes, messages go over a TCP connection of
    the two ranks, which their first message opens. Sends and receives need not be in the order of
    collectives. A receive matches a send by rank and tag; with the same rank and tag, messages
    arrive in order.

    Args:
        tensor: of any dtype, shape and strides, or an array of NumPy or another library with
            DLPack. If it comes from ``group.empty()``, a receiver on the same node reads it
            directly. On a CUDA device it is sent after the current stream's work so far. If it goes
            through host memory (docs/how-to/cuda.md), the call waits for that work.
        dst: a rank of the group, on any node; it may be this rank.
        tag: a number of 32 bits that tells messages apart.
        group: as in :func:`pycomm.all_reduce`.
        timeout: the longest time without progress, in seconds or as a timedelta; by default the
            group's. After it the whole group has failed, on all ranks.

    Raises:
        ValueError, TypeError: an argument is not as described.
        pycomm.CollectiveError: the operation failed; for its subclasses see :mod:`pycomm.errors`.
        pycomm.GroupUnusable: the group is closed, has failed, or was inherited by a fork.
    """
    group = resolve_group(group)
    dense, on_device = _to_send(tensor, dst, group)
    group._core.send(*_arguments(dense, dst, tag, timeout), *on_device)


@on_stream_of_arrays
def recv(
    tensor: Any,
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> int:
    """Receives a tensor that another rank sends with :func:`send`.

    Args:
        tensor: overwritten; has as many elements as the sent tensor, of the same dtype. On a CUDA
            device it can then be used on the stream that is current at the end of the call, or in
            :meth:`Request.wait`.
        src: the sender's rank, or None for the first message with this tag from any rank of any
            node.
        tag: as in :func:`send`.
        group: as in :func:`send`.
        timeout: as in :func:`send`.

    Returns:
        The sender's rank. Raises the errors of :func:`send`; :class:`pycomm.Mismatch` if the
        message has another size or dtype.
    """
    group = resolve_group(group)
    host_memory, memory, finish = _to_receive(tensor, src, group)
    arguments = _arguments(host_memory, src, tag, timeout)
    if memory is not None:
        return Request(group._core.irecv(*arguments, memory.data_ptr()), (), finish).source
    source = group._core.recv(*arguments)
    finish(False)
    return source


@on_stream_of_arrays
def isend(
    tensor: Any,
    dst: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> Request:
    """Starts a :func:`send`; do not change `tensor` before the :class:`Request` is complete.

    Args:
        tensor: as in :func:`send`.
        dst: as in :func:`send`.
        tag: as in :func:`send`.
        group: as in :func:`send`.
        timeout: as in :func:`send`; counts from this call. The group's own timeout counts while a
            thread waits for the request.
    """
    group = resolve_group(group)
    dense, on_device = _to_send(tensor, dst, group)
    return Request(group._core.isend(*_arguments(dense, dst, tag, timeout), *on_device), (dense,))


@on_stream_of_arrays
def irecv(
    tensor: Any,
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> Request:
    """Starts a :func:`recv`; do not use `tensor` before :meth:`Request.wait` has returned.

    Args:
        tensor: as in :func:`recv`.
        src: as in :func:`recv`.
        tag: as in :func:`recv`.
        group: as in :func:`recv`.
        timeout: as in :func:`isend`.
    """
    group = resolve_group(group)
    host_memory, memory, finish = _to_receive(tensor, src, group)
    arguments = _arguments(host_memory, src, tag, timeout)
    if memory is None:
        return Request(group._core.irecv(*arguments), (host_memory,), finish)
    core = group._core.irecv(*arguments, memory.data_ptr())
    return Request(core, (host_memory, memory), finish)


def _checked(tensor: Any, *, written: bool) -> torch.Tensor:
    data = as_tensor("tensor", tensor, written=written)
    check_memory("tensor", data)
    check_no_gradient("tensor", data)
    return data


def _to_send(tensor: Any, dst: int, group: Group) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A contiguous tensor with the content of `tensor`, and its place and stream if on CUDA."""
    data = _checked(tensor, written=False)
    if _stays_on_device(data, dst, group):
        dense = data.detach().contiguous()
        return dense, (dense.data_ptr(), torch.cuda.current_stream(data.device).cuda_stream)
    if not group._takes_to_host(data.device, "messages"):
        return data.detach().contiguous(), ()
    from pycomm._runtime.cuda import HostMirror, fetch

    mirror = HostMirror(data)
    fetch(mirror)
    return mirror.host, ()


def _to_receive(tensor: Any, src: int | None, group: Group) -> _Arrival:
    """Contiguous host memory for the new content, on CUDA also device memory, and `finish`.

    ``finish(on_device)`` copies what has arrived, in host memory or on the device, to the tensor.
    """
    result = _checked(tensor, written=True)
    check_no_overlap("tensor", result)
    increment_version(result)  # autograd may have saved the old value
    result = result.detach()
    if _stays_on_device(result, src, group):
        from pycomm._runtime.cuda import DeviceReceive

        receive = DeviceReceive(result)
        if receive.memory is not None:
            return receive.host, receive.memory, receive.finish
    if group._takes_to_host(result.device, "messages"):
        from pycomm._runtime.cuda import HostMirror

        mirror = HostMirror(result)
        return mirror.host, None, lambda _: mirror.put_back()
    if result.is_contiguous():
        return result, None, lambda _: None
    dense = host.empty(*result.shape, dtype=result.dtype)
    return dense, None, lambda _: result.copy_(dense)


def _stays_on_device(data: torch.Tensor, peer: int | None, group: Group) -> bool:
    """True if another rank of the node can copy the tensor between devices."""
    if not data.is_cuda:
        return False
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("a CUDA graph cannot capture a message, which the host matches")
    return group._core.reaches(data.device.index, _number(peer), data.nbytes)


def _number(peer: int | None) -> int:
    if peer is None:
        return _C.any_source
    if not isinstance(peer, numbers.Integral) or peer < 0:
        raise ValueError(f"src and dst must be ranks, got {peer!r}")
    return int(peer)


def _arguments(
    dense: torch.Tensor, peer: int | None, tag: int, timeout: float | timedelta | None
) -> tuple[int, int, int, int, int, float]:
    """The arguments of the functions of ``_C.Group``."""
    if not isinstance(tag, numbers.Integral) or tag not in _TAGS:
        raise ValueError(f"tag must be a number of 32 bits, got {tag!r}")
    element = _ELEMENTS.get(dense.dtype, _ELEMENTS[torch.uint8])  # other dtypes go as bytes
    return dense.data_ptr(), dense.nbytes, element, _number(peer), int(tag), seconds(timeout, 0.0)
