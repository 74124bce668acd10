"""The program of a rank: decisions, failures, and ever smaller groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orders import fakes
from orders.replay import Run
from pycomm._runtime.shrink import Survivors
from pycomm._runtime.sockets import Listener
from pycomm.errors import CollectiveError, PycommError, Timeout

FIRST = 0  # the group of all ranks
UNLIMITED = 1000
PATIENCE = 10.0


@dataclass(frozen=True)
class Scenario:
    """What may happen.

    Attributes:
        ranks: the number of ranks.
        deaths: how many of them may die.
        decisions: how many steps all decide on in the first group; if 0, they begin to shrink it.
        unready: ranks that are not ready to commit.
        blames: for each rank, the rank that did not answer, if it blames one.
        excluded: ranks that all others exclude.
        absent: ranks that live and do nothing.
        timeouts: how often a rank loses patience, however short it has waited.
        tries: how often a rank calls shrink() until it gives up.
        preemptions: how often another rank goes on although this one has not come to a wait.
        delays: how many messages come late, after others that were sent later.
    """

    ranks: int
    deaths: int = 0
    decisions: int = 0
    unready: Sequence[int] = ()
    blames: Mapping[int, int] = field(default_factory=dict)
    excluded: Sequence[int] = ()
    absent: Sequence[int] = ()
    timeouts: int = 0
    tries: int = 1
    preemptions: int = 0
    delays: int = 0

    @property
    def calm(self) -> bool:
        """True if nothing happens except deaths, so that all live ranks must go on."""
        return not (self.blames or self.excluded or self.absent or self.timeouts)


class Life:
    """The program, which is called for each run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def __call__(self, run: Run) -> None:
        """Lives until nothing is left to do."""
        fakes.use(run)
        ranks = range(self._scenario.ranks)
        listener = Listener("host")
        listener.addresses = [("host", rank, f"token {rank}") for rank in ranks]
        listener.token, listener.members = f"token {run.rank}", ranks
        try:
            self._live(run, listener)
        except PycommError as error:
            why = f"{type(error).__name__}: {error}"
        except Exception as error:
            why = f"unexpected: {error!r}"
        listener.close()
        run.ask("end", why)

    def _live(self, run: Run, listener: Listener) -> None:
        scenario, rank, tries = self._scenario, run.rank, self._scenario.tries
        exclude = [] if rank in scenario.excluded else list(scenario.excluded)
        core = fakes.Core(FIRST, scenario.blames.get(rank, -1))

        def make(store: fakes.Store, ranks: list[int]) -> tuple[fakes.Core, Survivors]:
            run.do("member", store.port, tuple(ranks))
            return fakes.Core(store.port), Survivors(listener, rank, ranks, mine, make)

        mine = {"pid": rank}
        survivors = Survivors(listener, rank, range(scenario.ranks), mine, make)
        decisions = scenario.decisions
        while True:
            if decisions:
                try:
                    for _ in range(decisions):
                        decided = False
                        outcome = survivors.decide(core, rank not in scenario.unready, PATIENCE)
                        run.do("decided", core.group, core.number, outcome)
                        decided = True
                    core.rest()
                except CollectiveError:
                    if listener.closed:
                        raise
                    if not decided:
                        run.do("decided", core.group, core.number, None)
            core.fail()
            while True:
                try:
                    core, survivors = survivors.shrink(
                        core.unresponsive, exclude, PATIENCE, core.ended_by
                    )
                    break
                except Timeout:
                    tries -= 1
                    if not tries:
                        raise
            exclude, decisions = [], 1
