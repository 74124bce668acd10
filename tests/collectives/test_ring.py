"""The ring: added around it, rounded at every hop; 2(n-1)/n of the bytes, from the left."""

import functools

import pytest
import sweep
import torch

import pycomm


@pytest.mark.parametrize(("dtype", "size"), sweep.a_fifth_of(sweep.DTYPES, range(1, 10)), ids=str)
def test_exact_at_every_border(dtype, size):
    sweep.check_grid("ring", dtype, size)


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact_with_many_pieces(size):
    sweep.check_large("ring", size)


measured = functools.partial(sweep.traffic, "ring")


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("size", range(2, 10))
def test_reads_the_bandwidth_optimum(size, in_window):
    nbytes = 4096 * size
    optimum = 2 * (size - 1) * nbytes // size
    assert measured(size, nbytes // 4, in_window) == [(2 * size - 1, optimum, 0)] * size


def test_signals_once_per_piece_of_a_chunk():
    assert [steps for steps, _, _ in measured(2, 2 * 3 * 16_384, True)] == [3 * 3] * 2
    assert [steps for steps, _, _ in measured(2, 2 * 3 * 16_384 + 1, True)] == [3 * 4] * 2


def test_order_and_rounding_by_hand():
    """Chunk c starts at rank c; in float16 2048 + 1 stays 2048, but 1 + 1 + 2048 is 2050."""
    line = 32  # float16 elements in a cache line: one chunk each
    values = [1.0, 1.0, 2048.0]

    def body(group):
        x = torch.full((3 * line,), values[group.rank], dtype=torch.float16)
        return pycomm.all_reduce(x, algorithm="ring", group=group)

    with pycomm.LocalWorld(3, timeout=60) as world:
        for result in world.run(body):
            chunks = result.view(3, line).tolist()
            assert chunks == [[2050.0] * line, [2048.0] * line, [2048.0] * line]
