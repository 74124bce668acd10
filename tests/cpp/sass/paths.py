"""Ways through loops that move given bytes: which of many branches a hot loop takes.

A kernel serves many storages, alignments and options, each by a branch of its own. What a way
reads and writes tells which of them it serves. Of the ways that serve the same, the one that loads
most at once was written for speed. Of these, the one with the fewest instructions leaves out what
is rare, such as the slow parts of a division. A function that is called is part of the way. An
inner loop runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sass.flow import Flow, Loop
from sass.listing import Instruction


@dataclass(frozen=True)
class Wanted:
    """What a way does.

    Attributes:
        loads: bytes that a thread loads.
        stores: bytes that it stores.
        slack: how many more of each there may be.
        least: accesses of fewer bytes are not data.
        work: an opcode that is on the way, so that no shortcut is taken for the whole.
        times: how often.
    """

    loads: int
    stores: int
    slack: int = 0
    least: int = 4
    work: str = ""
    times: int = 0

    def is_data(self, one: Instruction) -> bool:
        """True for a load or store of elements."""
        return one.width >= self.least and not one.is_strong and (one.is_load or one.is_store)


class Done(NamedTuple):
    """What has been done on a way so far."""

    loaded: int = 0
    stored: int = 0
    worked: int = 0


# A way: the chain before it, or None, and a list of instructions or a called function's chain.
Chain = tuple[Any, Any]
Ways = dict[Done, tuple[int, Chain]]  # with the number of instructions


class Paths:
    """Finds ways through the functions of one kernel."""

    def __init__(self, flows: Mapping[str, Flow], wanted: Wanted) -> None:
        self._flows = flows
        self._wanted = wanted
        self._through: dict[str, Ways] = {}

    def best(self, flow: Flow) -> list[Instruction] | None:
        """The best way through one iteration of a loop of a function; None if there is none.

        If the function that loads is called, the call counts as the block that loads.
        """
        loads = {i: self._at_once(flow.blocks[i].code) for i in flow.order}
        for most in sorted({count for count in loads.values() if count}, reverse=True):
            through = [i for i, count in loads.items() if count == most]
            found = [way for loop in flow.loops() for way in self._of_loop(flow, loop, through)]
            if found:
                return list(_instructions(min(found, key=lambda way: way[0])[1]))
        return None

    def _of_loop(self, flow: Flow, loop: Loop, through: list[int]) -> Iterator[tuple[int, Chain]]:
        """The wanted ways through a loop and through one of some blocks."""
        wanted, latches = self._wanted, flow.latches(loop)
        least = Done(wanted.loads, wanted.stores, wanted.times)
        for number in through:
            if number in loop.blocks:
                edges = flow.ways_through(loop, number)
                for done, way in self._ways(flow, loop.header, edges, latches).items():
                    if all(is_ >= must for is_, must in zip(done, least, strict=True)):
                        yield way

    def _called(self, name: str) -> Ways:
        """The ways through a function that is called."""
        if name not in self._through:
            flow = self._flows.get(name)
            self._through[name] = {}  # a function that calls itself has none
            if flow is not None:
                self._through[name] = self._ways(flow, 0, flow.edges(), flow.exits())
        return self._through[name]

    def _ways(
        self, flow: Flow, first: int, edges: set[tuple[int, int]], last: frozenset[int]
    ) -> Ways:
        at: dict[int, Ways] = {first: {Done(): (0, (None, []))}}
        ended: Ways = {}
        for number in flow.order:
            if number not in at:
                continue
            code = flow.blocks[number].code
            ways = self._joined(at.pop(number), {self._of(code): (len(code), (None, code))})
            if code[-1].name == "CALL" and code[-1].target not in flow.function.labels:
                ways = self._joined(ways, self._called(code[-1].target))
            if number in last:
                _merge(ended, ways)
            for follower in flow.forward[number]:
                if (number, follower) in edges:
                    _merge(at.setdefault(follower, {}), ways)
        return ended

    def _of(self, code: list[Instruction]) -> Done:
        wanted = self._wanted
        data = [one for one in code if wanted.is_data(one)]
        loaded = sum(one.width for one in data if one.is_load)
        stored = sum(one.width for one in data if one.is_store)
        worked = sum(one.opcode.startswith(wanted.work) for one in code) if wanted.work else 0
        return Done(loaded, stored, worked)

    def _at_once(self, code: list[Instruction]) -> int:
        """The bytes that a block loads, or at most a block of a function that it calls."""
        own = self._of(code).loaded
        called = self._flows.get(code[-1].target) if code[-1].name == "CALL" else None
        blocks = called.blocks if called is not None else []
        return max([own, *(self._of(block.code).loaded for block in blocks)])

    def _joined(self, ways: Ways, others: Ways) -> Ways:
        """Each way with each of the others after it, unless they do more than is wanted."""
        wanted = self._wanted
        made: Ways = {}
        for one, (count, chain) in ways.items():
            for more, (more_count, more_chain) in others.items():
                loaded, stored = one.loaded + more.loaded, one.stored + more.stored
                if max(loaded - wanted.loads, stored - wanted.stores) <= wanted.slack:
                    worked = min(one.worked + more.worked, wanted.times)
                    done = Done(loaded, stored, worked)
                    _merge(made, {done: (count + more_count, (chain, more_chain))})
        return made


def _merge(into: Ways, ways: Ways) -> None:
    for done, way in ways.items():
        if done not in into or way[0] < into[done][0]:
            into[done] = way


def _instructions(chain: Chain) -> Iterator[Instruction]:
    pieces: list[list[Instruction]] = []
    waiting: list[Any] = [chain]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            pieces.append(one)
        elif one is not None:
            waiting += one  # what is last is taken first
    for piece in reversed(pieces):
        yield from piece
