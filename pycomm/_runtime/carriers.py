"""The exchange between nodes over a process group of torch.distributed.

The ranks that carry a stripe, one of each node, have a backend of their own: the one that torch has
for the tensors' device. Tensors travel as bytes.
"""

from __future__ import annotations

import atexit
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
from pycomm._runtime.gloo import disconnect, interfaces
from pycomm._runtime.torch_private import backends_of, can_make_backend, new_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

_PATIENCE_AT_END = 0.2  # seconds
_LOOK_EVERY = 0.02  # seconds, at work on a device


def backends_to_make(transport: str, group: Any) -> dict[str, str]:
    """The backends that shall connect nodes, for each type of device.

    Args:
        transport: ``"gloo"`` takes none.
        group: ``"process_group"`` takes the backends of this process group; ``"auto"`` takes its
            NCCL.

    Raises:
        ValueError: the process group has one that cannot be made anew.
    """
    if transport == "gloo":
        return {}
    found = backends_of(group)
    if transport == "auto":
        takes = found.get("cuda") == "nccl" and torch.cuda.is_available()
        return {"cuda": "nccl"} if takes else {}
    if found.get("cuda") == "gloo":  # it accepts CUDA tensors in some operations only
        del found["cuda"]
    for device, name in found.items():
        if not can_make_backend(name):
            raise ValueError(
                "group must have backends that are gloo, nccl or registered with torch.distributed "
                f'for transport="process_group", got {name} for {device}'
            )
    return found


def subgroup_of(group: Any, ranks: Sequence[int], timeout: float) -> Any:
    """A new process group of some ranks of another one, in which only these take part."""
    found = [dist.get_global_rank(group, rank) for rank in ranks]
    patience = timedelta(seconds=timeout)
    return dist.new_group(found, patience, "gloo", use_local_synchronization=True)


class Overrun(RuntimeError):
    """The process group did not complete an operation before the deadline."""


