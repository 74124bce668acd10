"""After a kill -9, survivors report within a second which rank died in which operation."""

import faults
import pytest


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 9), marks=pytest.mark.slow)], ids=["few", "more"]
)
@pytest.mark.parametrize("phase", faults.PHASES)
def test_every_survivor_names_the_dead(phase, seeds):
    for seed in seeds:
        row = faults.run_trial(faults.make_trial(phase, seed))
        assert faults.complaints(row) == [], row
        assert row["hit"] == phase, row


def test_summary():
    def row(hit, times, *complaints):
        survivors = [{"error": "PeerDied", "ms": ms} for ms in times]
        return {"hit": hit, "survivors": survivors, "complaints": list(complaints)}

    late = row("idling", [4000.0], "took 4000.0 ms")
    found = faults.summarise([row("rendezvous", [1000.0]), row("idling", [3.0, 5.0]), late])
    assert found["kills"] == 3
    assert found["broken_promises"] == [late]
    assert found["phases"]["idling"] == found["outside_rendezvous"]
    assert found["phases"]["idling"] == {
        "kills": 2, "errors": {"PeerDied": 3}, "ms": {"min": 3.0, "median": 5.0, "max": 4000.0}
    }  # fmt: skip
