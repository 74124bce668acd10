"""Visits every state that the ranks and the network between them can come to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from orders.fakes import installed
from orders.life import UNLIMITED, Life, Scenario
from orders.network import Broken, World
from orders.replay import YIELDS, Point, Rank

_MOST = 3_000_000  # states


@dataclass
class Found:
    """What a search has seen.

    Attributes:
        states: how many states.
        runs: how often a rank's code has run.
        ends: the ways in which all can end: for each rank its group or its error.
    """

    states: int
    runs: int
    ends: set[tuple[object, ...]]


def explore(scenario: Scenario) -> Found:
    """Visits every state.

    Raises:
        Broken: a promise is broken; with the steps that lead there.
    """
    with installed():
        return _Search(scenario).run()


class _Search:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        life = Life(scenario)
        self._ranks = [Rank(rank, life) for rank in range(scenario.ranks)]
        self._worlds: list[tuple[int, str]] = []  # how each was first come to: from where
        self._numbers: dict[Hashable, int] = {}
        self._before: list[list[int]] = []  # each world's predecessors
        self._ends: dict[int, tuple[object, ...]] = {}

    def run(self) -> Found:
        points = tuple(rank.first for rank in self._ranks)
        left = [(0, World(self._scenario, points))]
        self._note(left[0][1], 0, "")
        while left:
            number, world = left.pop()
            end = self._end(world)
            try:
                if end is not None:
                    self._ends[number] = self._checked(end)
                for label, after in self._successors(world):
                    new = len(self._worlds)
                    if self._note(after, number, label) == new:
                        left.append((new, after))
                        if new > _MOST:
                            raise MemoryError("too many states")
            except Broken as why:
                raise Broken(f"{why}\n{self._way(number)}") from None
        self._check_that_all_can_end()
        runs = sum(rank.runs for rank in self._ranks)
        return Found(len(self._worlds), runs, set(self._ends.values()))

    def _note(self, world: World, before: int, label: str) -> int:
        key = world.key()
        number = self._numbers.setdefault(key, len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append((before, label))
            self._before.append([])
        if number != before:
            self._before[number].append(before)
        return number

    def _successors(self, world: World) -> Iterator[tuple[str, World]]:
        for rank, point in enumerate(world.points):
            if point is None:
                continue
            if world.deaths:
                yield f"rank {rank} dies", world.die(rank)
            if rank not in self._scenario.absent:
                yield from self._steps(world, rank, point, f"rank {rank}:", True)

    def _steps(
        self, world: World, rank: int, point: Point, label: str, begins: bool
    ) -> Iterator[tuple[str, World]]:
        """What the rank may do until it waits, and its deaths meanwhile."""
        request = point.request
        if not begins:
            if request[0] in YIELDS or world.preemptions:
                stopped = world.copy()
                stopped.points = (*world.points[:rank], point, *world.points[rank + 1 :])
                if request[0] not in YIELDS:
                    stopped.preemptions -= stopped.preemptions < UNLIMITED
                yield label, stopped
            if request[0] in YIELDS:
                return
        for answer, after in world.answers(rank, request):
            effects, following = self._ranks[rank].advance(point, answer)
            if effects and after is world:
                after = world.copy()
            told = f"{label} {request[0]} {answer!r}" if answer not in (None, "go") else label
            for effect in effects:
                after.apply(rank, effect)
                told = f"{told} {effect}"
                if after.deaths:
                    yield f"{told} dies", after.die(rank)
            yield from self._steps(after, rank, following, told, False)

    def _end(self, world: World) -> tuple[object, ...] | None:
        """The ranks' groups or errors, if nothing more happens."""
        found: list[object] = []
        for rank, point in enumerate(world.points):
            if point is None:
                found.append("dead")
            elif rank in self._scenario.absent:
                found.append("absent")
            elif point.request[0] == "end":
                found.append(point.request[1])
            elif point.request[0] == "rest" and point.request[1] not in world.broken:
                found.append(world.groups[point.request[1]])
            else:
                return None
        return tuple(found)

    def _checked(self, end: tuple[object, ...]) -> tuple[object, ...]:
        """An end that keeps the promises."""
        groups = {found for found in end if isinstance(found, tuple)}
        errors = [found for found in end if isinstance(found, str) and ":" in found]
        if len(groups) > 1:
            raise Broken(f"two groups go on: {groups}")
        if errors and (self._scenario.calm or any("unexpected" in error for error in errors)):
            raise Broken(f"a rank that lives is not in a group: {errors}")
        return end

    def _check_that_all_can_end(self) -> None:
        left = list(self._ends)
        ending = set(left)
        while left:
            for before in self._before[left.pop()]:
                if before not in ending:
                    ending.add(before)
                    left.append(before)
        for number in range(len(self._worlds)):
            if number not in ending:
                raise Broken(f"some wait for ever\n{self._way(number)}")

    def _way(self, number: int) -> str:
        steps = []
        while number:
            number, label = self._worlds[number]
            steps.append(label)
        return "\n".join(reversed(steps))
