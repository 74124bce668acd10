"""One-shot: every rank reads all contributions, adds in rank order and rounds once."""

import functools

import pytest
import sweep


@pytest.mark.parametrize(("dtype", "size"), sweep.a_fifth_of(sweep.DTYPES, range(1, 10)), ids=str)
def test_exact_at_every_border(dtype, size):
    sweep.check_grid("one_shot", dtype, size)


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact_with_many_pieces(size):
    sweep.check_large("one_shot", size)


measured = functools.partial(sweep.traffic, "one_shot")


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("size", range(1, 10))
def test_reads_all_the_others_in_one_round(size, in_window):
    nbytes = 4096 * size
    assert measured(size, nbytes // 4, in_window) == [(0, (size - 1) * nbytes, 0)] * size


def test_one_more_signal_per_tile_after_the_first():
    tile = (2 << 20) // 2 // 4
    assert measured(3, 3 * tile // 4, False) == [(2, 2 * 3 * tile, 0)] * 3
    assert measured(3, 3 * tile // 4 + 1, False) == [(3, 2 * (3 * tile + 4), 0)] * 3


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("size", range(2, 10))
def test_a_line_or_less_travels_in_packets(size, in_window):
    """Eight bytes for every four, written to every other rank; no signals, nothing read."""
    assert measured(size, 1, in_window) == [(0, 0, (size - 1) * 8)] * size
    assert measured(size, 16, in_window) == [(0, 0, (size - 1) * 128)] * size
    assert measured(size, 17, in_window) == [(0, (size - 1) * 68, 0)] * size
