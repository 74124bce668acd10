"""Random sequences of operations give the results that Gloo gives; sums are those in rank order."""

import backends
import pytest
from random_operations import KINDS, sequence


@pytest.mark.parametrize(("size", "count"), [(2, 300), (3, 300), (4, 200)])
def test_random_sequences(size, count):
    assert set().union(*backends.run(size, sequence, size, count)) == KINDS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_long_random_sequences(seed):
    backends.run(3, sequence, 100 + seed, 1000)
