"""Ranks that are processes get the same results as ranks that are threads."""

import helpers
import pytest
import sweep


@pytest.mark.parametrize(("algorithm", "size"), sweep.a_third_of(sweep.ALGORITHMS, [2, 3, 4]))
def test_exact(algorithm, size):
    staging_bytes = sweep.small_staging(size)
    cases = [case for dtype in sweep.DTYPES for case in sweep.grid(algorithm, dtype, size)]
    seen = helpers.run_group(size, sweep.run_cases, cases, staging_bytes=staging_bytes)
    sweep.check(cases, seen, staging_bytes)
