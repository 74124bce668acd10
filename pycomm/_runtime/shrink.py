"""How the survivors of a failed group that spans nodes agree and continue.

1. The lowest live rank is the coordinator. Every survivor looks for it: it connects to the lower
   ranks' listeners (pycomm/_runtime/sockets.py), lowest first. A rank that refuses a connection has
   ended.
2. The survivors tell the coordinator that they have come, and the last decision of
   :meth:`pycomm.Group.should_commit` that they know. The coordinator waits until every other rank
   has come, or has ended, or has caused the timeout. A rank that asks for a decision gets the
   answer as soon as any rank that has come knows the decision: its outcome holds for all. The
   coordinator also tells ranks that have not come that the group has failed.
3. The coordinator answers all of them. It sends the outcome of the decision if any of them knows
   it, or the members of the smaller group and the address of a Store. Over the Store, the members
   set up memory and connections (pycomm/_runtime/rendezvous.py). Meanwhile the coordinator watches
   their connections. It tells live ranks that are left out, for when they come.

If the coordinator ends meanwhile, the others see its connections end, and the next rank becomes the
coordinator. If a member ends before the smaller group is complete, all begin again at step 1. If it
ends just after some ranks have seen that the group is complete, these ranks fail in the group's
first operation, and meet the others in the next agreement.

A rank on a host that does not answer may live and continue by itself, and so may the rank that has
caused the timeout: perhaps the network was cut for a while, and it blames the others. So the
survivors continue only if they outnumber such ranks, or are as many and have the lowest rank.
"""

from __future__ import annotations

import contextlib
import json
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pycomm._inputs import operation_of
from pycomm._runtime import host
from pycomm._runtime.rendezvous import set_up
from pycomm._runtime.sockets import LEFT_OUT, Alarm, Connection, Listener
from pycomm._runtime.stores import reach, serve
from pycomm._runtime.threads import Deadline
from pycomm.errors import Aborted, CollectiveError, GroupUnusable, PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from pycomm import _C
    from pycomm._runtime.rendezvous import RendezvousResult

_LOOK_EVERY = 10  # milliseconds
_PATIENCE_FOR_ANSWERS = 5.0  # seconds more than the coordinator waits, whose answer says more


