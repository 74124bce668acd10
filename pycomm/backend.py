"""pycomm as a backend of torch.distributed.

.. code-block:: python

    dist.init_process_group("pycomm")  # or "cpu:pycomm,cuda:nccl"

An installed pycomm needs no import for this. Operations run in shared memory and between nodes as
pycomm's own collectives do; docs/torch-distributed.md says which ones and what the rest costs.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import traceback
import weakref
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import pycomm_backend
from pycomm._init import make_group
from pycomm._inputs.arguments import seconds
from pycomm._runtime import c10d_cache, log
from pycomm._runtime.rendezvous import introduction, join
from pycomm._runtime.subgroup import Subgroup
from pycomm._runtime.waiting import Deadline
from pycomm.errors import GroupUnusable, Timeout
from pycomm.group import DEFAULT_STAGING_BYTES, Group, _open_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.rendezvous import Membership

_FAREWELL = 0.5  # seconds that running operations have when their group is destroyed

pycomm_backend.register()


def create(options: Any) -> Any:
    """The backend of one group of torch.distributed, which calls this function.

    Args:
        options: torch's ``DistributedBackendOptions``.
    """
    module = _c10d()  # first: it may have to be compiled
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    seconds(timeout, 0.0)  # checks it
    ranks = _Ranks(options.store, rank, size, timeout.total_seconds(), options.group_id)
    if seats := options.global_ranks_in_group:
        ranks.join(None if _world is None else _world(), seats)
    else:  # torch passes none for the default group
        ranks.meet()
        ranks.serve_others()
    return module.Backend(rank, size, timeout, ranks)


@functools.cache
def _c10d() -> Any:
    """The module with the backend, for the torch that runs."""
    module = c10d_cache.load()
    _open_groups.after_end(module.stop_completing)
    return module


class _World:
    """The default group, whose window serves the groups of some of its ranks.

    Attributes:
        members: this rank's membership.
        made: how often a group of each name has been made.
    """

    def __init__(self, members: Membership) -> None:
        self.members = members
        self.made: Counter[str] = Counter()

    def subgroup(self, ranks: Sequence[int], rank: int, name: str) -> Subgroup | None:
        """A group of some ranks; None if they are not all on this node."""
        if not set(ranks) <= set(self.members.nodes.local):
            return None
        self.made[name] += 1  # torch uses the names of destroyed groups again
        return Subgroup(self.members, ranks, rank, f"{name}/{self.made[name]}")


_world: weakref.ref[_World] | None = None  # that of the default group, if it is one of pycomm's


class _Ranks:
    """Connects the ranks of a group."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, name: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self._name = name
        self._told: set[str] = set()
        self._members: Membership | None = None
        self._world: _World | None = None
        self._seats: list[int] = []  # these ranks in the default group
        self._subgroup: Subgroup | None = None  # until it is used
        self._taking = threading.Lock()
        self._failed = False  # to be used for the first time
        self._closed = False
        self._group: Group | None = None
        self._gloo: Any = None
        self._monitored_barriers = 0

    def meet(self) -> None:
        """Meets the other ranks and makes a window for the group."""
        store = PrefixStore("pycomm", self._store)
        mine = introduction(DEFAULT_STAGING_BYTES)
        self._members = join(store, self._rank, self._size, self._timeout, mine)
        self._group = make_group(self._members, self._rank, self._timeout)

    def serve_others(self) -> None:
        """Makes this the default group, in whose window others can lie."""
        global _world
        assert self._members is not None
        self._world, self._seats = _World(self._members), list(range(self._size))
        _world = weakref.ref(self._world)

    def join(self, world: _World | None, seats: Sequence[int]) -> None:
        """Makes this a group in the default group's window if that is possible.

        If not, the ranks meet now, because perhaps only two of them use the group first.

        Args:
            world: the default group; None if it is not one of pycomm's.
            seats: the ranks in it.
        """
        self._world, self._seats = world, list(seats)
        if world is not None:
            self._subgroup = world.subgroup(seats, self._rank, self._name)
        if self._subgroup is None:
            self.meet()

    def split(
        self, store: Store, ranks: Sequence[int], rank: int, timeout: float, name: str
    ) -> _Ranks:
        """A group of some of these ranks; for c10d::Backend::split."""
        part = _Ranks(store, rank, len(ranks), timeout, name)
        part.join(self._world, [self._seats[r] for r in ranks] if self._world else ranks)
        return part

    def merge(self, store: Store, rank: int, size: int, timeout: float, name: str) -> _Ranks:
        """A group of these ranks and others; for c10d::Backend::merge."""
        merged = _Ranks(store, rank, size, timeout, name)
        merged.meet()
        return merged

    def connect(self) -> Group:
        """The group that runs operations. If its first use fails, this rank leaves it."""
        if not self._failed and (subgroup := self._take_subgroup()) is not None:
            self._failed = True
            try:
                self._group = make_group(subgroup.join(), self._rank, self._timeout)
            except BaseException as error:
                # Its frames may hold a group, which must leave the window before the rank departs.
                traceback.clear_frames(error.__traceback__)
                self._leave(subgroup)
                raise
            self._failed = False
            if self._closed:  # meanwhile
                self.close()
        if self._group is None:
            raise GroupUnusable("group is closed, or its first use has failed")
        return self._group

    def _take_subgroup(self) -> Subgroup | None:
        """The group to join or to leave; for one caller only."""
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
        """Closes the group. Operations that nobody has waited for may soon be aborted."""
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
        self._group.close()

    def connect_gloo(self, what: str, timeout: float) -> Any:
        """A Gloo backend, for operations that pycomm does not have; logs why."""
        if what not in self._told:
            self._told.add(what)
            log.backend_falls_back(self._name, self._rank, what)
        if self._gloo is None:
            store = PrefixStore("gloo", self._store)
            self._gloo = _gloo(store, self._rank, self._size, timeout)
        return self._gloo

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        """A barrier over the Store, in which rank 0 finds out who is missing.

        Args:
            timeout: in seconds.
            wait_all_ranks: report all missing ranks, instead of the first one.

        Raises:
            pycomm.Timeout: ranks are missing; on every rank that has come.
        """
        self._monitored_barriers += 1
        store = PrefixStore(f"monitored_barrier/{self._monitored_barriers}", self._store)
        deadline = Deadline(timeout)
        if self._rank != 0:
            mine = str(self._rank)
            store.set(mine, "")
            outcome = store.get("over") if _comes(store, "over", deadline) else None
            if outcome is not None:  # rank 0 looks for no key any more
                store.delete_key(mine)
                if store.add("readers", 1) == self._size - 1:  # the last one
                    store.delete_key("over")
                    store.delete_key("readers")
            if outcome != b"complete":
                raise Timeout(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                    "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
                    "rank.",
                    rank=0,
                    operation="monitored_barrier",
                )
            return
        missing: list[int] = []
        for rank in range(1, self._size):
            if not _comes(store, str(rank), deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if self._size > 1:
            store.set("over", "incomplete" if missing else "complete")
        if missing:
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            late = "Rank 0 timed out in monitoredBarrier: " if timeout <= 0 else ""
            raise Timeout(
                f"{late}{ranks} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms",
                rank=missing[0],
                operation="monitored_barrier",
            )


def _comes(store: Store, key: str, deadline: Deadline) -> bool:
    """Waits for a key in the Store; returns False if it has not come at the deadline."""
    try:
        deadline.await_keys(store, [key], lambda: None)
    except TimeoutError:
        return False
    return True


def _gloo(store: Store, rank: int, size: int, timeout: float) -> Any:
    """A Gloo backend that connects two ranks when they first exchange something.

    It uses the interfaces of ``GLOO_SOCKET_IFNAME``, as torch's own Gloo groups do.
    """
    made: Any = dist.ProcessGroupGloo
    options = made._Options()
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    options._devices = [
        made.create_device(interface=name, lazy_init=True)
        if name
        else made.create_default_device(lazy_init=True)
        for name in names
    ]
    options._timeout = timedelta(seconds=timeout)
    return made(store, rank, size, options)
