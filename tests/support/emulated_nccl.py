"""NCCL between emulated devices: on a stream of its own, over Gloo."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pycomm._runtime.internode import Addresses, disconnect, interfaces

TIMEOUT = 60.0  # seconds for connecting, which an abort ends


class Work:
    """An operation that is enqueued: later work of the current stream waits for it."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class ProcessGroupNCCL:
    """Stands for torch's, and like it connects at the first operation.

    Its stream waits for the current one before each operation.
    """

    Options = SimpleNamespace

    def __init__(self, store: Store, rank: int, size: int, _options: Any) -> None:
        self._store = Addresses(store, TIMEOUT)
        self._rank, self._size = rank, size
        self._gloo: Any = None
        self._stream = torch.cuda.Stream()

    def _connect(self) -> None:
        if self._gloo is None:
            patience = timedelta(seconds=TIMEOUT)
            self._gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, patience)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, theirs: list, mine: list, options: Any
    ) -> Work:
        return self._enqueue(
            lambda to, of: self._gloo.alltoall_base(to, of, theirs, mine, options), output, given
        )

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> Work:
        return self._enqueue(lambda to, of: self._gloo._allgather_base(to, of), output, given)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._enqueue(lambda to: self._gloo.broadcast([to], options), *tensors)

    def abort(self) -> None:
        """Ends operations on both sides, and also the wait for other ranks.

        NCCL's abort() does not end that wait; the Store's timeout does.
        """
        self._store.end()
        if self._gloo is not None:
            others = [rank for rank in range(self._size) if rank != self._rank]
            disconnect(self._gloo, others, interfaces())

    def shutdown(self) -> None:
        self._stream.synchronize()

    def _enqueue(self, operation: Callable[..., Any], *tensors: torch.Tensor) -> Work:
        """Runs an operation, which writes the first tensor and reads the others."""
        self._connect()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for index, tensor in enumerate(tensors):
                torch.ops.emulator.kernel_uses(tensor, index == 0)
            with contextlib.suppress(
                RuntimeError
            ):  # a connection is lost, which NCCL does not tell
                operation(*map(_on_host, tensors)).wait()
            return Work(self._stream.record_event())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of which the host may do anything without waiting for a stream."""
    if tensor.nbytes == 0:
        return torch.empty(0, dtype=tensor.dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)
