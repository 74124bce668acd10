"""How a group shrinks and grows."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from pycomm._inputs.arguments import seconds
from pycomm._runtime import log
from pycomm._runtime.observed import Observed
from pycomm._runtime.survivors import Survivors
from pycomm.errors import GroupUnusable, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from typing import Any

    from typing_extensions import Self

    from pycomm import _C
    from pycomm._runtime.growth import Growth
    from pycomm._runtime.listener import Alarm, Listener
    from pycomm._runtime.rendezvous import Membership

_PATIENCE_WITH_NEWCOMERS = 30.0
when_replaced: list[Callable[[Any, Any], None]] = []  # called with the old and the new group


class Elastic(Observed):
    """The methods of :class:`pycomm.Group` to go on after a failure, and to let others in.

    :class:`pycomm.Group` documents the attributes.
    """

    timeout: float
    staging_bytes: int
    name: str
    ranks: tuple[int, ...]
    _told: set[str]
    _link: _C.Transport | None

    if TYPE_CHECKING:  # what Group has

        def check(self) -> None: ...
        def abort(self) -> None: ...
        def close(self) -> None: ...
        def _abort_operations(self) -> None: ...
        def _leave(self) -> None: ...
        def _smaller(self, window: _C.Window, members: list[int]) -> Self: ...
        def _spans(self, device: torch.device) -> bool: ...

    def _begin_elastic(self) -> None:
        self._shrunk = 0  # how many times the first group has shrunk to become this one
        self._origin = self.name  # the first group's name
        self._succession: Callable[[Self, Self], None] | None = None  # called by shrink()
        self._survivors: Survivors[Self] | None = None  # if the group has spanned nodes
        self._meets_survivors = False  # in shrink()
        self._growth: Growth[Self] | None = None  # if the ranks are processes
        self._unresponsive = -1  # the rank that has ended the group because it did not answer
        self._ended_by = 0  # the abort word
        self._decides = len(self.nodes) == 1  # False for threads with simulated nodes

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
    ) -> Self:
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

    def _shrink_on_node(self, patience: float, exclude: Sequence[int]) -> Self:
        succession = self._succession
        try:
            window, members = self._core.shrink(patience, list(exclude))
        except BaseException as error:
            if not isinstance(error, GroupUnusable):  # else another thread may still shrink it
                self.close()
            raise
        self._leave()
        smaller = self._smaller(window, members)
        if succession is not None:
            succession(self, smaller)
        return smaller

    def _shrink_between_nodes(self, patience: float, exclude: Sequence[int]) -> Self:
        survivors = self._among_survivors()
        try:
            self._meets_survivors = True
            self._unresponsive = max(self._core.unresponsive, self._unresponsive)
            self._abort_operations()
            self._ended_by = self._core.ended_by or self._ended_by
            self._leave()
            smaller = survivors.shrink(self._unresponsive, exclude, patience, self._ended_by)
        except Timeout:  # this rank is still one that others wait for, and may shrink again
            self._meets_survivors = False
            raise
        except BaseException:
            survivors.listener.close()
            raise
        self._survivors = None  # its listener is that of the smaller group
        return smaller

    def _among_survivors(self) -> Survivors[Self]:
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
        growth: Growth[Any] | None = self._growth
        if growth is None:
            return None
        growth.open(self)
        return None if growth.address is None else str(growth.address)

    def grow(self, timeout: float | timedelta | None = None) -> Self:
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
            ValueError: the ranks are threads.
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

    def _hand_on_to(self, successor: Self) -> None:
        if self._growth is not None and successor._growth is not None:
            successor._growth.inherit(self._growth)
        for go_on in when_replaced:
            go_on(self, successor)

    @property
    def _listener(self) -> Listener | None:
        return None if self._survivors is None else self._survivors.listener

    def _survive(
        self,
        listener: Listener,
        rank: int,
        mine: Mapping[str, Any],
        make: Callable[[Membership, Sequence[int]], Self],
    ) -> Self:
        """Lets a group that spans nodes, or has shrunk from one that did, shrink over listeners.

        On one node, too: a rank that failed to join it waits at the listeners of those that did.

        Args:
            listener: the listener of this rank.
            rank: this rank, as the listener numbers it.
            mine: the introduction of this rank.
            make: makes a smaller group of this rank's membership and its ranks, by those numbers.

        Returns:
            This group.
        """
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

    def _stop_shrinking(self) -> None:
        survivors = self._survivors  # another thread may close the group
        if survivors is not None and self._meets_survivors:
            survivors.listener.close()

    def _close_doors(self) -> None:
        """Tells survivors and newcomers that this rank has gone."""
        survivors = self._survivors
        if survivors is not None:
            survivors.listener.close()
        if self._growth is not None:
            self._growth.close()


def _tell(
    link: _C.Transport, ranks: Sequence[int], nodes: Sequence[Sequence[int]], alarm: Alarm
) -> None:
    """Takes the alarm of a rank of another node for that node's farewell."""
    for node, local in enumerate(nodes):
        if alarm.rank in (ranks[rank] for rank in local):
            link.told(node, alarm.word)
