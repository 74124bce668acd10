"""pycomm as a backend of torch.distributed.

.. code-block:: python

    dist.init_process_group("pycomm")  # or "cpu:gloo,cuda:pycomm", or "cpu:pycomm,cuda:nccl"

An installed pycomm needs no import for this. Operations run like pycomm's own collectives, in
shared memory, by kernels, and between nodes; docs/how-to/torch-distributed.md lists them, and the
cost of all others.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
import traceback
import weakref
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import pycomm_backend
from pycomm._inputs import CODED_ALGORITHMS, check_choice, seconds
from pycomm._runtime import c10d, internode, log
from pycomm._runtime.failure_detector import monitored_barrier
from pycomm._runtime.lifetime import Nodes
from pycomm._runtime.rendezvous import RendezvousResult, introduction, join
from pycomm._runtime.subgroup import Subgroup, title_of
from pycomm._runtime.torch_private import correct_shrunk_groups, named_process_group
from pycomm.errors import ArgumentError, CollectiveError, GroupUnusable, PeerDied
from pycomm.group import (
    DEFAULT_MAX_BLOCKS,
    DEFAULT_STAGING_BYTES,
    Group,
    _open_groups,
    make_group,
    take_cuda,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

_FAREWELL = 0.5  # seconds for running operations when their group is destroyed

pycomm_backend.register()


def options(*, algorithm: str = "auto") -> Any:
    """The backend's options, for ``pg_options=`` of torch.distributed's functions.

    .. code-block:: python

        dist.init_process_group("pycomm", pg_options=pycomm.backend.options(algorithm="ring"))

    Args:
        algorithm: the algorithm of the group's all-reduces: ``"auto"``, ``"two_shot"``, ``"ring"``
            or ``"tree"``. All ranks must name the same one.

    Raises:
        ValueError: there is no such algorithm.
    """
    check_choice("algorithm", algorithm, CODED_ALGORITHMS)
    return _c10d().Options(algorithm)


def create(options: Any, given: object = None) -> Any:
    """The backend of one group of torch.distributed, which calls this function.

    Args:
        options: torch's ``DistributedBackendOptions``.
        given: the caller's ``pg_options``.
    """
    module = _c10d()  # first: it may have to be compiled
    algorithm = given.algorithm if isinstance(given, module.Options) else "auto"
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    try:
        seconds(timeout, 0.0)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    ranks = _Ranks(options.store, rank, size, timeout.total_seconds(), options.group_id)
    seats = options.global_ranks_in_group  # empty for the default group
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on
        ranks.await_reconfigure(default=not seats)
    elif seats:
        ranks.join(None if _world is None else _world(), seats)
    else:
        ranks.meet()
        ranks.serve_others()
    return module.Backend(rank, size, timeout, algorithm, ranks)


@functools.cache
def _c10d() -> Any:
    """The module with the backend, for the torch that runs."""
    module = c10d.load()
    _open_groups.after_end(module.stop_completing)
    return module


def _description(name: str) -> str:
    """What the program calls a process group; empty for one that torch does not know by name."""
    try:
        return str(named_process_group(name).group_desc)
    except RuntimeError:  # a process group's own split_group() has made it
        return ""


class _World:
    """The default group, whose window serves smaller groups of its ranks.

    Attributes:
        members: this rank's membership.
        made: how often a group of each name has been made.
    """

    def __init__(self, members: RendezvousResult) -> None:
        self.members = members
        self.made: Counter[str] = Counter()

    def subgroup(self, ranks: Sequence[int], rank: int, name: str) -> Subgroup | None:
        """A group of some ranks; None if they are not all on this node."""
        if not set(ranks) <= set(self.members.nodes.local):
            return None
        self.made[name] += 1  # torch reuses the names of destroyed groups
        return Subgroup(self.members, ranks, rank, f"{name}/{self.made[name]}")


_world: weakref.ref[_World] | None = None  # of the default group, if pycomm runs it


class _Ranks:
    """Connects the ranks of a group.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks in the group.
        handle: the name of this rank for :meth:`reconfigure`, which gives it a new one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        name: str,
        first_store: Store | None = None,
    ) -> None:
        self._first_store = store if first_store is None else first_store
        self._store, self.rank, self.size = store, rank, size
        self.handle = f"pycomm:{rank}:{secrets.token_hex(8)}"
        self._timeout = timeout
        self._name = name
        self._told: set[str] = set()
        self._members: RendezvousResult | None = None
        self._world: _World | None = None
        self._seats: list[int] = []  # this group's ranks, as ranks of the default group
        self._is_default = False
        self._is_shrunk = False
        self._left = list(range(size))  # remaining ranks after failed calls of shrink()
        self._subgroup: Subgroup | None = None  # until it is used
        self._taking = threading.Lock()
        self._failed = False  # True if the first use has failed, or must wait for reconfigure()
        self._closed = False
        self._group: Group | None = None
        self._gloo: Any = None  # made when it is needed
        self._addresses: internode.Addresses  # kept here, because Gloo does not keep the object
        self._monitored_barriers = 0
        self._splits: Counter[str] = Counter()

    def meet(self, patience: float | None = None) -> None:
        """Meets the other ranks and makes a window for the group.

        Args:
            patience: how long to wait for them, in seconds; by default the group's timeout.
        """
        store = PrefixStore("pycomm", self._store)
        patience = self._timeout if patience is None else patience

        def introduce() -> dict[str, Any]:
            return introduction(DEFAULT_STAGING_BYTES)

        members = join(store, self.rank, self.size, patience, introduce, listens=True)
        self._members = members
        title = title_of("", self._seats, dist.get_world_size()) if self._seats else ("", ())
        self._group = make_group(members, self.rank, self._timeout, title=title)
        self._take_cuda()
        if members.listener is not None:
            make = functools.partial(_make_smaller, self.rank, self._timeout)
            mine = members.everyone[self.rank]
            self._group._survive(members.listener, self.rank, mine, make)

    def serve_others(self) -> None:
        """Makes this the default group, whose window can hold other groups."""
        global _world
        assert self._members is not None
        self._is_default = True
        self._world, self._seats = _World(self._members), list(range(self.size))
        _world = weakref.ref(self._world)

    def join(self, world: _World | None, seats: Sequence[int], key: str = "") -> None:
        """Makes this a group in the default group's window if that is possible.

        If not, all ranks meet now, because the first operation may involve only two of them.

        Args:
            world: the default group; None if pycomm does not run it.
            seats: this group's ranks, as ranks of the default group.
            key: distinguishes groups of the same ranks; by default the name.
        """
        self._world, self._seats = world, list(seats)
        if world is not None:
            self._subgroup = world.subgroup(seats, self.rank, key or self._name)
        if self._subgroup is None:
            self.meet()

    def split(self, ranks: Sequence[int], rank: int, timeout: float, name: str) -> _Ranks:
        """A group of some of these ranks; for c10d::Backend::split.

        Neither torch's name of the group nor torch's Store for it need be the same on all of them.
        """
        seats = [self._seats[r] for r in ranks] if self._world else ranks
        key = "split/" + ",".join(map(str, seats))
        self._splits[key] += 1
        store = PrefixStore(f"{key}/{self._splits[key]}", self._store)
        part = _Ranks(store, rank, len(ranks), timeout, name)
        part.join(self._world, seats, key)
        return part

    def merge(self, store: Store, rank: int, size: int, timeout: float, name: str) -> _Ranks:
        """A group of these ranks and others; for c10d::Backend::merge."""
        merged = _Ranks(store, rank, size, timeout, name)
        merged.meet()
        return merged

    def shrink(self, excluded: Sequence[int], timeout: float) -> _Ranks:
        """A group without some of these ranks; for c10d::Backend::shrink. All others call this.

        Raises:
            pycomm.ArgumentError: `excluded` has this rank, or a number that no rank has; or it
                differs between ranks.
            pycomm.PeerDied: more ranks are gone. Then exclude them, too.
            pycomm.CollectiveError: as :meth:`pycomm.Group.shrink`.
        """
        for rank in excluded:
            if not 0 <= rank < self.size or rank == self.rank:
                raise ArgumentError(
                    f"ranks_to_exclude must be other ranks, 0 to {self.size - 1}, got {rank}"
                )
        self._end_gloo()
        kept = [rank for rank in range(self.size) if rank not in excluded]
        smaller = self._shrink_to(kept, timeout)
        self._group = None
        store = PrefixStore("shrunk", self._store)
        made = _Ranks(store, smaller.rank, smaller.size, timeout, self._name, self._first_store)
        made._group, made._is_shrunk = smaller, True
        made._take_cuda()
        if self._is_default:
            made._members = _membership(smaller, store)
            made.serve_others()
        else:
            made._world = self._world
            made._seats = [self._seats[rank] for rank in kept] if self._world else []
        return made

    def _shrink_to(self, kept: list[int], timeout: float) -> Group:
        """The group of these ranks: all of them get it, or all raise."""
        group, agreed = self.connect(), None
        while agreed is None:
            excluded = [i for i, rank in enumerate(self._left) if rank not in kept]
            try:
                smaller = group.shrink(timeout, exclude=excluded)
            except CollectiveError as error:
                if 0 <= error.rank != self._left[error.rank]:
                    what = f"among ranks {self._left}: {error}"
                    rank = self._left[error.rank]
                    raise type(error)(what, rank=rank, operation=error.operation) from error
                raise
            self._left = [self._left[group.ranks.index(number)] for number in smaller.ranks]
            self._group = group = smaller  # the next try shrinks this one
            with contextlib.suppress(CollectiveError):  # a rank has failed just now
                agreed = group.should_commit(self._left == kept)
        if agreed:
            return group
        lost = sorted(set(kept) - set(self._left))
        if not lost:
            raise ArgumentError("ranks_to_exclude must be the same on every rank that calls this")
        raise PeerDied(
            f"ranks {lost} are gone, too: exclude them and the ranks excluded so far",
            rank=lost[0],
            operation="shrink",
        )

    def await_reconfigure(self, default: bool) -> None:
        """Delays connecting this rank until :meth:`reconfigure`.

        Args:
            default: True if this is the default group.
        """
        self._failed, self._is_default = True, default

    def reconfigure(
        self, uuid: int, handles: list[str] | set[str], patience: float, timeout: float
    ) -> _Ranks:
        """The group that replaces this one; for c10d::Backend::reconfigure.

        All ranks of the new group call this, and must use the same Store. Then this group is
        closed.

        Args:
            uuid: a number that no call has used.
            handles: the ranks' handles, in the order of ranks; a set is sorted by former ranks.
            patience: how long to wait for the other ranks, in seconds.
            timeout: the timeout of the group's operations, in seconds.

        Raises:
            pycomm.ArgumentError: the handles are invalid, not unique or lack this rank's handle, or
                `uuid` has been used.
            pycomm.CollectiveError: not all ranks have come.
        """
        sorted_handles = sorted(handles, key=_rank_of)  # also checks each of them
        order = handles if isinstance(handles, list) else sorted_handles
        if len(set(order)) < len(order) or self.handle not in order:
            raise ArgumentError(f"handles must be unique and have {self.handle!r}, got {order}")
        rank, claim = order.index(self.handle), secrets.token_hex(8)
        store = PrefixStore(f"reconfigured/{uuid}", self._first_store)
        if store.compare_set(f"claimed/{rank}", "", claim).decode() != claim:
            raise ArgumentError(f"uuid must be new in each call, got {uuid} again")
        made = _Ranks(store, rank, len(order), timeout, self._name, self._first_store)
        made.meet(patience)
        if self._is_default:
            made.serve_others()
        self.close()
        return made

    def connect(self) -> Group:
        """The group that runs operations. If its first use fails, this rank leaves it."""
        if self._is_shrunk:
            correct_shrunk_groups("pycomm")
        if not self._failed and (subgroup := self._take_subgroup()) is not None:
            self._failed = True
            try:
                title = title_of(_description(self._name), self._seats, dist.get_world_size())
                self._group = make_group(subgroup.join(), self.rank, self._timeout, title=title)
            except BaseException as error:
                # Frames may hold a group, which must leave the window before the rank departs.
                traceback.clear_frames(error.__traceback__)
                self._leave(subgroup)
                raise
            self._failed = False
            self._take_cuda()
            if self._closed:  # by another thread meanwhile
                self.close()
        if self._group is None:
            raise GroupUnusable("group is closed, not configured yet, or its first use has failed")
        return self._group

    def _take_subgroup(self) -> Subgroup | None:
        """The group to join or to leave; only the first caller gets it."""
        with self._taking:
            taken, self._subgroup = self._subgroup, None
        return taken

    def _leave(self, subgroup: Subgroup) -> None:
        try:
            subgroup.leave()
        except BaseException as error:
            self._subgroup = subgroup  # close() tries again
            expected = RuntimeError, MemoryError  # the Store is gone, or there is no address space
            if not isinstance(error, expected):
                raise

    def close(self) -> None:
        """Closes the group. Operations that still run after a short time are aborted.

        Raises:
            pycomm.CollectiveError: a kernel has failed, and no call has raised its error.
        """
        self._closed = True
        if (subgroup := self._take_subgroup()) is not None:
            self._leave(subgroup)
        if self._group is None:
            return
        end = time.monotonic() + _FAREWELL
        while not self._group._core.idle() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._group._core.idle():
            self._group.abort()
        failure = self._failure_of_kernels()
        self._group.close()
        if failure is not None:
            raise failure

    def _failure_of_kernels(self) -> CollectiveError | None:
        """Waits for the kernels, and returns their error unless a call has raised it.

        A program's last operations are enqueued, and would seem to have succeeded.
        """
        group = self._group
        if group is None or group._cuda is None:
            return None
        try:
            torch.cuda.synchronize(group._cuda.device)
            group.check()
        except GroupUnusable:  # a call has raised it
            return None
        except CollectiveError as error:
            return None if error.rank == self.rank else error  # this rank has aborted the group
        return None

    def connect_gloo(self, what: str, timeout: float) -> Any:
        """A Gloo backend, for operations that pycomm lacks; logs them."""
        if what not in self._told:
            self._told.add(what)
            log.backend_falls_back(self._name, self.rank, what)
        if self._gloo is None:
            self._addresses = internode.Addresses(PrefixStore("gloo", self._store), timeout)
            self._gloo = internode.connect_lazily(self._addresses, self.rank, self.size, timeout)
        return self._gloo

    def tell_staged(self, what: str) -> None:
        """Logs that an operation takes CUDA tensors through host memory."""
        if what not in self._told:
            self._told.add(what)
            log.backend_stages(self._name, self.rank, what)

    def connect_nccl(self, timeout: float) -> Any:
        """An NCCL backend for CUDA tensors between nodes; None if torch has no NCCL."""
        if not dist.is_nccl_available():
            return None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        store = PrefixStore("nccl", self._store)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _take_cuda(self) -> None:
        """Lets the group take CUDA tensors, by kernels if its ranks are on one node."""
        group, name = self._group, self._name
        if group is not None and len(group.nodes) == 1:
            take_cuda(group, lambda: named_process_group(name), DEFAULT_MAX_BLOCKS, 0)

    def _end_gloo(self) -> None:
        """Ends operations over Gloo, also on ranks that wait for this one."""
        if self._gloo is not None:
            self._addresses.end()
            others = [rank for rank in range(self.size) if rank != self.rank]
            internode.disconnect(self._gloo, others, internode.interfaces())

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """See :func:`pycomm._runtime.failure_detector.monitored_barrier`."""
        self._monitored_barriers += 1
        store = PrefixStore(f"monitored_barrier/{self._monitored_barriers}", self._store)
        monitored_barrier(store, self.rank, self.size, timeout, wait_all_ranks)


def _make_smaller(
    number: int, timeout: float, members: RendezvousResult, ranks: Sequence[int]
) -> Group:
    """Makes the group that `ranks` of a larger group shrink to; `number` is this rank there."""
    smaller = make_group(members, ranks.index(number), timeout)
    smaller.ranks = tuple(ranks)
    return smaller


def _membership(group: Group, store: Store) -> RendezvousResult:
    """This rank's membership in a group that shrink() has made."""
    here = next(node for node, ranks in enumerate(group.nodes) if group.rank in ranks)
    return RendezvousResult(
        nodes=Nodes(group.nodes, here),
        window=group._window,
        pids=list(group._pids),
        processes=list(group._processes),
        cores=group._cores,
        link=None,
        port=None,
        store=store,
        listener=None,
    )


def _rank_of(handle: str) -> tuple[int, str]:
    """The rank in a handle, and the token that distinguishes the rank's handles."""
    kind, _, rest = handle.partition(":")
    rank, _, token = rest.partition(":")
    if kind != "pycomm" or not rank.isdecimal():
        raise ArgumentError(f"handles must come from get_reconfigure_handle(), got {handle!r}")
    return int(rank), token
