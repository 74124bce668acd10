"""Groups of ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs import check_dtype, seconds
from pycomm._runtime import host, log
from pycomm._runtime.lifetime import Nodes, OpenGroups, open_groups
from pycomm.errors import GroupUnusable, Timeout
from pycomm.report import Report, make_report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Any

    from pycomm._nccl.process_groups import InternodeProcessGroups
    from pycomm._runtime.cuda import CudaSide
    from pycomm._runtime.grow import Growth
    from pycomm._runtime.plan import Plan
    from pycomm._runtime.rendezvous import RendezvousResult
    from pycomm._runtime.shrink import Survivors
    from pycomm._runtime.sockets import Alarm, Listener
    from pycomm.stats import Stats

DEFAULT_TIMEOUT = 300.0
DEFAULT_STAGING_BYTES = 2 << 20
DEFAULT_MAX_BLOCKS = 32
_PATIENCE_WITH_NEWCOMERS = 30.0
when_replaced: list[Callable[[Any, Any], None]] = []  # called with the old and the new group

_names = itertools.count()
_open_groups: OpenGroups[Group] = open_groups


class Group:
    """One rank's membership in a group of ranks, on one node or several.

    :func:`init` and :class:`pycomm.LocalWorld` make groups. Operations on a group run in the order
    in which they were called, on any threads. All ranks must call the same operations in the same
    order.

    A group is a context manager: it is closed at the end of the block. If an exception ends the
    block while operations are running, the group is aborted first.

    If operations of other threads are still running when the interpreter exits, they have half a
    second to complete; then the group is aborted.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        timeout: how long ranks wait for another rank, in seconds.
        staging_bytes: shared memory of this rank, in bytes, for tensors that are not in the window.
        name: the group's name in ``torch.ops.pycomm``.
        nodes: the ranks of each node, ascending; nodes are ordered by their first rank.
        stripes: the number of ranks of every node that exchange with other nodes. These are its
            first ranks, and the i-th ranks of all nodes exchange with each other. 0 on one node.
        ranks: for each rank, its number in the group from which this one has shrunk, in one or more
            steps; for a new group or one that has grown, 0, 1, ...
        world_ranks: for each rank, its number in torch.distributed's default process group; empty
            if the ranks are threads, or the group has grown.
        title: the name and, unless the group has all ranks, its process group's description and
            its world ranks. Errors, logs and ``repr`` tell it.
    """

    def __init__(
        self,
        window: _C.Window,
        nodes: Nodes,
        pids: list[int],
        processes: Sequence[_C.Process | None],
        rank: int,
        cores: int,
        timeout: float,
        staging_bytes: int,
        link: _C.Transport | None = None,
        port: _C.Port | None = None,
        algorithms: Sequence[dict[str, Any]] = (),
        first_epoch: int = 0,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, nodes.ranks))
        self.timeout = timeout
        self.staging_bytes = staging_bytes
        self.name = f"pycomm:{next(_names)}"
        self.nodes = nodes.ranks
        self.stripes = nodes.stripes
        self.ranks = tuple(range(self.size))
        self.world_ranks: tuple[int, ...]
        self._window = window
        self._pids, self._processes, self._cores = pids, processes, cores
        local = nodes.local
        index, size = local.index(rank), len(local)
        self._core = _C.Group(
            window, pids, processes, index, size, cores, timeout, first_epoch, local
        )
        self._link, self._port = link, port
        self._algorithms = algorithms  # the rows of the table for all-reduces between nodes
        if len(nodes.ranks) > 1:
            self._core.span(nodes.ranks, nodes.here, link, port, timeout, algorithms)
        self._handle = self._core.handle
        # The handle for the fast path of collectives; None while a trace runs.
        self._short_way: object = self._handle
        self._tags = itertools.cycle(range(1, 1 << 16))
        self._told: set[str] = set()  # messages that are logged once
        self._span: InternodeProcessGroups | None = None  # NCCL between nodes
        self._cuda: CudaSide | None = None
        self._join_cuda: Callable[[torch.device], CudaSide] = _no_cuda
        # Catches up with the exchange of gradients that the last forward has promised.
        self._catch_up: Callable[[], None] | None = None
        self._preserved = itertools.count()  # numbers of operations with preserve=True
        self._shrunk = 0  # how many times the first group has shrunk to become this one
        self._origin = self.name  # the first group's name
        self._succession: Callable[[Group, Group], None] | None = None  # called by shrink()
        self._survivors: Survivors[Group] | None = None  # if the group has spanned nodes
        self._meets_survivors = False  # in shrink()
        self._make_growth: Callable[[], Growth[Group]] | None = None  # if the ranks are processes
        self._growth: Growth[Group] | None = None  # once it is needed
        self._needing_growth = threading.Lock()
        self._unresponsive = -1  # the rank that has ended the group because it did not answer
        self._ended_by = 0  # the abort word
        self._decides = len(self.nodes) == 1  # False for threads with simulated nodes
        _C.register_group(self.name, self._core)
        _open_groups.add(self)
        self._entitle("", ())

    def _entitle(self, told: str, world_ranks: Sequence[int]) -> None:
        """Sets the world ranks and, in the title, what distinguishes the group from others."""
        self.world_ranks = tuple(world_ranks)
        self.title = f"{self.name} ({told})" if told else self.name
        self._core.set_name(self.title)

    def empty(
        self,
        *size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Makes an uninitialised tensor in the window; collectives on it need no staging copy.

        Staging is avoided if the tensors of all ranks lie in the window. The memory is freed with
        the tensor. On CUDA, it comes from the heap that ``init(cuda_heap_bytes=...)`` has reserved;
        a capture keeps it until the group is closed, a call that needs memory of tensors that are
        gone waits for the device, and all ranks must make the first call together.

        Args:
            size: the shape, as for :func:`torch.empty`.
            dtype: one of the supported dtypes.
            device: ``"cpu"`` or a CUDA device.

        Returns:
            The tensor. In a group that spans nodes, a CUDA tensor is an ordinary one.

        Raises:
            ValueError: an argument is not as described.
            MemoryError: the node, or the CUDA window's heap, has too little memory.
        """
        check_dtype("dtype", dtype)
        self._core.check_usable()
        shape = torch.Size(size)
        if any(n < 0 for n in shape):
            raise ValueError(f"size must not be negative, got {tuple(shape)}")
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
        if self._stages(torch.device(device)):
            return torch.empty(shape, dtype=dtype, device=device)
        if torch.device(device).type == "cuda":
            return self._cuda_side(torch.device(device)).empty(shape, dtype)
        count = shape.numel()
        if count == 0:
            return host.empty(*shape, dtype=dtype)
        allocation = self._core.allocate(count * dtype.itemsize)
        return torch.frombuffer(allocation, dtype=torch.uint8).view(dtype)[:count].view(shape)

    def peers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor where it lies in shared memory; a collective call.

        Reading and writing one needs no operation, and nothing orders it with what other ranks do:
        call :func:`pycomm.barrier` between, on CUDA after ``torch.cuda.synchronize()``. Call this
        once per tensor. Its memory is not used again, so that the others' views stay valid if this
        rank frees the tensor, closes the group or ends. After a failure of the group, views may
        have become other memory than their rank's tensor.

        Args:
            tensor: one from :meth:`empty` or in a :meth:`mem_pool`, or a view of one; of the same
                shape, dtype and strides on all ranks.

        Returns:
            A tensor for each rank, its own included, on this rank's device.

        Raises:
            ValueError: on all ranks: a rank's tensor is not in shared memory, it has no elements,
                or the group spans nodes.
            pycomm.Mismatch: shape, dtype, strides or kind of device differ; on all ranks.
        """
        from pycomm._runtime.peers import peers

        return peers(self, self._window, self._cuda, tensor)

    def mem_pool(self, library: str = "torch") -> Any:
        """Returns a library's pool of memory in this rank's CUDA heap.

        In ``with torch.cuda.use_mem_pool(group.mem_pool())``, all tensors that torch makes on the
        device need no staging copy. No rank waits for others when it allocates; but if they have
        not used CUDA in this group, all must make this call together. See docs/how-to/cuda.md for
        sizes.

        Args:
            library: ``"torch"``, or ``"cupy"`` once the program has imported it.

        Returns:
            A ``torch.cuda.MemPool`` or ``cupy.cuda.MemoryPool``, the same in all calls. It has
            ordinary memory if the ranks are threads or the group spans nodes.

        Raises:
            ValueError: `library` is neither, or CuPy has not been imported.
            MemoryError: CUDA tensors go through pinned host memory.
        """
        from pycomm._runtime.mem_pool import mem_pool

        self._core.check_usable()
        spans = self._stages(torch.device("cuda"))
        return mem_pool(library, None if spans else self._cuda_side)

    def trim(self) -> None:
        """Frees working memory that operations keep for later operations.

        Top-k and operations between nodes keep working memory on the CPU, as much as the largest
        tensor so far has needed. This method waits for running operations. Other ranks need not
        call it.

        Raises:
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        self._core.trim()

    def check(self) -> None:
        """Raises the error of CUDA kernels that have run so far, if there is one.

        Operations on CUDA tensors return before they run, so this method or the group's next
        operation raises their errors. Synchronise with the stream first to cover all operations.
        Without an error this returns at once; with one it waits until no other rank uses this
        rank's tensors.
        """
        if self._cuda is not None:
            self._cuda.check()
        if self._span is not None:
            self._span.check()

    def explain(
        self,
        nbytes: int,
        dtype: torch.dtype = torch.float32,
        *,
        algorithm: str = "auto",
        in_window: bool = False,
        device: str = "cpu",
    ) -> Plan:
        """Explains how this group would run an all-reduce of `nbytes` bytes.

        The choice is the same on every rank; steps and bytes are this rank's own.

        Args:
            nbytes: the tensor's size in bytes.
            dtype: the tensor's dtype.
            algorithm: as for :func:`pycomm.all_reduce`.
            in_window: True if all ranks' tensors come from :meth:`empty`.
            device: ``"cpu"`` or ``"cuda"``.

        Returns:
            The algorithm, its steps and bytes, and with whom this rank exchanges over which link;
            ``print`` shows a list.

        Raises:
            ValueError: an argument is not as described, or no all-reduce has the algorithm there.
        """
        from pycomm._runtime.plan import explain

        return explain(self, nbytes, dtype, algorithm, in_window, device)

    def report(self, operations: int = 8) -> Report:
        """Reports what the ranks of this node do, and their last operations.

        Any thread may call this at any time, also while operations run or after the group has
        failed. Other ranks need not call it, and are not slowed down.

        Args:
            operations: how many of each rank's operations to report, 1 to 128.

        Returns:
            The report; ``print`` shows it as text.

        Raises:
            ValueError: `operations` is out of range.
            pycomm.GroupUnusable: the group is closed.
        """
        if not 1 <= operations <= _C.most_recorded:
            raise ValueError(f"operations must be 1 to {_C.most_recorded}, got {operations}")
        return make_report(self._core.state(operations))

    def stats(self, since: Stats | None = None) -> Stats:
        """Returns statistics of this rank's operations, by kind, device and size.

        Every operation that has succeeded counts. Of operations on CPU tensors of less than 64 KiB
        that wait for less than about a microsecond, only one in 16 is timed and stands for all.

        Operations on CUDA tensors count within about 5 ms of their end, with times of the device's
        clock; so does every replay of a graph. If the device ends more than 4096 operations while
        this process does not run, the oldest are missing. In a group that spans nodes, CUDA tensors
        that go through host memory count as CPU tensors.

        Any thread may call this at any time, also while operations run. Other ranks need not call
        it, and nothing is synchronised. In a group that spans nodes, the wait for a late rank of
        another node belongs to the exchange.

        Args:
            since: an earlier result, to count only later operations.

        Returns:
            The statistics; ``print`` shows a table.

        Raises:
            ValueError: `since` is of another rank or group.
            pycomm.GroupUnusable: the group is closed.
        """
        from pycomm.stats import make_stats

        stats = make_stats(self._core.statistics(), self.rank, self.size)
        return stats if since is None else stats.since(since)

    def skew(self, since: Stats | None = None) -> dict[int, float]:
        """Scores the ranks of this node by their own time, that is, outside of operations.

        In synchronous training all ranks take the same time for a step, because fast ranks wait for
        the slowest. A rank's own time is the whole time without the time in which its program is
        blocked in operations of this group, or waits for works. It includes computing, reading
        data, and waits that this group does not see, such as waits for messages or a CUDA device.

        Args:
            since: an earlier result of :meth:`stats`, to score only the time after it.

        Returns:
            By rank, the fastest rank's own time divided by this rank's: 1 is the fastest, and 0.83
            needs 20 % longer. Empty before two operations on CPU tensors have been timed.

        Raises:
            ValueError: `since` is of another rank or group.
            pycomm.GroupUnusable: the group is closed.
        """
        return self.stats(since).skew

    def traffic(self) -> tuple[int, int, int]:
        """Signals, bytes read from and bytes written to other ranks in the last operation."""
        return self._core.traffic

    def link_traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other nodes in this rank's last operation."""
        return self._core.link_traffic

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether all ranks take a step, such as the optimizer's; a collective call.

        Other operations may succeed on some ranks only: a rank may die when others have continued.
        This decision cannot. All surviving ranks get the same answer, so all of them take a step,
        or none does. On CUDA it waits for the device first.

        Args:
            ready: False if this rank cannot take the step.

        Returns:
            True if all ranks are ready. A rank may have died since; the next operation raises then.

        Raises:
            ValueError: the group is a ``LocalWorld`` with simulated nodes.
            pycomm.CollectiveError: the group has failed before all ranks were ready; on all ranks.
        """
        if not isinstance(ready, bool):
            raise TypeError(f"ready must be True or False, got {ready!r}")
        if len(self.nodes) > 1:
            if self._spans(torch.device("cuda")):
                torch.cuda.synchronize()
                self.check()
            return self._among_survivors().decide(self._core, ready, self.timeout)
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda.device)
            self._cuda.check()
        return self._core.should_commit(ready)

    def stop_requested(self, signals: Sequence[int] = (signal.SIGTERM,)) -> bool:
        """Tells whether a rank has been asked to stop, by a signal; a collective call.

        Clouds, SLURM and torchrun send SIGTERM some time before they kill. Call this once per step:
        all ranks get the same answer in the same call, so they can save the same step and leave.

        The first call catches the signals, which then no longer end this process. A handler that
        the program had installed before still runs. Before the first call, and if the program
        installs a handler later, signals do what they did.

        Args:
            signals: the signals, such as ``(signal.SIGTERM, signal.SIGUSR1)``.

        Returns:
            True if the process of any rank has got one of the signals since it catches them; then
            also in all later calls, and in groups that this one becomes.

        Raises:
            RuntimeError: the first call in this process is not in its main thread. Ranks of a
                LocalWorld that runs in the main thread may make it.
            pycomm.CollectiveError: as for :func:`pycomm.all_reduce`.
        """
        from pycomm._runtime.stop_signals import stop_requested

        return stop_requested(self, signals)

    def shrink(
        self, timeout: float | timedelta | None = None, *, exclude: Sequence[int] = ()
    ) -> Group:
        """Makes a smaller group of the remaining ranks after a failure.

        All survivors call this; the call makes operations of the others fail if none has failed
        yet. They agree over shared memory, without torch.distributed and its Store, which may have
        died with a rank. If the group was the default group, the smaller one takes its place. This
        group is closed; close the smaller one yourself, also in a ``with`` block of this one.

        A rank survives if it calls this method. The method waits neither for ranks that have ended
        or closed the group, nor for the rank that has caused a :class:`pycomm.Timeout`. If a rank
        dies in the meantime, the first operation of the smaller group may raise, and that group can
        be shrunk in turn.

        Args:
            timeout: how long to wait for live ranks that have not called this, in seconds or as a
                timedelta. After that, this leaves them out on one node, and raises between nodes.
                By default the group's timeout.
            exclude: ranks to leave out without waiting for them, also if they live; the same on all
                survivors.

        Returns:
            The smaller group, whose ranks have the same order as in this group;
            :attr:`ranks` has their former numbers.

        Raises:
            ValueError: the group is a ``LocalWorld`` with simulated nodes, or `exclude` has numbers
                that are not other ranks.
            pycomm.GroupUnusable: the others have shrunk the group without this rank, or may do so;
                it was shrunk or closed before; or another thread has called :meth:`abort`
                meanwhile.
            pycomm.Timeout: between nodes, a live rank has not called this; on all ranks that have.
                Call this again to continue waiting, or close the group.
            MemoryError: no survivor has room in its part of shared memory.
        """
        patience = seconds(timeout, self.timeout)
        for rank in exclude:
            if not 0 <= rank < self.size or rank == self.rank:
                raise ValueError(f"exclude must be other ranks, 0 to {self.size - 1}, got {rank}")
        on_node = len(self.nodes) == 1 and self._survivors is None
        shrink = self._shrink_on_node if on_node else self._shrink_between_nodes
        smaller = shrink(patience, exclude)
        smaller._shrunk, smaller._origin = self._shrunk + 1, self._origin
        self._hand_on_to(smaller)
        log.group_shrunk(smaller, self)
        return smaller

    def _shrink_on_node(self, patience: float, exclude: Sequence[int]) -> Group:
        succession = self._succession
        try:
            window, members = self._core.shrink(patience, list(exclude))
        except BaseException as error:
            if not isinstance(error, GroupUnusable):  # another thread may still shrink it
                self.close()
            raise
        self._leave()
        smaller = self._smaller(window, members)
        if succession is not None:
            succession(self, smaller)
        return smaller

    def _smaller(self, window: _C.Window, members: list[int]) -> Group:
        """The group of some ranks of this one, which are on one node."""
        smaller = Group(
            window,
            Nodes((tuple(range(len(members))),), 0),
            [self._pids[rank] for rank in members],
            [self._processes[rank] for rank in members],
            members.index(self.rank),
            self._cores,
            self.timeout,
            self.staging_bytes,
        )
        smaller.ranks = tuple(self.ranks[rank] for rank in members)
        return smaller

    def _shrink_between_nodes(self, patience: float, exclude: Sequence[int]) -> Group:
        survivors = self._among_survivors()
        try:
            self._meets_survivors = True
            self._unresponsive = max(self._core.unresponsive, self._unresponsive)
            self._abort_operations()
            self._ended_by = self._core.ended_by or self._ended_by
            self._leave()
            smaller = survivors.shrink(self._unresponsive, exclude, patience, self._ended_by)
        except Timeout:  # others still wait for this rank, which may shrink again
            self._meets_survivors = False
            raise
        except BaseException:
            survivors.listener.close()
            raise
        self._survivors = None  # the smaller group has its listener
        return smaller

    def _among_survivors(self) -> Survivors[Group]:
        survivors = self._survivors
        if survivors is None:
            self._core.check_usable()
            raise ValueError("group must not consist of threads with simulated nodes")
        if survivors.listener.closed or self._meets_survivors:
            raise GroupUnusable("group is closed, or another thread of this rank is shrinking it")
        return survivors

    def _survive(
        self,
        listener: Listener,
        rank: int,
        mine: Mapping[str, Any],
        make: Callable[[RendezvousResult, Sequence[int]], Group],
    ) -> Group:
        """Lets a group that spans nodes, or has shrunk from one that did, shrink over listeners.

        This is also needed after it has shrunk to one node: a rank that failed to join waits at the
        listeners of the members.

        Args:
            listener: the listener of this rank.
            rank: this rank's number at the listener.
            mine: the introduction of this rank.
            make: makes a smaller group from this rank's membership and the ranks' numbers.

        Returns:
            This group.
        """
        # Imported now, because after a failure the file system may be out of reach.
        from pycomm._runtime.shrink import Survivors

        self._decides = True
        self._survivors = Survivors(
            listener,
            rank,
            self.ranks,
            mine,
            lambda members, ranks: make(members, ranks)._survive(listener, rank, mine, make),
        )
        if self._link is not None:
            listener.watch(functools.partial(_tell, self._link, self.ranks, self.nodes))
        return self

    @property
    def _listener(self) -> Listener | None:
        return None if self._survivors is None else self._survivors.listener

    @property
    def address(self) -> str | None:
        """Where other processes can ask to join: ``host:port/secret``, for :func:`pycomm.join`.

        Rank 0 listens there from its first use of this property, or from the first :meth:`grow` on.
        On the other ranks it is None until :meth:`grow` tells them. The secret admits processes of
        the same user, so keep it from others.
        """
        growth = self._growing()
        if growth is None:
            return None
        growth.open(self)
        return None if growth.address is None else str(growth.address)

    def grow(self, timeout: float | timedelta | None = None) -> Group:
        """Admits processes that wait in :func:`pycomm.join`; a collective call.

        Call it between two steps, for example. If no process waits, it costs as much as a few
        barriers. If processes wait, the members make a larger group with them: this group is
        closed, and if it was the default group, the larger one takes its place. Close the larger
        one yourself, also in a ``with`` block of this one.

        Members keep their ranks, and newcomers get the next ranks. A newcomer that fails meanwhile
        is left out. If one fails when some ranks have returned, the larger group's next operation
        raises, and it can be shrunk.

        Args:
            timeout: how long to wait for newcomers that have asked to join but no longer answer, in
                seconds or as a timedelta; by default 30 seconds, or the group's timeout if that is
                shorter. The shortest timeout of all ranks counts.

        Returns:
            The larger group, or this group if no process was admitted. If a rank has failed just
            after the members had agreed, a group of the remaining ranks; if they do not meet before
            the group's timeout, the larger group, which has failed and can be shrunk.

        Raises:
            ValueError: the ranks are threads.
            RuntimeError: another thread of this rank is in this method.
            pycomm.CollectiveError: a rank of this group failed. The others can shrink it.
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        patience = seconds(timeout, min(self.timeout, _PATIENCE_WITH_NEWCOMERS))
        self._core.check_usable()
        growth = self._growing()
        if growth is None:
            raise ValueError("only a group of processes that pycomm.init has made can grow")
        larger = growth.grow(self, patience)
        if larger is None:
            return self
        self._hand_on_to(larger)
        self.close()
        if not larger._core.usable():
            with contextlib.suppress(Timeout):  # then the caller can shrink it
                return larger.shrink()
        return larger

    def _growing(self) -> Growth[Group] | None:
        """This rank's part in growing; None if the ranks are threads."""
        with self._needing_growth:
            if self._growth is None and self._make_growth is not None:
                self._growth = self._make_growth()
            return self._growth

    def _hand_on_to(self, successor: Group) -> None:
        if self._growth is not None and (growing := successor._growing()) is not None:
            growing.inherit(self._growth)
        for go_on in when_replaced:
            go_on(self, successor)

    def abort(self) -> None:
        """Makes every rank that is in an operation, or enters one, raise :class:`pycomm.Aborted`.

        Any thread may call this. Afterwards the group is unusable. This also ends a running
        :meth:`shrink` of this rank.
        """
        self._abort_operations()
        self._stop_shrinking()

    def _abort_operations(self) -> None:
        self._core.abort()
        span = self._span
        if span is not None:
            span.abort()

    def _stop_shrinking(self) -> None:
        survivors = self._survivors  # another thread may close the group
        if survivors is not None and self._meets_survivors:
            survivors.listener.close()

    def close(self) -> None:
        """Finishes running operations, then leaves the group without waiting for other ranks."""
        try:
            self._leave()
        finally:
            self._close_doors()

    def _leave(self) -> None:
        self._join_cuda, self._succession = _no_cuda, None  # which refer to this group
        side, span, self._cuda, self._span = self._cuda, self._span, None, None
        with contextlib.ExitStack() as last_first:  # the others also if one raises
            last_first.callback(self._core.close)
            if span is not None:
                last_first.callback(span.close)
            if side is not None:
                last_first.callback(side.close)

    def _close_doors(self) -> None:
        """Tells survivors and newcomers that this rank has gone."""
        survivors = self._survivors
        if survivors is not None:
            survivors.listener.close()
        if self._growth is not None:
            self._growth.close()

    def _keep_promise(self) -> None:
        """Takes part in an exchange of gradients that this rank has promised, if others are in it.

        So a rank whose backward has raised can run other operations with the other ranks.
        """
        if self._catch_up is not None:
            self._catch_up()

    def _next_tag(self) -> int:
        """A number that distinguishes one user's operations; ranks compare it. 0 means none."""
        return next(self._tags)

    def _spans(self, device: torch.device) -> bool:
        """True if tensors on `device` travel between nodes over NCCL."""
        return self._span is not None and device.type == "cuda"

    def _exchanges_on_host(self, device: torch.device) -> bool:
        """True if gradients on `device` are exchanged through host memory."""
        return not self._spans(device) and self._stages(device)

    def _stages(self, device: torch.device) -> bool:
        """True if operations that do not go over NCCL take tensors on `device` to the host."""
        stages = device.type == "cuda" and len(self.nodes) > 1
        if stages:
            log.fallback(self, "CUDA tensors go through host memory: the group spans nodes")
        return stages

    def _takes_to_host(self, device: torch.device, what: str) -> bool:
        """True for tensors on CUDA in operations that no kernel runs; logs that, once."""
        if device.type != "cuda":
            return False
        if not self._stages(device):
            log.fallback(self, f"{what} take CUDA tensors through host memory")
        return True

    def _cuda_side(self, device: torch.device) -> CudaSide:
        """This rank's CUDA side; the first call is collective and makes it."""
        self._core.check_usable()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._cuda is None:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("a CUDA graph cannot capture a group's first operation on CUDA")
            try:
                self._cuda = self._join_cuda(device)
            except BaseException as error:
                if not isinstance(error, ValueError):  # which all ranks raise
                    self._core.abort()  # so that other ranks do not wait for this one
                raise
        if self._cuda.device != device:
            raise ValueError(
                f"device must be {self._cuda.device}, which this rank has used so far, got {device}"
            )
        return self._cuda

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self._core.idle():
            self.abort()  # other ranks may never do their part of running operations
        self.close()

    def __repr__(self) -> str:
        return f"pycomm.Group({self.title!r}, rank={self.rank}, size={self.size})"


