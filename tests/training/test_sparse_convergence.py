"""Error reset learns where feedback falls behind: ``convergence.sparse`` in short."""

import pytest
import torch
from convergence import methods, sparse, variants
from convergence.simulation import Lists, Ranks, Values
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


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_simulation_ends_where_the_library_does(kind):
    for setting, method in (
        (sparse.Setting(), None),
        (sparse.SETTINGS[1], methods.Feedback(Lists(0.03))),
        (sparse.RESET, methods.Updates(Lists(0.03))),
    ):
        found = sparse.final_loss("digits", 2, 0, kind, setting, SHORT)
        assert variants.learn("digits", kind, method, 0, SHORT) == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("values", [Values(), variants.NARROW, variants.GEOMETRIC, Values(1)])
def test_simulated_exchanges_lose_nothing(values):
    with torch.no_grad():
        ranks = Ranks([TASKS["digits"](rank, 3, 0) for rank in range(3)])
    asked = torch.randn(ranks.weights.shape, generator=torch.Generator().manual_seed(0))
    mean, left = ranks.exchange(asked, Lists(0.05, values), 0)
    assert left.count_nonzero() > 0
    torch.testing.assert_close(3 * mean + left.sum(0), asked.sum(0))


def test_lists_of_the_simulation_are_as_long_as_the_library_s():
    assert Lists(0.03).bits() == pytest.approx(sparse.RESET.bits(), rel=1e-3)
