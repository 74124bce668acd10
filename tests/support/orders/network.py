"""The network between the ranks, with everything that is under way."""

from __future__ import annotations

import errno
from collections.abc import Hashable, Iterator
from typing import Any

from orders.life import FIRST, UNLIMITED, Scenario
from orders.replay import GO, Point, Request

Connection = tuple[int, int, int]  # who connects, to whom, and how often before
CONNECTED = True  # what both ends of a connection see first


class Broken(AssertionError):
    """A promise is broken."""


class World:
    """The states of all ranks and of the network between them.

    Attributes:
        points: the state of each rank; None if it has died.
        inbox: for each open end (rank, connection), what has been sent there: texts and errors.
        listening: the ranks that can be connected to.
        stores: the contents of each Store, by its port; None if it is gone.
        groups: the members of each group.
        entered: operations that ranks have entered: (group, number, rank, value).
        broken: groups whose operations fail.
        outcomes: what ranks know of decisions.
        latest: the group in which each rank has last completed an operation.
        slow: ends of connections where something is delayed.
        deaths, timeouts, preemptions, delays: how many may still happen.
    """

    __slots__ = (
        "broken",
        "deaths",
        "delays",
        "entered",
        "groups",
        "inbox",
        "latest",
        "listening",
        "outcomes",
        "points",
        "preemptions",
        "scenario",
        "slow",
        "stores",
        "timeouts",
    )

    def __init__(self, scenario: Scenario, points: tuple[Point, ...]) -> None:
        self.scenario, self.points = scenario, points
        self.inbox: dict[tuple[int, Connection], tuple[Any, ...]] = {}
        self.listening = frozenset(range(scenario.ranks))
        self.stores: dict[int, dict[str, Any] | None] = {}
        self.groups = {FIRST: tuple(range(scenario.ranks))}
        self.entered: frozenset[Any] = frozenset()
        self.broken: frozenset[int] = frozenset()
        self.outcomes: frozenset[Any] = frozenset()
        self.latest = (FIRST,) * scenario.ranks
        self.deaths, self.timeouts = scenario.deaths, scenario.timeouts
        self.preemptions, self.delays = scenario.preemptions, scenario.delays
        self.slow: frozenset[tuple[int, Connection]] = frozenset()

    def copy(self) -> World:
        """Another one that may change."""
        other = World.__new__(World)
        for name in World.__slots__:
            setattr(other, name, getattr(self, name))
        other.inbox, other.stores = dict(self.inbox), dict(self.stores)
        other.groups = dict(self.groups)
        return other

    def key(self) -> Hashable:
        """Equal for equal worlds."""
        stores = self.stores.items()
        return (
            self.points,
            frozenset(self.inbox.items()),
            self.listening,
            frozenset(
                (port, None if kept is None else frozenset(kept.items())) for port, kept in stores
            ),
            frozenset(self.groups.items()),
            self.entered,
            self.broken,
            self.outcomes,
            self.latest,
            self.slow,
            (self.deaths, self.timeouts, self.preemptions, self.delays),
        )

    # What ranks do.

    def apply(self, rank: int, effect: tuple[Any, ...]) -> None:
        """Does what a rank does."""
        getattr(self, "_" + effect[0].replace(" ", "_"))(rank, *effect[1:])

    def _connect(self, rank: int, connection: Connection) -> None:
        other = connection[1]
        if other in self.listening:
            self.inbox[rank, connection] = self.inbox[other, connection] = (CONNECTED,)
        else:
            self.inbox[rank, connection] = (errno.ECONNREFUSED,)

    def _send(self, rank: int, connection: Connection, text: str) -> None:
        self._put(rank, connection, text)

    def _close(self, rank: int, connection: Connection) -> None:
        if self.inbox.pop((rank, connection), None) is not None:
            self._put(rank, connection, 0)

    def _put(self, rank: int, connection: Connection, item: Any) -> None:
        """Sends to the other end, if that is open."""
        end = (connection[rank == connection[0]], connection)
        if end in self.inbox:
            self.inbox[end] += (item,)

    def _close_listener(self, rank: int) -> None:
        self.listening -= {rank}
        self.outcomes = frozenset(each for each in self.outcomes if each[0] != rank)
        for end, connection in list(self.inbox):
            if end == connection[1] == rank and CONNECTED in self.inbox[end, connection]:
                self._close(rank, connection)  # that it has not accepted
        for port in self.stores:
            if port // 100 - 1 == rank:
                self.stores[port] = None

    def _open_store(self, rank: int, port: int) -> None:
        self.stores[port] = {}

    def _member(self, rank: int, group: int, ranks: tuple[int, ...]) -> None:
        if self.groups.setdefault(group, ranks) != ranks:
            raise Broken(f"a group has members {ranks} and {self.groups[group]}")
        if rank not in ranks:
            raise Broken(f"rank {rank} is no member of its group of {ranks}")
        if any(self.points[other] is None for other in ranks):
            self.broken |= {group}

    def _blame(self, rank: int, other: int) -> None:
        if other in self.listening:
            raise Broken(f"rank {rank} takes rank {other} for dead, which lives")

    def _enter(self, rank: int, group: int, number: int, value: float) -> None:
        self.entered |= {(group, number, rank, value)}

    def _break(self, rank: int, group: int) -> None:
        self.broken |= {group}

    def _decided(self, rank: int, group: int, number: int, outcome: bool | None) -> None:
        for other, *which, found in self.outcomes:
            if which == [group, number] and found != outcome:
                raise Broken(f"a decision is {found} on rank {other}, {outcome} on rank {rank}")
        self.outcomes |= {(rank, group, number, outcome)}

    def die(self, rank: int) -> World:
        """This world once the rank has died."""
        dead = self.copy()
        dead.deaths -= 1
        dead.points = (*self.points[:rank], None, *self.points[rank + 1 :])
        dead._close_listener(rank)
        for end, connection in self.inbox:
            if end == rank:
                dead._close(rank, connection)
        dead.broken |= {group for group, members in self.groups.items() if rank in members}
        return dead

    # What the network may answer.

    def answers(self, rank: int, request: Request) -> Iterator[tuple[Hashable, World]]:
        """Everything that it may answer, and the world after the answer."""
        yield from getattr(self, "_on_" + request[0])(rank, *request[1:])

    def _on_begin(self, rank: int) -> Iterator[tuple[Hashable, World]]:
        yield GO, self

    def _on_read(self, rank: int, connection: Connection) -> Iterator[tuple[Hashable, World]]:
        queue = self.inbox[rank, connection]
        first = 1 if queue[:1] == (CONNECTED,) else 0
        if queue[first:]:
            yield self._taken(rank, connection, first)
        yield from self._not_yet(rank, connection, bool(queue[first:]))

    def _on_writable(self, rank: int, connection: Connection) -> Iterator[tuple[Hashable, World]]:
        queue = self.inbox[rank, connection]
        if queue[0] is not CONNECTED:
            yield self._taken(rank, connection, 0)  # refused
        else:
            yield 0, self._taken(rank, connection, 0)[1]
            if queue[1:] == (0,):  # it had ended before the request came
                yield errno.ECONNREFUSED, self._taken(rank, connection, 1)[1]
        yield from self._not_yet(rank, connection, True)

    def _on_accept(self, rank: int) -> Iterator[tuple[Hashable, World]]:
        for end, connection in sorted(self.inbox):
            if end == connection[1] == rank and CONNECTED in self.inbox[end, connection]:
                yield connection, self._taken(rank, connection, 0)[1]
                if (rank, connection) not in self.slow:
                    yield from self._not_yet(rank, connection, True)
                    return
        yield None, self

    def _taken(self, rank: int, connection: Connection, at: int) -> tuple[Any, World]:
        """The item of a queue, and the world without it and those before it."""
        after = self.copy()
        queue = self.inbox[rank, connection]
        after.inbox[rank, connection] = queue[at + 1 :]
        after.slow -= {(rank, connection)}
        return queue[at], after

    def _not_yet(
        self, rank: int, connection: Connection, sent: bool
    ) -> Iterator[tuple[Hashable, World]]:
        """Nothing has arrived. If something has been sent, that is a delay."""
        if not sent or (rank, connection) in self.slow:
            yield None, self
        elif self.delays:
            after = self.copy()
            after.delays -= after.delays < UNLIMITED
            after.slow |= {(rank, connection)}
            yield None, after

    def _on_wait(self, rank: int) -> Iterator[tuple[Hashable, World]]:
        yield GO, self
        if self.timeouts:
            after = self.copy()
            after.timeouts -= after.timeouts < UNLIMITED
            yield "time", after

    def _on_join(self, rank: int, port: int) -> Iterator[tuple[Hashable, World]]:
        yield self.stores[port] is not None, self

    def _on_store(
        self, rank: int, port: int, verb: str, key: str, value: Any = None
    ) -> Iterator[tuple[Hashable, World]]:
        kept = self.stores[port]
        if kept is None:
            yield None, self
        elif verb == "check":
            yield key in kept, self
        elif verb == "get":
            yield kept[key], self
        else:
            if verb == "add":
                value += kept.get(key, 0)
            elif verb == "compare_set":
                value = kept.get(key, value)
            after = self.copy()
            after.stores[port] = {**kept, key: value}
            yield value, after

    def _on_operate(self, rank: int, group: int, number: int) -> Iterator[tuple[Hashable, World]]:
        values = {r: v for g, n, r, v in self.entered if (g, n) == (group, number)}
        if len(values) == len(self.groups[group]):
            yield max(values.values()), self._gone_on(rank, group)
        if group in self.broken:
            yield "failed", self

    def _gone_on(self, rank: int, group: int) -> World:
        """The world after an operation. Of two ranks that go on, one knows of the other's group."""
        after, members = self.copy(), self.groups[group]
        after.latest = (*self.latest[:rank], group, *self.latest[rank + 1 :])
        for other, latest in enumerate(self.latest):
            if self.points[other] is not None and FIRST not in (latest, group):
                theirs = self.groups[latest]
                if rank not in theirs and other not in members:
                    raise Broken(f"both {members} and {theirs} go on")
        return after

    def _on_rest(self, rank: int, group: int) -> Iterator[tuple[Hashable, World]]:
        if group in self.broken:
            yield "failed", self

    def _on_end(self, *_: object) -> Iterator[tuple[Hashable, World]]:
        return iter(())
