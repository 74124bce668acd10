"""Groups of ranks."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.arguments import seconds
from pycomm._inputs.dtypes import check_dtype
from pycomm._runtime import log
from pycomm._runtime.internode import Nodes
from pycomm._runtime.observed import Observed
from pycomm._runtime.open_groups import OpenGroups
from pycomm._runtime.span import Span
from pycomm.errors import GroupUnusable, Timeout

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm._runtime.cuda import CudaSide
    from pycomm._runtime.growth import Growth
    from pycomm._runtime.listener import Listener
    from pycomm._runtime.survivors import Survivors

DEFAULT_TIMEOUT = 300.0
DEFAULT_STAGING_BYTES = 2 << 20
_PATIENCE_WITH_NEWCOMERS = 30.0

_names = itertools.count()
_open_groups: OpenGroups[Group] = OpenGroups()
when_replaced: list[Callable[[Group, Group], None]] = []  # called with the old and the new group


class Group(Observed):
    """One rank's membership in a group of ranks, on one node or several.

    :func:`init` and :class:`pycomm.LocalWorld` make groups. Operations on a group run in the order
    in which they were called, from whichever threads. All ranks must call the same operations in
    the same order.

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
        ranks: for each rank, its number in the group from which this one has shrunk, over however
            many steps; for a new group or one that has grown, 0, 1, ...
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
        self._window = window
        self._pids, self._processes, self._cores = pids, processes, cores
        local = nodes.local
        index, size = local.index(rank), len(local)
        self._core = _C.Group(
            window, pids, processes, index, size, cores, timeout, first_epoch, local
        )
        if len(nodes.ranks) > 1:
            self._core.span(nodes.ranks, nodes.here, link, timeout)
        self._handle = self._core.handle
        # The handle for the short way of all_reduce; None if process groups carry tensors.
        self._short_way: object = self._handle
        self._tags = itertools.cycle(range(1, 1 << 16))
        self._told: set[str] = set()  # messages that are logged once
        self._span: Span | None = None  # process groups between nodes
        self._cuda: CudaSide | None = None
        self._join_cuda: Callable[[torch.device], CudaSide] = _no_cuda
        self._shrunk = 0  # how many times the first group has shrunk to become this one
        self._origin = self.name  # the first group's name
        self._preserved = itertools.count()  # numbers of operations with preserve=True
        self._succession: Callable[[Group, Group], None] | None = None  # called by shrink()
        self._survivors: Survivors[Group] | None = None  # if the group has spanned nodes
        self._meets_survivors = False  # in shrink()
        self._growth: Growth[Group] | None = None  # if the ranks are processes
        self._unresponsive = -1  # the rank that has ended the group because it did not answer
        self._decides = len(nodes.ranks) == 1  # False for threads with simulated nodes
        _C.register_group(self.name, self._core)
        _open_groups.add(self)

    def empty(
        self,
        *size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Makes an uninitialised tensor in the window; collectives on it need no staging copy.

        Staging is avoided if the tensors of all ranks lie in the window. On the CPU, the memory is
        freed together with the tensor. On CUDA, it comes from the heap that
        ``init(cuda_heap_bytes=...)`` has reserved and is freed together with the group, and all
        ranks must make the first call together.

        Args:
            size: the shape, as for :func:`torch.empty`.
            dtype: one of the supported dtypes.
            device: ``"cpu"`` or a CUDA device.

        Returns:
            The tensor. In a group that spans nodes, a CUDA tensor is an ordinary one.

        Raises:
            ValueError: an argument is not as described.
            MemoryError: the node has too little memory.
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
            return torch.empty(shape, dtype=dtype)
        allocation = self._core.allocate(count * dtype.itemsize)
        return torch.frombuffer(allocation, dtype=torch.uint8).view(dtype)[:count].view(shape)

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

    def trim(self) -> None:
        """Frees memory that operations keep for later ones of their kind.

        Top-k and operations between nodes keep their working memory on the CPU, which grows with
        the largest tensor so far. This method waits for running operations. Other ranks need not
        call it.

        Raises:
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        self._core.trim()

    def abort(self) -> None:
        """Makes every rank that is in an operation, or enters one, raise :class:`pycomm.Aborted`.

        Any thread may call this. Afterwards the group cannot be used any more. If this rank is in
        :meth:`shrink`, that ends, too.
        """
        self._abort_operations()
        survivors = self._survivors  # another thread may close the group
        if survivors is not None and self._meets_survivors:
            survivors.listener.close()

    def _abort_operations(self) -> None:
        self._core.abort()
        span = self._span
        if span is not None:
            span.abort()

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether all ranks take a step, such as the optimizer's; a collective call.

        No operation can promise that it succeeds on all ranks or on none: a rank may die when some
        have already gone on. This decision can. Every rank that survives gets the same answer, so a
        step is taken by all of them or by none. On CUDA it waits for the device first.

        Args:
            ready: False if this rank cannot take the step.

        Returns:
            True if all ranks are ready. That may be so although a rank has died since; the next
            operation raises then.

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

    def shrink(
        self, timeout: float | timedelta | None = None, *, exclude: Sequence[int] = ()
    ) -> Group:
        """Makes a smaller group of the ranks that are left after a failure.

        All survivors call this; a rank that calls it makes the others fail if they have not yet.
        They agree over shared memory, without torch.distributed and its Store, which may have died
        with a rank. If the group was the default group, the smaller one takes its place. This group
        is closed; close the smaller one yourself, also in a ``with`` block of this one.

        A rank survives if it calls this method. Ranks that have ended or have closed the group are
        not waited for, and neither is the rank that let others wait until :class:`pycomm.Timeout`.
        If a rank dies in the meantime, the first operation of the smaller group may raise, and that
        group can be shrunk in turn.

        Args:
            timeout: how long to wait for ranks that live but have not called this, in seconds or as
                a timedelta. Then they are left out on one node; between nodes this raises. By
                default the group's timeout.
            exclude: ranks to leave out although they may live, the same on all survivors. They are
                not waited for.

        Returns:
            The smaller group, whose ranks have the order of this group's;
            :attr:`ranks` tells their former numbers.

        Raises:
            ValueError: the group is a ``LocalWorld`` with simulated nodes, or `exclude` has numbers
                that are no other ranks'.
            pycomm.GroupUnusable: the others have shrunk the group without this rank, or may do so;
                it was shrunk or closed before; or another thread has called :meth:`abort`
                meanwhile.
            pycomm.Timeout: between nodes, a rank that lives has not come; on all that have. Call
                this again to go on waiting, or close the group.
            MemoryError: no survivor has room in its part of shared memory.
        """
        patience = seconds(timeout, self.timeout)
        for rank in exclude:
            if not 0 <= rank < self.size or rank == self.rank:
                raise ValueError(f"exclude must have other ranks of the {self.size}, got {rank}")
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
            if not isinstance(error, GroupUnusable):  # else another thread may still shrink it
                self.close()
            raise
        self._leave()
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
        if succession is not None:
            succession(self, smaller)
        return smaller

    def _shrink_between_nodes(self, patience: float, exclude: Sequence[int]) -> Group:
        survivors = self._among_survivors()
        try:
            self._meets_survivors = True
            self._unresponsive = max(self._core.unresponsive, self._unresponsive)
            self._abort_operations()
            self._leave()
            smaller = survivors.shrink(self._unresponsive, exclude, patience)
        except Timeout:  # this rank is still one that others wait for, and may shrink again
            self._meets_survivors = False
            raise
        except BaseException:
            survivors.listener.close()
            raise
        self._survivors = None  # its listener is that of the smaller group
        return smaller

    def _among_survivors(self) -> Survivors[Group]:
        survivors = self._survivors
        if survivors is None:
            self._core.check_usable()
            raise ValueError("group must not be one of threads with simulated nodes")
        if survivors.listener.closed or self._meets_survivors:
            raise GroupUnusable("group is closed, or another thread shrinks it")
        return survivors

    @property
    def address(self) -> str | None:
        """Where other processes can ask to join: ``host:port/secret``, for :func:`pycomm.join`.

        Rank 0 listens there from its first use of this, or the first :meth:`grow`, on. The others
        learn the address in :meth:`grow`; before, it is None there. The secret admits processes of
        the same user, so keep it from others.
        """
        growth = self._growth
        if growth is None:
            return None
        growth.open(self)
        return None if growth.address is None else str(growth.address)

    def grow(self, timeout: float | timedelta | None = None) -> Group:
        """Lets processes in that wait in :func:`pycomm.join`; a collective call.

        Call it between two steps, say. If nobody waits, it costs as much as a few barriers. If
        processes wait, the members make a larger group with them: this one is closed, and if it was
        the default group, the larger one takes its place. Close the larger one yourself, also in a
        ``with`` block of this one.

        Members keep their ranks, the newcomers come behind them. A newcomer that fails meanwhile
        is left out. If one fails when some ranks have returned, the larger group's next operation
        raises, and it can be shrunk.

        Args:
            timeout: how long to wait for newcomers that have come to the door and do not answer any
                more, in seconds or as a timedelta; by default 30 seconds, or the group's timeout if
                that is shorter. The shortest of all ranks counts.

        Returns:
            The larger group, or this one if nobody was let in. If a rank has failed just after the
            members had agreed, those that are left; if they do not come before the group's timeout,
            the larger group, which has failed and can be shrunk.

        Raises:
            ValueError: the ranks are threads, or ``transport="process_group"``.
            RuntimeError: another thread of this rank is in this method.
            pycomm.CollectiveError: a rank of this group failed. The others can shrink it.
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        patience = seconds(timeout, min(self.timeout, _PATIENCE_WITH_NEWCOMERS))
        self._core.check_usable()
        growth = self._growth
        if growth is None:
            raise ValueError("group must be one of processes that pycomm.init made, to grow")
        larger = growth.grow(self, patience)
        if larger is None:
            return self
        self._hand_on_to(larger)
        self.close()
        log.group_grown(larger, self)
        if not larger._core.usable():
            with contextlib.suppress(Timeout):  # then it is the caller's to shrink
                return larger.shrink()
        return larger

    def _hand_on_to(self, successor: Group) -> None:
        if self._growth is not None and successor._growth is not None:
            successor._growth.inherit(self._growth)
        for go_on in when_replaced:
            go_on(self, successor)

    @property
    def _listener(self) -> Listener | None:
        return None if self._survivors is None else self._survivors.listener

    def close(self) -> None:
        """Finishes running operations, then leaves the group without waiting for other ranks."""
        survivors = self._survivors
        try:
            self._leave()
        finally:
            if survivors is not None:
                survivors.listener.close()
            if self._growth is not None:
                self._growth.close()

    def _leave(self) -> None:
        self._join_cuda, self._succession = _no_cuda, None  # which refer to this group
        side, self._cuda = self._cuda, None
        span, self._span = self._span, None
        with contextlib.ExitStack() as last_first:  # the others also if one raises
            last_first.callback(self._core.close)
            if span is not None:
                last_first.callback(span.close)
            if side is not None:
                last_first.callback(side.close)

    def _next_tag(self) -> int:
        """A number, compared by ranks, that distinguishes one user's operations. 0 means none."""
        return next(self._tags)

    def _spans(self, device: torch.device) -> bool:
        """True if tensors on `device` travel between nodes over process groups."""
        return self._span is not None and self._span.serves(device)

    def _exchanges_on_host(self, device: torch.device) -> bool:
        """True if gradients on `device` are exchanged through host memory."""
        return not self._spans(device) and self._stages(device)

    def _stages(self, device: torch.device) -> bool:
        """True if operations that process groups lack take tensors on `device` to the host."""
        stages = device.type == "cuda" and len(self.nodes) > 1
        if stages:
            log.fallback(self, "CUDA tensors go through host memory: the group spans nodes")
        return stages

    def _cuda_side(self, device: torch.device) -> CudaSide:
        """This rank's CUDA side; all ranks together make theirs at the first call."""
        self._core.check_usable()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._cuda is None:
            try:
                self._cuda = self._join_cuda(device)
            except BaseException:
                self._core.abort()  # so that other ranks do not wait for this one
                raise
        if self._cuda.device != device:
            raise ValueError(
                f"device must be {self._cuda.device}, where this rank has been so far, got {device}"
            )
        return self._cuda

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The old name of `nodes`."""
        warnings.warn("hosts is called nodes now", DeprecationWarning, stacklevel=2)
        return self.nodes

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        busy = not self._core.idle() or (self._span is not None and self._span.busy())
        if kind is not None and busy:
            self.abort()  # other ranks may never do their part of running operations
        self.close()

    def __repr__(self) -> str:
        return f"pycomm.Group({self.name!r}, rank={self.rank}, size={self.size})"


def find_group(name: str) -> Group:
    """The group with this name; for operators, which cannot take objects."""
    return _open_groups.find(name)


def _no_cuda(device: torch.device) -> CudaSide:
    raise ValueError(f"the group must be open to take tensors, it is closed: got one on {device}")
