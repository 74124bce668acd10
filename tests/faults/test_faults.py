"""After a kill -9, survivors report within a second which rank died in which operation."""

import faults
import pytest

KILLS_PER_PHASE = 9


@pytest.mark.parametrize("phase", faults.PHASES)
def test_every_survivor_names_the_dead(phase):
    for seed in range(KILLS_PER_PHASE):
        row = faults.run_trial(faults.make_trial(phase, seed))
        assert faults.complaints(row) == [], row
        assert row["hit"] == phase, row
