"""The exchange between nodes over NCCL.

The ranks that carry a stripe, one of each node, have an NCCL communicator of their own. Tensors
travel as bytes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions

from pycomm import _C
from pycomm._runtime.threads import start_thread
from pycomm._runtime.torch_private import backends_of, new_nccl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

_LOOK_EVERY = 0.02  # seconds, at work on a device


def has_nccl(group: Any) -> bool:
    """True if the process group has NCCL for CUDA tensors, and this rank has a device."""
    return backends_of(group).get("cuda") == "nccl" and torch.cuda.is_available()


def subgroup_of(group: Any, ranks: Sequence[int], timeout: float) -> Any:
    """A new process group of some ranks of another one, in which only these take part."""
    found = [dist.get_global_rank(group, rank) for rank in ranks]
    patience = timedelta(seconds=timeout)
    return dist.new_group(found, patience, "gloo", use_local_synchronization=True)


class Carriers:
    """The ranks of all nodes that carry one stripe.

    Args:
        store: a Store that only these ranks use.
        here: the index of this rank among them, which is that of its node.
        nodes: the number of nodes.
        timeout: seconds that connecting may take.
    """

    def __init__(self, store: Store, here: int, nodes: int, timeout: float) -> None:
        self._nodes, self._timeout = nodes, timeout
        self._aborted = False  # no Event, because a signal's handler may abort
        self._owner = os.getpid()
        self._backend = new_nccl(store, here, nodes)

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Transfer:
        """Sends part m of `given` to node m; `output` receives a part of each node, in order."""
        return self._start(
            self._backend.alltoall_base, _bytes(output), _bytes(given), [], [], AllToAllOptions()
        )

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Transfer:
        """Collects all nodes' `given` in `output`, in their order."""
        return self._start(self._backend._allgather_base, _bytes(output), _bytes(given))

    def broadcast(self, tensor: torch.Tensor, node: int) -> Transfer:
        """Copies a node's tensor to all others."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = node, 0
        return self._start(self._backend.broadcast, [_bytes(tensor)], options)

    def connect(self) -> None:
        """Makes NCCL connect on the current device, so that no operation has to.

        Raises:
            TimeoutError: another node has not come within the timeout.
        """
        sums = torch.zeros(self._nodes, dtype=torch.float32, device="cuda")
        self.all_gather(sums, sums[:1].clone()).wait()
        done = Point(torch.cuda.current_stream().record_event())
        deadline = time.monotonic() + self._timeout
        while not _happened(done):
            if self._aborted or time.monotonic() > deadline:
                self.abort()
                raise TimeoutError(f"NCCL has not connected within {self._timeout:g} s")
            time.sleep(_LOOK_EVERY)

    def abort(self) -> None:
        """Ends all transfers, also those of other nodes that wait for this one."""
        if os.getpid() != self._owner:  # a forked child has the parent's connections
            return
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._backend.abort()

    def close(self) -> None:
        """Ends the communicator. What this rank has sent still arrives."""
        if os.getpid() != self._owner:
            _inherited.append(self._backend)
            return
        if self._aborted:
            return
        with contextlib.suppress(RuntimeError):  # another node has gone
            self._backend.shutdown()  # without it, NCCL aborts what it still sends

    def _start(self, operation: Any, *arguments: Any) -> Transfer:
        return Transfer(operation(*arguments), arguments)


_inherited: list[Any] = []  # a forked child lacks the threads that a backend's end waits for


class Transfer:
    """A running operation. It keeps its tensors alive."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Makes the current stream wait for it; nothing is raised."""
        self._work.wait()
        self._tensors = None


class Watch:
    """A thread that watches the deadlines of work on a device.

    It ends when nobody has the watch any more.

    Args:
        timeout: seconds that a piece of work may take once it has begun.
        overrun: a method, called once, when one takes longer; nothing is watched afterwards.
    """

    def __init__(self, timeout: float, overrun: Callable[[], None]) -> None:
        self._pairs: Pairs = queue.SimpleQueue()
        self._ending = threading.Event()
        arguments = (self._pairs, self._ending, timeout, weakref.WeakMethod(overrun))
        self._thread = threading.Thread(
            target=_watch_pairs, args=arguments, name="pycomm-watch", daemon=True
        )
        start_thread(self._thread)

    def add(self, begin: Event, end: Event) -> None:
        """Watches the work between two events."""
        self._pairs.put((begin, end))

    def end(self) -> None:
        """Ends the thread."""
        self._tell()
        self._thread.join()

    def _tell(self) -> None:
        self._ending.set()
        self._pairs.put(None)

    def __del__(self) -> None:
        self._tell()


def _watch_pairs(
    pairs: Pairs,
    ending: threading.Event,
    timeout: float,
    overrun: weakref.WeakMethod[Callable[[], None]],
) -> None:
    while (pair := pairs.get()) is not None:
        begin, end = pair
        if not _await(begin, ending, None):
            return
        if not _await(end, ending, time.monotonic() + timeout):
            call = overrun()
            if call is not None and not ending.is_set():
                call()
            return


def _await(event: Event, ending: threading.Event, deadline: float | None) -> bool:
    """Waits for an event; False if the deadline has passed, or the thread is to end."""
    while not _happened(event):
        late = deadline is not None and time.monotonic() > deadline
        if late or ending.wait(_LOOK_EVERY):
            return False
    return True


class Event(Protocol):
    """What tells whether work on a device has come to a point, such as torch.cuda.Event."""

    def query(self) -> bool:
        """True if it has."""


class Point:
    """An event of a CUDA stream, which any thread may query while another one captures."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        """True if the stream has come to the event."""
        return _C.cuda_completed(self._event.cuda_event)


def _happened(event: Event) -> bool:
    """True if it has; a device that has failed never comes to it."""
    try:
        return event.query()
    except RuntimeError:
        return False


Pairs: TypeAlias = "queue.SimpleQueue[tuple[Event, Event] | None]"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
