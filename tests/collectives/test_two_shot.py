"""Two-shot: a chunk's owner adds it in rank order and rounds once; 2(n-1)/n of the bytes."""

import functools

import pytest
import sweep


@pytest.mark.parametrize(("dtype", "size"), sweep.a_fifth_of(sweep.DTYPES, range(1, 10)), ids=str)
def test_exact_at_every_border(dtype, size):
    sweep.check_grid("two_shot", dtype, size)


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact_with_many_pieces(size):
    sweep.check_large("two_shot", size)


measured = functools.partial(sweep.traffic, "two_shot")


@pytest.mark.parametrize("size", range(2, 10))
def test_staged_reads_twice_the_share_of_the_others(size):
    nbytes = 4096 * size  # divisible, so every rank's share is the same
    textbook = 2 * (size - 1) * nbytes // size
    assert measured(size, nbytes // 4, False) == [(2, textbook, 0)] * size


@pytest.mark.parametrize("size", range(2, 10))
def test_in_the_window_reads_half_of_that_and_writes_the_other_half(size):
    nbytes = 4096 * size
    textbook = (size - 1) * nbytes // size
    assert measured(size, nbytes // 4, True) == [(1, textbook, textbook)] * size


def test_two_signals_per_tile():
    tile = (2 << 20) // 2 // 4
    whole = [steps for steps, _, _ in measured(2, 5 * tile // 4, False)]
    more = [steps for steps, _, _ in measured(2, 5 * tile // 4 + 1, False)]
    assert (whole, more) == ([10, 10], [12, 12])
