"""Error reset learns where feedback falls behind: ``convergence.sparse`` in short."""

import pytest
from convergence import sparse

STEPS = 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_error_reset_ends_near_uncompressed_training_and_feedback_above():
    settings = tuple(s for s in sparse.SETTINGS if s.compression.density == 0.03)
    asked = sparse.Comparison(2, STEPS, (0,), settings)
    feedback, reset = sparse.compare("characters", asked, "momentum")
    assert reset.bits == feedback.bits < 0.5
    assert abs(reset.differences[0]) < 0.01 < feedback.differences[0]
