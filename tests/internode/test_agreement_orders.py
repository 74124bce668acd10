"""The agreement of survivors in every order of events (tests/support/orders)."""

from unittest import mock

import pytest
from orders.life import UNLIMITED, Scenario
from orders.network import Broken
from orders.search import explore

from pycomm._runtime.shrink import Agreement
from pycomm._runtime.sockets import Listener

# Every order, and every delay.
TWO = [Scenario(2, deaths=1, decisions=2, delays=UNLIMITED, preemptions=UNLIMITED)]
DYING = Scenario(3, deaths=1)
DECIDING = Scenario(3, deaths=1, decisions=2, delays=1)
MANY = [DYING, Scenario(3, deaths=1, decisions=2), Scenario(3, deaths=2, decisions=1), Scenario(4)]
IMPATIENT = Scenario(3, deaths=1, decisions=2, timeouts=1)
# These take seconds each.
MORE = [
    Scenario(2, deaths=1, delays=UNLIMITED, preemptions=UNLIMITED),
    DECIDING,
    Scenario(4, delays=1),
    Scenario(3, deaths=1, delays=1),
    Scenario(3, deaths=1, preemptions=1),
]
ABSENT = Scenario(3, absent=[2], timeouts=UNLIMITED, tries=2)
EXCLUDED = Scenario(3, deaths=1, excluded=[0])
BLAMED = Scenario(3, blames={0: 2, 1: 2}, timeouts=1)
RIVALS = Scenario(2, blames={0: 1, 1: 0}, timeouts=1, preemptions=2)


def name(scenario):
    found = [f"{key}={value}" for key, value in vars(scenario).items() if value]
    return ",".join(found).replace("=1000", "=all")


def check_that_all_go_on(scenario):
    found, everyone = explore(scenario), tuple(range(scenario.ranks))
    assert (everyone,) * scenario.ranks in found.ends
    assert len(found.ends) > scenario.deaths * scenario.ranks


@pytest.mark.slow
@pytest.mark.parametrize("scenario", TWO + MANY, ids=name)
def test_all_that_live_go_on_together(scenario):
    check_that_all_go_on(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", MORE, ids=name)
def test_all_that_live_go_on_together_in_more_orders(scenario):
    check_that_all_go_on(scenario)


def test_a_rank_that_lives_and_does_not_come_is_not_left_out():
    for end in explore(ABSENT).ends:
        assert all("did not take part" in found for found in end[:2]), end


def test_an_excluded_rank_learns_it():
    for end in explore(EXCLUDED).ends:
        assert end[0] == "dead" or "without this rank" in end[0]


@pytest.mark.parametrize(
    "scenario", [BLAMED, RIVALS, pytest.param(IMPATIENT, marks=pytest.mark.slow)], ids=name
)
def test_impatient_ranks_do_not_go_on_without_each_other(scenario):
    assert len(explore(scenario).ends) > 1


def replaced(owner, attribute, fake):
    return mock.patch.object(owner, attribute, fake)


def without(attribute, value):
    """An Agreement in which a method returns this."""
    return replaced(Agreement, attribute, lambda *_: value)


def early_answers():
    absent = Agreement._absent
    return replaced(Agreement, "_absent", lambda self: ([], absent(self)[1]))


def ignoring_complete():
    def lost(self):
        for other in self._members.values():
            other.hear()
        return [new for new, other in self._members.items() if other.ended]

    return replaced(Agreement, "lost", lost)


def forgetting_who_has_gone():
    def receive(self):
        for stranger in self._listener.strangers:
            rank = self._listener.rank_of(stranger)
            if rank is not None:
                self._listener.waiting[rank] = stranger
        self._listener.strangers = []

    return replaced(Agreement, "_receive", receive)


MUTANTS = {
    "nobody watches members": (lambda: without("lost", []), DYING),
    "answers before all have come": (early_answers, DYING),
    "a member that has seen the end counts as lost": (
        ignoring_complete,
        Scenario(3, preemptions=1),
    ),
    "who has gone is a member": (forgetting_who_has_gone, DYING),
    "nobody remembers decisions": (lambda: without("_last_decision", [0, False]), DECIDING),
    "a blamed rank that lives may be ignored": (lambda: without("_doubtful", []), RIVALS),
    "excluded ranks are not told": (lambda: without("_tell_left_out", None), EXCLUDED),
    "strangers are not accepted": (lambda: replaced(Listener, "accept", lambda _: None), DYING),
}


# Scenarios whose failure only few orders show take seconds.
RARE = ("nobody watches members", "who has gone is a member")


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=pytest.mark.slow if name in RARE else []) for name in MUTANTS],
)
def test_a_mutant_is_found(mutant):
    mutate, scenario = MUTANTS[mutant]
    with mutate(), pytest.raises(Broken):
        explore(scenario)
