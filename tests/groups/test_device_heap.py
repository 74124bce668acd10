"""The free ranges of a device's heap, against a list of its units."""

import random

import pytest

from pycomm import _C

UNITS, UNIT = 40, 256
BEGIN = 1 << 20


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


def make(units=UNITS):
    return _C.DeviceHeap(BEGIN, units * UNIT, None, None)


def refusal(nbytes, free, largest):
    return (
        f"the CUDA window's heap has no room for {nbytes} bytes: of {UNITS * UNIT} bytes {free} "
        f"are free, the largest block has {largest}: make the group with a larger cuda_heap_bytes"
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_first_range_that_is_large_enough(seed):
    chance = random.Random(seed)
    heap, model, taken = make(), Model(), []
    refused = 0
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            first, units = taken.pop(chance.randrange(len(taken)))
            model.free[first : first + units] = [True] * units
            heap.release(BEGIN + first * UNIT)
            # What was released is free once more is needed than there is.
            assert not heap.take(UNITS * UNIT + 1, may_wait=True)
        else:
            nbytes = chance.randrange(12 * UNIT)
            expected = model.take(max(-(-nbytes // UNIT), 1))
            found = heap.take(nbytes, may_wait=True)
            if expected is None:
                assert found == 0
                refused += 1
            else:
                assert found == BEGIN + expected[0] * UNIT
                taken.append(expected)
        runs = model.runs()
        free, largest = UNIT * sum(runs.values()), UNIT * max(runs.values(), default=0)
        assert heap.refusal(7) == refusal(7, free, largest)
    assert refused > 100


def test_sizes_that_no_heap_has():
    heap = make()
    assert not heap.take((1 << 63) - 1, may_wait=True)  # rounded up it would overflow
    assert not make(0).take(0, may_wait=True)
    with pytest.raises(ValueError, match="bytes must not be negative, got -1"):
        heap.take(-1, may_wait=True)
    with pytest.raises(ValueError, match="not a block of this heap"):
        heap.release(BEGIN + UNIT)


def test_what_is_added_is_used_when_the_rest_is_full():
    heap = make(2)
    assert heap.has_room(2 * UNIT)
    assert not heap.has_room(2 * UNIT + 1)
    heap.extend(BEGIN + 2 * UNIT, 3 * UNIT)  # a neighbour, but no block lies in both
    assert heap.has_room(3 * UNIT)
    assert not heap.has_room(4 * UNIT)
    first = heap.take(UNIT, may_wait=False)
    blocks = [heap.take(2 * UNIT, may_wait=False), heap.take(UNIT, may_wait=False)]
    assert [first, *blocks] == [BEGIN, BEGIN + 2 * UNIT, BEGIN + UNIT]
    for block in (first, *blocks):
        heap.release(block)
    assert not heap.take(4 * UNIT, may_wait=True)
    assert f"of {5 * UNIT} bytes {5 * UNIT} are free, the largest block has {3 * UNIT}" in (
        heap.refusal(1)
    )
    blocks = [heap.take(n * UNIT, may_wait=False) for n in (3, 2)]
    assert blocks == [BEGIN + 2 * UNIT, BEGIN]
    heap.release(blocks[0])
    assert heap.has_room(3 * UNIT)  # what was released counts
    heap.close()
    assert not heap.has_room(1)


def test_what_is_released_is_free_after_a_wait():
    heap = make(2)
    first, second = heap.take(1, may_wait=False), heap.take(1, may_wait=False)
    heap.release(first)
    assert not heap.take(1, may_wait=False)
    assert heap.take(1, may_wait=True) == first
    heap.release(second)
    heap.close()
    assert not heap.take(1, may_wait=True)
    assert heap.refusal(1).startswith("the group is closed")
    heap.release(first)  # tensors may outlive the group
