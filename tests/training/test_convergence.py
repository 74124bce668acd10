"""Models learn with compression, and broken modes are detected; a short version, on digits."""

import pytest
import torch
from convergence import claims
from convergence.training import MODES, RANKS, Plan, checkpoint, run_all, run_and_kill, run_rest

pytestmark = pytest.mark.slow

STEPS = 500
SHORT = 40
WITH_FEEDBACK = [name for name, mode in MODES.items() if mode.feedback]


def test_working_versions_end_in_their_bands_and_broken_ones_outside():
    """One test for all versions, because they are trained once."""
    plans = claims.plan_runs("digits", seed=0, steps=STEPS)
    verdicts = claims.judge(plans, run_all(plans))
    inside = {v for v in map(describe, verdicts) if v[-1]}
    assert inside == {(front, mode, None, True) for front in claims.FRONTS for mode in MODES}
    broken = {("hook", mode, name, False) for name, mode in claims.BREAKAGES.items()}
    assert set(map(describe, verdicts)) - inside == broken
    assert all(verdict.as_claimed for verdict in verdicts)


def describe(verdict):
    """The kind of training, and true if it ended in its band."""
    inside = abs(verdict.difference) <= MODES[verdict.mode].band
    return verdict.front, verdict.mode, verdict.broken, inside


def test_ranks_that_differ_are_seen():
    with pytest.raises(AssertionError, match="ranks 0 and 1 do not have the same parameters"):
        run_all([Plan("digits", "hook", "int8", 0, SHORT, "rank astray")])


def forget_residuals(folder):
    """Zeroes saved residuals, as if they had not been saved."""
    for rank in range(RANKS):
        saved = torch.load(checkpoint(folder, rank))
        for residual in saved["comm"]["kept"][str(rank)]["residual"].values():
            residual.zero_()
        torch.save(saved, checkpoint(folder, rank))


@pytest.mark.parametrize(("front", "mode"), list(zip(claims.FRONTS, WITH_FEEDBACK, strict=True)))
def test_after_a_kill_it_goes_on_to_the_bit(front, mode, tmp_path):
    plan = Plan("digits", front, mode, 0, SHORT)
    (whole,) = run_all([plan])
    run_and_kill(plan, tmp_path)
    rest = run_rest(plan, tmp_path)
    assert rest.digests == whole.digests[SHORT // 2 :]
    assert rest.final_loss == whole.final_loss
    forget_residuals(tmp_path)
    assert run_rest(plan, tmp_path).digests != rest.digests
