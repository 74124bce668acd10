"""Training survives states in fewer bits; the short form of ``python -m convergence.states``."""

import pytest
from convergence import states

STEPS = 60


@pytest.mark.slow
def test_states_in_8_bits_end_in_the_band_and_a_coarser_code_outside():
    good, bad = states.judge((0,), STEPS, [("8bit", None), ("8bit", "codes flattened")])
    assert abs(good.difference) <= states.BAND < abs(bad.difference)
    assert good.as_claimed
    assert bad.as_claimed


def test_remainders_are_fp32_masters_to_the_bit():
    """Through forward and backward, so the bf16 weights agree as well."""
    assert states.compare_masters(seed=0, steps=6).as_claimed