class Carriers:
    """The ranks of all nodes that carry one stripe.

    Args:
        name: the name of a backend of torch.distributed.
        store: a Store that only these ranks use.
        ranks: these ranks, in torch.distributed's default group.
        here: the index of this rank among them, which is that of its node.
        timeout: seconds that an operation may take.

    Attributes:
        received: bytes that have come from other nodes.
    """

    def __init__(
        self, name: str, store: Store, ranks: Sequence[int], here: int, timeout: float
    ) -> None:
        self.received = 0
        self._nodes, self._here = len(ranks), here
        self._timeout = timedelta(seconds=timeout)
        self._on_stream, self._over_gloo = name == "nccl", name == "gloo"
        self._aborted = False  # no Event, because a signal's handler may abort
        self._owner, self._interfaces = os.getpid(), interfaces()
        self._backend = new_backend(name, store, ranks, here, self._timeout)

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Transfer:
        """Sends part m of `given` to node m; `output` receives a part of each node, in order."""
        self.received += output.nbytes - output.nbytes // self._nodes
        return self._start(
            self._backend.alltoall_base, _bytes(output), _bytes(given), [], [], AllToAllOptions()
        )

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Transfer:
        """Collects all nodes' `given` in `output`, in their order."""
        self.received += output.nbytes - given.nbytes
        return self._start(self._backend._allgather_base, _bytes(output), _bytes(given))

    def broadcast(self, tensor: torch.Tensor, node: int) -> Transfer:
        """Copies a node's tensor to all others."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = node, 0
        self.received += tensor.nbytes if node != self._here else 0
        return self._start(self._backend.broadcast, [_bytes(tensor)], options)

    def connect(self, device: torch.device) -> None:
        """Makes NCCL connect now, so that the first operation does not take long.

        Raises:
            Overrun: another node has not come within the deadline.
        """
        if not self._on_stream:
            return
        sums = torch.zeros(self._nodes, device=device)
        self.all_gather(sums, sums[:1].clone()).wait()
        done = Point(torch.cuda.current_stream(device).record_event())
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not _happened(done):
            if self._aborted or time.monotonic() > deadline:
                self.abort()
                raise Overrun(f"NCCL has not connected within {self._timeout.total_seconds():g} s")
            time.sleep(_LOOK_EVERY)

    def abort(self) -> None:
        """Ends all transfers, also those of other nodes that wait for this one, if that can be."""
        if os.getpid() != self._owner:  # a forked child has the parent's connections
            return
        self._aborted = True
        if self._over_gloo:
            others = [node for node in range(self._nodes) if node != self._here]
            disconnect(self._backend, others, self._interfaces)
            return
        with contextlib.suppress(RuntimeError):  # the backend cannot
            self._backend.abort()

    def close(self) -> None:
        """Ends the backend. What this rank has sent still arrives."""
        if self._aborted or os.getpid() != self._owner:
            return
        with contextlib.suppress(RuntimeError):  # another node has gone
            self._backend.shutdown()  # without it, NCCL aborts what it still sends

    def _start(self, operation: Any, *arguments: Any) -> Transfer:
        return Transfer(self, operation(*arguments), arguments)

    def _wait(self, work: Any) -> None:
        if self._on_stream:  # nothing is raised
            work.wait()
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if self._aborted or time.monotonic() < deadline:
                raise
            seconds = self._timeout.total_seconds()
            raise Overrun(f"no answer within {seconds:g} s: {error}") from error


class Transfer:
    """A running operation. It keeps its tensors alive."""

    def __init__(self, carriers: Carriers, work: Any, tensors: Any) -> None:
        self._carriers, self._work, self._tensors = carriers, work, tensors

    def wait(self) -> None:
        """Waits for it; on a CUDA device the current stream does, and nothing is raised.

        Raises:
            Overrun: the deadline has passed.
            RuntimeError: it failed, or it was aborted.
        """
        self._carriers._wait(self._work)
        self._tensors = None


class Worker:
    """A thread that runs functions in the order in which they were given.

    It ends when nobody has the worker any more, because the thread has only its tasks.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._abort = abort
        self._last: Task | None = None
        self._thread = threading.Thread(
            target=_run_tasks, args=(self._tasks,), name="pycomm-carriers", daemon=True
        )
        self._thread.start()
        _workers.add(self)

    def submit(self, function: Callable[[], int]) -> Task:
        """Hands over a function."""
        self._last = task = Task()
        self._tasks.put((function, task))
        return task

    def busy(self) -> bool:
        """True if a function has not ended."""
        return self._last is not None and not self._last.ended.is_set()

    def end(self, patience: float | None = None) -> None:
        """Ends the thread after the last function, and waits for that."""
        self._tasks.put(None)
        self._thread.join(patience)

    def end_now(self) -> None:
        """Ends the thread with the interpreter."""
        self.end(0)
        if self._thread.is_alive():
            self._abort()
            self._thread.join(_PATIENCE_AT_END)

    def __del__(self) -> None:
        self._tasks.put(None)


def _run_tasks(tasks: Tasks) -> None:
    while (given := tasks.get()) is not None:
        function, task = given
        task.start = time.perf_counter()
        try:
            task.result = function()
        except BaseException as error:
            task.error = error
        task.stop = time.perf_counter()
        task.ended.set()
        del given, function, task  # they may be the last to have the group


class Watch:
    """A thread that watches the deadlines of work on a device.

    It ends when nobody has the watch any more, as a worker's thread does.

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
        self._thread.start()

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


class Task:
    """A function that a worker runs.

    Attributes:
        ended: set when it has ended.
        error: what it has raised.
        start: when it began, in seconds of ``time.perf_counter``.
        stop: when it ended.
        result: what it has returned.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.start = self.stop = 0.0
        self.result = 0

    def wait(self) -> None:
        """Waits until it has ended, and raises its error."""
        self.ended.wait()
        if self.error is not None:
            raise self.error


Pairs: TypeAlias = "queue.SimpleQueue[tuple[Event, Event] | None]"
Tasks: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], int], Task] | None]"
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Ends all threads; one that waits in torch at the interpreter's end aborts the process."""
    for worker in list(_workers):
        worker.end_now()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
