"""Error reset learns where feedback falls behind: ``convergence.sparse`` in short."""

import pytest
import torch
from convergence import sparse
from convergence.simulation import Ranks, learn
from convergence.tasks import TASKS

STEPS = 300
SHORT = 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_error_reset_ends_near_uncompressed_training_and_feedback_above():
    settings = tuple(s for s in sparse.SETTINGS if s.compression.density == 0.03)
    asked = sparse.Comparison(2, STEPS, (0,), settings)
    feedback, reset = sparse.compare("characters", asked, "momentum")
    assert reset.bits == feedback.bits < 0.5
    assert abs(reset.differences[0]) < 0.01 < feedback.differences[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_the_library_ends_where_a_simulation_does(kind):
    for setting, method in (
        (sparse.Setting(), None),
        (sparse.SETTINGS[1], "feedback"),
        (sparse.RESET, "reset"),
    ):
        found = sparse.final_loss("digits", 2, 0, kind, setting, SHORT)
        assert found == pytest.approx(learn("digits", kind, method, 0.03, 0, SHORT), rel=1e-4)


def test_simulated_exchanges_lose_nothing():
    ranks = Ranks([TASKS["digits"](rank, 3, 0) for rank in range(3)])
    asked = torch.randn(ranks.weights.shape, generator=torch.Generator().manual_seed(0))
    mean, left = ranks.exchange(asked, 0.05)
    assert left.count_nonzero() > 0
    torch.testing.assert_close(3 * mean + left.sum(0), asked.sum(0))