class Agreement:
    """One rank's part in an agreement; for use in a ``with`` block.

    Args:
        listener: the listener of this rank.
        rank: this rank.
        ranks: all ranks of the group that has failed, ascending.
        unresponsive: the rank that has ended the group because it did not answer, if there is one.
        excluded: ranks that all survivors leave out.
        patience: seconds to wait for ranks that live but do not come.
        word: the abort word of the group that has failed, for ranks that do not know of it; 0 for
            no word.
    """

    def __init__(
        self,
        listener: Listener,
        rank: int,
        ranks: Sequence[int],
        unresponsive: Collection[int],
        excluded: Collection[int],
        patience: float,
        word: int = 0,
    ) -> None:
        self._listener, self._rank, self._ranks = listener, rank, ranks
        self._alarm = Alarm(rank, word, listener.group)
        self._unresponsive, self._patience = unresponsive, patience
        self._left_out = {*unresponsive, *excluded}
        self._probes: dict[int, Connection] = {}
        self._mine: Mapping[str, Any] = {}
        self._members: dict[int, Connection] = {}  # of the smaller group, by new rank
        self._store: Store | None = None

    def outcome(self, number: int) -> bool | None:
        """The outcome of a decision that has failed on this rank, if another survivor knows it.

        Returns:
            None if no survivor knows it. Then it has failed on all.

        Raises:
            pycomm.Timeout: a live rank does not come, and no rank that has come knows the outcome.
            pycomm.GroupUnusable: the group was closed meanwhile.
        """
        if self._rank in self._left_out:
            return None
        answer = self._take_part(settles=True)
        decided, outcome = answer["decided"]
        return outcome if decided >= number else None

    def members(self, mine: Mapping[str, Any]) -> tuple[Store, list[int], list[Any]]:
        """The smaller group.

        Args:
            mine: this rank's introduction.

        Returns:
            A Store that only the smaller group uses, its ranks in ascending order, and their
            introductions.

        Raises:
            pycomm.Timeout: a live rank does not come.
            pycomm.GroupUnusable: this rank has been left out, others may continue without it, or
                the group was closed meanwhile.
            RuntimeError: the coordinator has ended meanwhile.
        """
        if self._rank in self._left_out:
            raise GroupUnusable(f"{LEFT_OUT}, which did not answer")
        self._mine = mine
        answer = self._take_part(settles=False)
        if self._store is None:
            self._store = reach(answer["store"], self._patience, self._given_up)
        self._listener.decisions, self._listener.outcome = answer["decided"]
        self._listener.enter(answer["members"], "{}:{}".format(*answer["store"]))
        return self._store, answer["members"], json.loads(self._store.get("everyone"))

    def _check_member(self) -> None:
        """Accepts connections. Raises if this rank is left out or has closed the group."""
        if self._listener.closed:
            raise GroupUnusable("group was aborted or closed while it shrank")
        self._listener.accept()  # or its queue would fill up, and end every wait at once
        if self._listener.left_out:
            raise GroupUnusable(LEFT_OUT)

    def _given_up(self) -> bool:
        self._check_member()
        return bool(self.lost())

    def lost(self) -> list[int]:
        """The new ranks of members that are known to have ended.

        The coordinator watches all members, and the others watch only the coordinator. A member
        also ends its connection once it has seen that the smaller group is complete.
        """
        if self._listener.closed:
            raise Aborted("a rank was aborted or closed while the group shrank")
        for other in self._members.values():
            other.hear()
        lost = [new for new, other in self._members.items() if other.ended]
        if lost and self._store is not None:
            with contextlib.suppress(RuntimeError):  # the coordinator has ended, and its Store
                return [] if self._store.check(["complete"]) else lost
        return lost

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (*self._probes.values(), *self._members.values()):
            connection.close()

    def _take_part(self, settles: bool) -> dict[str, Any]:
        self._check_member()
        lower = self._ranks[: self._ranks.index(self._rank)]
        for rank in lower:  # all at once, because a lost host takes seconds
            self._probes[rank] = self._listener.connect(rank)
        for rank in lower:
            answer = self._ask(rank, settles)
            if answer is not None:
                break
        else:
            answer = self._coordinate(settles)
        if "timeout" in answer:
            raise Timeout(answer["timeout"], rank=answer["rank"], operation="shrink")
        if "unusable" in answer:
            raise GroupUnusable(answer["unusable"])
        return answer

    def _wait(self, watched: Sequence[Connection], deadline: Deadline) -> None:
        """Waits until something arrives, but only for a moment."""
        with deadline.slice(), contextlib.suppress(ValueError):  # another thread closes sockets
            arrivals = select.poll()
            if not self._listener.lacks_descriptors:
                arrivals.register(self._listener.socket, select.POLLIN)
            for connection in watched:
                arrivals.register(connection, select.POLLIN)
            arrivals.poll(_LOOK_EVERY)
        self._check_member()

    def _ask(self, rank: int, settles: bool) -> dict[str, Any] | None:
        """The answer of a rank as the coordinator; None if the rank is not the coordinator."""
        if rank in self._left_out:
            return None
        listener, deadline = self._listener, Deadline(self._patience + _PATIENCE_FOR_ANSWERS)
        coordinator = self._probes[rank]
        while not (coordinator.ended or coordinator.unreachable):
            if coordinator.established and not coordinator.spoken:
                coordinator.say(
                    {
                        "token": listener.addresses[rank][2],
                        "rank": self._rank,
                        "failed": self._alarm,
                        "settles": settles,
                        "decided": [listener.decisions, listener.outcome],
                        "mine": self._mine,
                    }
                )
            coordinator.hear()
            if coordinator.said is not None:
                self._members = {0: coordinator}
                return dict(coordinator.said)
            try:
                self._wait([coordinator] if coordinator.spoken else [], deadline)
            except TimeoutError:
                return _overdue([rank], self._ranks)
        return None

    def _coordinate(self, settles: bool) -> dict[str, Any]:
        """Waits for all others, and answers them; returns the answer for this rank."""
        listener, deadline = self._listener, Deadline(self._patience)
        waiting = listener.waiting
        while True:
            self._receive()
            missing, unreachable = self._absent()
            last = self._last_decision()
            settling = [
                rank
                for rank, other in waiting.items()
                if other.said["settles"] and (not missing or other.said["decided"][0] < last[0])
            ]
            for rank in settling:
                self._answer(rank, {"decided": last}).close()
            if settles and (not missing or listener.decisions < last[0]):
                return {"decided": last}
            if not missing and not settling:
                return self._decide(unreachable)
            try:
                self._wait(list(waiting.values()), deadline)
            except TimeoutError:
                return self._refuse(_overdue(missing, self._ranks), settles)

    def _receive(self) -> None:
        """Adds ranks that have come, and removes ranks that have gone."""
        listener, waiting = self._listener, self._listener.waiting
        strangers, listener.strangers = listener.strangers, []
        for connection in strangers:
            rank = listener.rank_of(connection)
            if rank is None or rank == self._rank:
                listener.strangers.append(connection)
            elif rank in self._left_out or rank not in self._ranks:
                connection.turn_away()
            else:
                if rank in waiting:
                    waiting[rank].close()
                waiting[rank] = connection
        for rank, connection in list(waiting.items()):
            connection.hear()
            if connection.ended:
                waiting.pop(rank).close()

    def _absent(self) -> tuple[list[int], list[int]]:
        """The ranks that have not come yet, and the ranks whose hosts do not answer."""
        missing, unreachable = [], []
        for rank in self._ranks:
            if rank == self._rank or rank in self._listener.waiting:
                continue
            if rank not in self._probes:
                self._probes[rank] = self._listener.connect(rank)
            probe = self._probes[rank]
            if probe.established:
                self._alert(rank, probe)
                probe.hear()
            if probe.unreachable:
                unreachable.append(rank)
            elif not probe.ended and not (rank in self._left_out and probe.established):
                missing.append(rank)
        return missing, unreachable

    def _alert(self, rank: int, probe: Connection) -> None:
        """Tells a rank, once, that the group has failed, which it may not know."""
        if self._alarm.word and not probe.spoken and rank not in self._left_out:
            probe.say({"token": self._listener.addresses[rank][2], "failed": self._alarm})

    def _doubtful(self) -> list[int]:
        """The rank that did not answer, if it lives: it may blame the others for the timeout."""
        alive = (rank for rank in self._unresponsive if rank in self._probes)
        return [rank for rank in alive if self._probes[rank].established]

    def _last_decision(self) -> list[Any]:
        """The last decision that any survivor knows, and its outcome."""
        known = [[self._listener.decisions, self._listener.outcome]]
        known += [other.said["decided"] for other in self._listener.waiting.values()]
        return max(known)

    def _decide(self, unreachable: list[int]) -> dict[str, Any]:
        """Answers all with the members of the smaller group."""
        waiting = self._listener.waiting
        members = sorted([self._rank, *waiting])
        others = sorted({*unreachable, *self._doubtful()})  # these may continue by themselves
        numbers = [self._ranks.index(rank) for rank in others]
        if (len(members), -members[0]) < (len(others), -min(others, default=0)):
            why = "group cannot shrink: ranks {} cannot be reached or do not answer, but may run"
            return self._refuse({"unusable": why.format(numbers)}, settles=False)
        self._tell_left_out()
        everyone = [
            waiting[rank].said["mine"] if rank in waiting else self._mine for rank in members
        ]
        host = self._listener.addresses[self._rank][0]
        store, port = serve(host, self._patience)
        store.set("everyone", json.dumps(everyone))
        self._store = self._listener.store = store
        decided = self._last_decision()
        answer = {"members": members, "store": [host, port], "decided": decided}
        self._members = {
            new: self._answer(rank, answer) for new, rank in enumerate(members) if new > 0
        }
        return answer

    def _tell_left_out(self) -> None:
        """Tells live ranks, at their listeners, that they are left out."""
        for rank in self._left_out & self._probes.keys():
            if self._probes[rank].established:
                self._probes[rank].turn_away(self._listener.addresses[rank][2])

    def _refuse(self, answer: dict[str, Any], settles: bool) -> dict[str, Any]:
        """Answers ranks that wait for the same thing as this rank."""
        for rank, other in list(self._listener.waiting.items()):
            if other.said["settles"] or not settles:
                self._answer(rank, answer).close()
        return answer

    def _answer(self, rank: int, answer: object) -> Connection:
        other = self._listener.waiting.pop(rank)
        other.say(answer)
        return other


