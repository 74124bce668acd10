"""Ranks that are threads of one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs import seconds
from pycomm._runtime import algorithm_table, log
from pycomm._runtime.cuda import LocalDevices
from pycomm._runtime.lifetime import Nodes
from pycomm._runtime.rendezvous import slice_bytes
from pycomm._runtime.sockets import first_of_node
from pycomm._runtime.stop_signals import rank_thread
from pycomm._runtime.threads import start_thread
from pycomm._runtime.turns import (
    RandomState,
    Turns,
    others_run,
    sharing_generators,
    taking_turns,
)
from pycomm.group import DEFAULT_MAX_BLOCKS, DEFAULT_STAGING_BYTES, DEFAULT_TIMEOUT, Group

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

_LOOK_EVERY = 0.02  # seconds


@contextlib.contextmanager
def _a_stream_each(count: int) -> Iterator[list[torch.cuda.Stream]]:
    """Streams whose work comes after that of the caller's stream so far, and before its next."""
    callers = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(callers)
    try:
        yield streams
    finally:
        for stream in streams:
            callers.wait_stream(stream)


class LocalWorld:
    """A group whose ranks are threads of this process.

    .. code-block:: python

        with pycomm.LocalWorld(4) as world:
            sums = world.run(lambda group: pycomm.all_reduce(torch.ones(8), group=group))

    Threads share what torch keeps once per process, such as random generators and flags
    (docs/tutorials/local-world.md).

    Args:
        size: the number of ranks.
        timeout: how long ranks wait for another rank, in seconds or as a timedelta.
        staging_bytes: shared memory per rank, in bytes, for tensors that are not in the window.
        max_blocks: the largest number of thread blocks that a rank's operation uses on a GPU.
        nodes: the number of ranks on each of several emulated nodes; by default there is one node.
            The bits are those of real nodes.
        algorithms: as for :func:`pycomm.init`.
        serial: one rank runs at a time, until it calls an operation of pycomm, and each rank has
            the random state of torch, NumPy and Python for itself, which it begins with the
            caller's. Programs that draw random numbers then do what they do in processes. A rank
            that waits for another one outside of pycomm needs :meth:`others_run`.
        separate_launches: on a GPU that all ranks share, each rank launches its own kernels, at any
            time, on a stream that :meth:`run` gives it; so the ranks do what processes with a GPU
            each do. By default they share one launch. The bits are the same
            (docs/how-to/cuda.md#separate-launches).

    Attributes:
        groups: one :class:`Group` per rank, for use in threads of your own. If a rank's group
            shrinks, the smaller one takes its place.
    """

    def __init__(
        self,
        size: int,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        nodes: Sequence[int] | None = None,
        algorithms: str | os.PathLike[str] | None = None,
        serial: bool = False,
        separate_launches: bool = False,
        _first_epoch: int = 0,
        _stage_always: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        timeout = seconds(timeout, DEFAULT_TIMEOUT)
        nodes = (size,) if nodes is None else tuple(nodes)
        if any(count < 1 for count in nodes) or sum(nodes) != size:
            raise ValueError(
                f"nodes must be positive and add up to size, {size}, got {list(nodes)}"
            )
        if separate_launches and (serial or len(nodes) > 1):
            raise ValueError(
                "separate_launches must be False with serial and with several nodes, got "
                f"serial={serial} and nodes={list(nodes)}"
            )
        ends = list(itertools.accumulate(nodes))
        ranks = tuple(tuple(range(end - n, end)) for n, end in zip(nodes, ends, strict=True))
        links = [_C.LocalTransport.make(len(nodes)) for _ in range(Nodes(ranks, 0).stripes)]
        ports = [_C.Port(first_of_node()) for _ in range(size if len(nodes) > 1 else 0)]
        for port in ports:
            port.meet([each.address for each in ports])
        rows = [] if algorithms is None else algorithm_table.read(algorithms)
        pids, cores = [os.getpid()] * size, len(os.sched_getaffinity(0))
        self._serial, self._timeout = serial, timeout
        self._separate_launches = separate_launches
        self._random: list[RandomState] = []  # of each rank, once they have run
        self.groups = []
        for here, local in enumerate(ranks):
            fd = _C.create_window(len(local), slice_bytes(), staging_bytes)
            window = _C.Window(fd, len(local), slice_bytes(), staging_bytes)
            for stripe, rank in enumerate(local):
                link = links[stripe][here] if stripe < len(links) else None
                self.groups.append(
                    Group(
                        window,
                        Nodes(ranks, here),
                        pids,
                        [None] * len(local),
                        rank,
                        cores,
                        timeout,
                        staging_bytes,
                        link,
                        ports[rank] if ports else None,
                        rows,
                        _first_epoch,
                    )
                )
        for group in self.groups:
            log.group_made(group, cores, "threads")
        if len(nodes) > 1:
            return
        devices = LocalDevices(self.groups, max_blocks, _stage_always, separate_launches)
        for group in self.groups:
            self._serve(group, devices)

    def _serve(self, group: Group, devices: LocalDevices) -> None:
        """Lets a group take CUDA tensors, and shrink."""
        group._join_cuda = functools.partial(devices.side, group.rank)
        group._succession = functools.partial(self._go_on, devices)

    def _go_on(self, devices: LocalDevices, larger: Group, smaller: Group) -> None:
        self.groups[self.groups.index(larger)] = smaller
        self._serve(smaller, devices.shrunk_to(smaller))

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Calls ``function(group, *args)`` on a thread per rank; returns the results in rank order.

        If a rank raises, the others raise :class:`pycomm.PeerDied` in operations that need it, and
        this method raises the first rank's own exception. If a rank returns before it has called an
        operation that others wait for, they raise :class:`pycomm.PeerDied`, too.

        With `serial`, the caller's random state stays as it is; ranks go on in the next call with
        the states that they had at the end of this one.

        Raises:
            pycomm.Timeout: with `serial`, a rank has had its turn for longer than the timeout while
                others waited for theirs.
            RuntimeError: with `serial`, another such world runs in this process.
        """
        if self._separate_launches:
            with _a_stream_each(len(self.groups)) as streams:

                def on_its_stream(group: Group, *args: Any) -> Any:
                    with torch.cuda.stream(streams[group.rank]):
                        return function(group, *args)

                return self._run(on_its_stream, args, None)
        if not self._serial:
            return self._run(function, args, None)
        with taking_turns(self._random, len(self.groups)) as turns:
            return self._run(function, args, turns)

    def _run(self, function: Any, args: tuple[Any, ...], turns: Turns | None) -> list[Any]:
        size = len(self.groups)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []
        lock = threading.Lock()
        ended: queue.SimpleQueue[int | Callable[[], None] | None] = queue.SimpleQueue()

        def body(rank: int) -> None:
            rank_thread.let_call = ended.put
            with sharing_generators(size) if turns is None else turns.of(rank):
                try:
                    # Until torch has looked up its number of threads in a new thread, OpenMP takes
                    # its own, and convolutions round otherwise.
                    torch.get_num_threads()
                    results[rank] = function(self.groups[rank], *args)
                except BaseException as error:
                    with lock:
                        errors.append(error)
                    self.groups[rank]._core.leave()
                    ended.put(None)
                else:
                    ended.put(rank)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
        try:
            for thread in threads:
                start_thread(thread)
            self._watch(ended, turns)
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C interrupts only this thread; or a rank has none
            for group in self.groups:
                group.abort()
            raise
        if errors:
            raise errors[0]
        return results

    def _watch(
        self, ended: queue.SimpleQueue[int | Callable[[], None] | None], turns: Turns | None
    ) -> None:
        """Until all functions have ended, ends waits for ranks whose function has returned.

        What ranks cannot call in their own thread, this thread calls for them.
        """
        seen: list[int | None] = []  # None: the rank has raised
        while len(seen) < len(self.groups):
            with contextlib.suppress(queue.Empty):
                told = ended.get(timeout=_LOOK_EVERY if seen or turns else None)
                if callable(told):
                    told()
                else:
                    seen.append(told)
            if turns is not None:
                turns.check(self._timeout)
            groups = list(self.groups)
            for rank in seen:
                if rank is None:
                    continue
                if not groups[rank]._core.usable():
                    groups[rank]._core.leave()  # survivors do not wait for it
                together = [each._core for each in groups if each._shrunk == groups[rank]._shrunk]
                groups[rank]._core.end_waits_of(together)

    @staticmethod
    def others_run() -> AbstractContextManager[None]:
        """A context in which other ranks run, if this thread is a rank and `serial` is set.

        With `serial`, a rank must not wait for another one outside of pycomm, as the other one
        waits for its turn:

        .. code-block:: python

            with pycomm.LocalWorld.others_run():
                event.wait()
        """
        return others_run()

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def close(self) -> None:
        """Closes every rank's group."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.close)

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.__exit__, kind, error, trace)