def _tell(
    link: _C.Transport, ranks: Sequence[int], nodes: Sequence[Sequence[int]], alarm: Alarm
) -> None:
    """Treats the alarm of a rank of another node as that node's farewell."""
    for node, local in enumerate(nodes):
        if alarm.rank in (ranks[rank] for rank in local):
            link.told(node, alarm.word)


def make_group(
    members: RendezvousResult,
    rank: int,
    timeout: float,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    title: tuple[str, Sequence[int]] = ("", ()),
) -> Group:
    """Makes a group of ranks that know each other, without a CUDA side; `title` as `_entitle`."""
    mine = members.everyone[rank]["settings"] if members.everyone else {}
    made = Group(
        members.window,
        members.nodes,
        members.pids,
        members.processes,
        rank,
        members.cores,
        timeout,
        staging_bytes,
        members.link,
        members.port,
        mine.get("algorithms", ()),
    )
    made._entitle(*title)
    log.group_made(
        made, members.cores, "NCCL for cuda, Gloo for the rest" if members.nccl else "Gloo"
    )
    return made


def take_cuda(group: Group, process_group: Callable[[], Any], max_blocks: int, heap: int) -> None:
    """Lets a group of processes on one node take CUDA tensors; as `join_processes`."""

    def connect(device: torch.device) -> CudaSide:
        from pycomm._runtime.cuda import join_processes

        return join_processes(group, device, process_group, max_blocks, heap)

    group._join_cuda = connect


def _no_cuda(device: torch.device) -> CudaSide:
    raise ValueError(f"group is closed: it takes no more tensors on CUDA, got one on {device}")
