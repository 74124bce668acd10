"""The agreement of survivors in every order of events (tests/support/orders)."""

import pytest
from orders.life import UNLIMITED, Scenario
from orders.search import explore

TWO = [
    Scenario(2, deaths=1, delays=UNLIMITED, preemptions=UNLIMITED),
    Scenario(2, deaths=1, decisions=2, delays=UNLIMITED, preemptions=UNLIMITED),
]
THREE = [
    Scenario(3, deaths=1),
    Scenario(3, deaths=1, decisions=2, delays=1),
    Scenario(3, deaths=2, decisions=1),
]
FOUR = [Scenario(4, delays=1)]


@pytest.mark.parametrize("scenario", TWO + THREE + FOUR, ids=str)
def test_all_that_live_go_on_together(scenario):
    found = explore(scenario)
    everyone = tuple(range(scenario.ranks))
    assert (everyone,) * scenario.ranks in found.ends
    assert len(found.ends) > scenario.deaths * scenario.ranks