def _overdue(missing: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """The answer if ranks do not come."""
    who = " and ".join(f"rank {ranks.index(rank)}" for rank in missing)
    return {
        "timeout": f"shrinking: {who} did not take part before the timeout",
        "rank": ranks.index(missing[0]) if missing else -1,
    }


# The survival of a group that spans nodes.

Kind = TypeVar("Kind")


class Survivors(Generic[Kind]):
    """Decides and shrinks over the listeners, for one rank of a group.

    Args:
        listener: the listener of this rank.
        rank: this rank.
        ranks: all ranks of the group, and `rank`, by their numbers at the listener.
        mine: this rank's introduction (pycomm/_runtime/rendezvous.py).
        make: makes the smaller group from this rank's membership and the ranks.
    """

    def __init__(
        self,
        listener: Listener,
        rank: int,
        ranks: Sequence[int],
        mine: Mapping[str, Any],
        make: Callable[[RendezvousResult, list[int]], Kind],
    ) -> None:
        self.listener, self._rank, self._ranks = listener, rank, ranks
        self._mine, self._make = mine, make

    def decide(self, core: _C.Group, ready: bool, patience: float) -> bool:
        """See :meth:`pycomm.Group.should_commit`."""
        listener = self.listener
        number, unready = listener.decisions + 1, host.tensor(not ready, dtype=torch.float32)
        at, operation = unready.data_ptr(), operation_of("all_reduce", "auto", unready.dtype, "max")
        try:
            core.run(operation, 1, at, at, None, "should_commit")
            outcome = unready.item() == 0
        except CollectiveError:
            try:
                with self._agreement(core.unresponsive, (), patience, core.ended_by) as agreement:
                    known = agreement.outcome(number)
            except BaseException:  # the others' decision is unknown: this rank cannot continue
                listener.close()
                raise
            if known is None:
                raise
            core.raise_again()
            outcome = known
        listener.decisions, listener.outcome = number, outcome
        return outcome

    def shrink(
        self, culprit: int, exclude: Collection[int], patience: float, word: int = 0
    ) -> Kind:
        """See :meth:`pycomm.Group.shrink`.

        Args:
            culprit: the rank that has ended the group because it did not answer, or -1.
            exclude: ranks that are left out although they may live.
            patience: seconds to wait for live ranks that do not come.
            word: the abort word of the group; 0 if it is not known.
        """
        deadline = Deadline(patience)
        while True:
            with self._agreement(culprit, exclude, deadline.left(), word) as agreement:
                try:
                    store, ranks, everyone = agreement.members(self._mine)
                except PycommError:
                    raise
                except RuntimeError as error:  # the coordinator has ended
                    if deadline.over():
                        raise Timeout(f"shrinking: no time is left ({error})") from error
                    continue
                index = ranks.index(self._rank)
                try:
                    members = set_up(store, index, everyone, deadline, agreement.lost)
                    return self._make(members, ranks)
                except CollectiveError:  # a member has ended
                    if deadline.over():
                        raise

    def _agreement(
        self, culprit: int, exclude: Collection[int], patience: float, word: int
    ) -> Agreement:
        self.listener.take_over()
        unresponsive = [self._ranks[culprit]] if culprit >= 0 else []
        excluded = [self._ranks[rank] for rank in exclude]
        return Agreement(
            self.listener, self._rank, self._ranks, unresponsive, excluded, patience, word
        )
