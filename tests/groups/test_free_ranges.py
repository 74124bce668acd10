"""The free ranges of a heap, against a list of its units."""

import random

import pytest

from pycomm import _C

UNITS, UNIT = 40, 256


class Model:
    """A heap as a list: for each unit, whether it is free."""

    def __init__(self):
        self.free = [True] * UNITS

    def runs(self):
        """The length of each run of free units, by its first unit."""
        runs, first = {}, None
        for place, free in enumerate([*self.free, False]):
            if free and first is None:
                first = place
            elif not free and first is not None:
                runs[first], first = place - first, None
        return runs

    def take(self, units):
        """The first run that is long enough."""
        for first, length in self.runs().items():
            if length >= units:
                self.free[first : first + units] = [False] * units
                return first, units
        return None


@pytest.mark.parametrize("seed", range(4))
def test_the_first_range_that_is_large_enough(seed):
    chance = random.Random(seed)
    ranges, model, taken = _C.FreeRanges(UNITS * UNIT, UNIT), Model(), []
    refused = 0
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            first, units = taken.pop(chance.randrange(len(taken)))
            model.free[first : first + units] = [True] * units
            ranges.give(first * UNIT, units * UNIT)
        else:
            nbytes = chance.randrange(12 * UNIT)
            expected = model.take(max(-(-nbytes // UNIT), 1))
            found = ranges.take(nbytes)
            if expected is None:
                assert found is None
                refused += 1
            else:
                assert found == (expected[0] * UNIT, expected[1] * UNIT)
                taken.append(expected)
        runs = model.runs()
        assert ranges.total == UNIT * sum(runs.values())
        assert ranges.largest == UNIT * max(runs.values(), default=0)
    assert refused > 100


def test_sizes_that_no_heap_has():
    ranges = _C.FreeRanges(UNITS * UNIT, UNIT)
    assert ranges.take((1 << 63) - 1) is None  # rounded up it would overflow
    assert _C.FreeRanges(0, UNIT).take(0) is None
    with pytest.raises(ValueError, match="bytes must not be negative, got -1"):
        ranges.take(-1)
