"""Checks small concurrent programs against the PTX memory model, by enumeration.

The axioms are those of "Memory Consistency Model" in the PTX ISA, in the form of Lustig,
Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS
2019). A program is a few threads without branches. What a thread does after it has waited for a
flag is checked under the condition that its load of the flag has returned what it waits for.

In the paper, barriers are fences, too. Here they are not, so this model forbids less.

Relations are lists of bit sets: bit b of ``r[a]`` is set if event a is related to event b.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Relation = list[int]

# Scopes, from narrow to wide. A weak operation is as strong as one whose scope is its own thread.
WEAK, BLOCK, GPU, SYSTEM = range(4)


@dataclass(frozen=True, eq=False)
class Event:
    """One operation of a thread; an atomic addition is a read and a write.

    Attributes:
        kind: ``read``, ``write``, ``fence``, ``arrive`` or ``leave`` (a barrier's halves).
        order: ``relaxed``, ``acquire``, ``release``, ``acq_rel`` or ``sc``; it matters for strong
            operations and fences.
        where: the location, or the barrier's name.
        value: of a write; None if it adds 1 to what ``reads`` has read.
    """

    number: int
    thread: Thread
    kind: str
    where: str = ""
    order: str = "relaxed"
    scope: int = WEAK
    value: int | None = None
    reads: Event | None = None


@dataclass(eq=False)
class Thread:
    """A thread of a program; its methods append operations in program order."""

    program: Program
    gpu: int
    block: int

    def store(self, where: str, value: int, scope: int = WEAK, *, order: str = "relaxed") -> Event:
        """Appends a store."""
        return self.program.add(self, "write", where, order, scope, value)

    def load(self, where: str, scope: int = WEAK, *, order: str = "relaxed") -> Event:
        """Appends a load."""
        return self.program.add(self, "read", where, order, scope)

    def add(self, where: str, scope: int) -> Event:
        """Appends a relaxed atomic addition of 1; returns its read."""
        read = self.program.add(self, "read", where, "relaxed", scope)
        self.program.add(self, "write", where, "relaxed", scope, reads=read)
        return read

    def fence(self, scope: int, *, order: str = "sc") -> None:
        """Appends a fence: ``acq_rel`` or ``sc``, which is what __threadfence() is."""
        self.program.add(self, "fence", "", order, scope)

    def barrier(self, name: str) -> None:
        """Appends bar.sync; threads of a block meet at a barrier of the same name."""
        for kind in ("arrive", "leave"):
            self.program.add(self, kind, name, "relaxed", BLOCK)


@dataclass
class Outcome:
    """What all executions that meet a condition have in common.

    Attributes:
        values: each load's possible values.
        final: the possible last values of each location.
        races: locations with conflicting operations, not all strong, in no order of causality.
    """

    values: dict[Event, set[int]] = field(default_factory=dict)
    final: dict[str, set[int]] = field(default_factory=dict)
    races: set[str] = field(default_factory=set)


class Program:
    """Threads, and the executions that the model allows them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: list[Thread] = []

    def thread(self, gpu: int = 0, block: int = 0) -> Thread:
        """Adds a thread, of a block of a GPU."""
        self.threads.append(Thread(self, gpu, block))
        return self.threads[-1]

    def add(
        self, thread: Thread, kind: str, where: str, order: str, scope: int,
        value: int | None = None, reads: Event | None = None,
    ) -> Event:  # fmt: skip
        """Appends an operation to a thread."""
        event = Event(len(self.events), thread, kind, where, order, scope, value, reads)
        self.events.append(event)
        return event

    def run(self, given: Mapping[Event, Collection[int]] | None = None) -> Outcome:
        """Goes through all executions in which the given loads return one of the given values."""
        outcome = Outcome()
        for execution in _executions(self.events, given or {}):
            for read, value in execution.values.items():
                outcome.values.setdefault(read, set()).add(value)
            for where, writes in execution.order.items():
                outcome.final.setdefault(where, set()).add(execution.written[writes[-1]])
            outcome.races |= execution.races()
        return outcome


def _executions(events: list[Event], given: Mapping[Event, Collection[int]]) -> Iterator[Execution]:
    """All consistent executions."""
    reads = [event for event in events if event.kind == "read"]
    fences = [event for event in events if event.kind == "fence" and event.order == "sc"]
    writes: dict[str, list[Event]] = {}
    for event in events:
        if event.kind == "write":
            writes.setdefault(event.where, []).append(event)
    sources = [[None, *writes.get(read.where, [])] for read in reads]
    for chosen in itertools.product(*sources):
        source = dict(zip(reads, chosen, strict=True))
        written = _values(events, source)
        if written is None:  # additions that read from each other in a circle
            continue
        values = {read: 0 if write is None else written[write] for read, write in source.items()}
        if any(values[read] not in allowed for read, allowed in given.items()):
            continue
        for coherent in itertools.product(*map(itertools.permutations, writes.values())):
            for sc in itertools.permutations(fences):
                order = dict(zip(writes, coherent, strict=True))
                execution = Execution(events, source, order, sc, written, values)
                if execution.is_consistent():
                    yield execution


def _values(events: list[Event], source: Mapping[Event, Event | None]) -> dict[Event, int] | None:
    """What every write writes, or None if that cannot be."""
    written = {e: e.value for e in events if e.kind == "write" and e.value is not None}
    additions = {e: source[e.reads] for e in events if e.kind == "write" and e.reads is not None}
    while additions:
        known = [e for e, origin in additions.items() if origin is None or origin in written]
        if not known:
            return None
        for event in known:
            origin = additions.pop(event)
            written[event] = 1 + (0 if origin is None else written[origin])
    return written


class Execution:
    """One execution: what each load reads from, and the order of stores and fences.

    Attributes:
        source: the write that each read reads from; None for the initial value.
        order: the writes to each location, in coherence order.
    """

    def __init__(
        self, events: list[Event], source: Mapping[Event, Event | None],
        order: Mapping[str, Sequence[Event]], sc: Sequence[Event],
        written: Mapping[Event, int], values: Mapping[Event, int],
    ) -> None:  # fmt: skip
        self.events = events
        self.source = source
        self.order = order
        self.written = written
        self.values = values
        self.po = self._where(lambda a, b: a.thread is b.thread and a.number < b.number)
        self.po_loc = self._where(lambda a, b: a.where == b.where != "" and self._po(a, b))
        self.strong = self._where(_morally_strong)
        self.rf = self._pairs((w, r) for r, w in source.items() if w is not None)
        self.co = self._pairs(
            pair for writes in order.values() for pair in itertools.combinations(writes, 2)
        )
        self.fr = self._where(self._from_read)
        self.sc = self._pairs(
            (a, b) for a, b in itertools.combinations(sc, 2) if _morally_strong(a, b)
        )
        self.cause = self._causality()

    def is_consistent(self) -> bool:
        """True if no axiom is violated."""
        communication = _union(self.rf, self.co, self.fr)
        additions = self._pairs((e.reads, e) for e in self.events if e.reads is not None)
        between = _then(_both(self.fr, self.strong), _both(self.co, self.strong))
        return (
            _acyclic(_union(_both(communication, self.strong), self.po_loc))
            and not any(_both(between, additions))
            and _acyclic(_union(self.rf, additions))
            and all(c & ~o == 0 for c, o in zip(self._overwritten(), self.co, strict=True))
            and _irreflexive(self.cause)
            and _irreflexive(_then(_union(self.fr, self.rf), self.cause))
        )

    def races(self) -> set[str]:
        """Locations where a weak operation conflicts with another, and causality orders neither."""
        found = set()
        halves = {event.reads for event in self.events}  # the write stands for an addition
        accesses = [event for event in self.events if event not in halves]
        for a, b in itertools.combinations(accesses, 2):
            if a.where != b.where or "write" not in (a.kind, b.kind) or _morally_strong(a, b):
                continue
            if not (self._has(self.cause, a, b) or self._has(self.cause, b, a)):
                found.add(a.where)
        return found

    def _causality(self) -> Relation:
        """Causality order: its base, and what is observed before something of the base."""
        additions = self._pairs((e.reads, e) for e in self.events if e.reads is not None)
        observed = _closure(_both(self.rf, self.strong))
        observed = _closure(_union(observed, _then(_then(observed, additions), observed)))
        begins = self._where(self._is_release)
        ends = self._where(self._is_acquire)
        synchronized = _both(_then(_then(begins, observed), ends), self.strong)
        meets = self._where(
            lambda a, b: (
                (a.kind, b.kind) == ("arrive", "leave")
                and a.where == b.where
                and a.thread.gpu == b.thread.gpu
                and a.thread.block == b.thread.block
            )
        )
        steps = _union(synchronized, meets, self.sc)
        po_or_same = _union(self.po, self._where(lambda a, b: a is b))
        base = _closure(_then(_then(po_or_same, steps), po_or_same))
        base = _union(base, self.po)
        return _union(base, _then(observed, _union(self.po_loc, base)))

    def _is_release(self, a: Event, b: Event) -> bool:
        """A release pattern on b's location begins with a and ends with the write b."""
        if b.kind != "write" or not (a is b or self._po(a, b)):
            return False
        if a.kind == "fence":
            return True
        return a.kind == "write" and a.order == "release" and a.where == b.where

    def _is_acquire(self, a: Event, b: Event) -> bool:
        """An acquire pattern on a's location begins with the read a and ends with b."""
        if a.kind != "read" or not (a is b or self._po(a, b)):
            return False
        if b.kind == "fence":
            return True
        return b.kind == "read" and b.order == "acquire" and a.where == b.where

    def _from_read(self, a: Event, b: Event) -> bool:
        if a.kind != "read" or b.kind != "write" or a.where != b.where or b.reads is a:
            return False
        origin = self.source[a]
        return origin is None or (origin is not b and self._has(self.co, origin, b))

    def _overwritten(self) -> Relation:
        return _both(
            self.cause,
            self._where(lambda a, b: a.kind == b.kind == "write" and a.where == b.where),
        )

    def _po(self, a: Event, b: Event) -> bool:
        return a.thread is b.thread and a.number < b.number

    def _has(self, relation: Relation, a: Event, b: Event) -> bool:
        return bool(relation[a.number] >> b.number & 1)

    def _where(self, holds: Callable[[Event, Event], bool]) -> Relation:
        return [sum(1 << b.number for b in self.events if holds(a, b)) for a in self.events]

    def _pairs(self, pairs: Iterable[tuple[Event, Event]]) -> Relation:
        relation = [0] * len(self.events)
        for a, b in pairs:
            relation[a.number] |= 1 << b.number
        return relation


def _morally_strong(a: Event, b: Event) -> bool:
    return a.thread is b.thread or (_reaches(a, b.thread) and _reaches(b, a.thread))


def _reaches(event: Event, thread: Thread) -> bool:
    """True if the operation's scope includes the thread."""
    mine = event.thread
    return (
        event.scope == SYSTEM
        or (event.scope == GPU and thread.gpu == mine.gpu)
        or (event.scope == BLOCK and (thread.gpu, thread.block) == (mine.gpu, mine.block))
    )


def _union(*relations: Relation) -> Relation:
    return [functools.reduce(operator.or_, rows) for rows in zip(*relations, strict=True)]


def _both(first: Relation, second: Relation) -> Relation:
    return [a & b for a, b in zip(first, second, strict=True)]


def _then(first: Relation, second: Relation) -> Relation:
    composed = []
    for row in first:
        reached = 0
        while row:
            lowest = row & -row
            reached |= second[lowest.bit_length() - 1]
            row ^= lowest
        composed.append(reached)
    return composed


def _closure(relation: Relation) -> Relation:
    closed = list(relation)
    for middle in range(len(closed)):
        for a, row in enumerate(closed):
            if row >> middle & 1:
                closed[a] |= closed[middle]
    return closed


def _irreflexive(relation: Relation) -> bool:
    return not any(row >> a & 1 for a, row in enumerate(relation))


def _acyclic(relation: Relation) -> bool:
    return _irreflexive(_closure(relation))
