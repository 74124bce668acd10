"""Blockwise 8-bit integers: the fused all-reduce equals the model bit for bit, with feedback."""

from dataclasses import replace

import compressing
import pytest
import sweep
import torch
from compressing import ALGORITHMS, FLOATS, Case

import pycomm

BLOCKS = (128, 256, 512, 1024, 2048, 4096)


def smallest_staging(size):
    """A slot of 4096 elements per rank, so that tiles and slots wrap."""
    return 2 * 4 * (size + 1) * 4096 * 2


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_steps_with_feedback(algorithm, size):
    turn = size + 2 * ALGORITHMS.index(algorithm)
    rounding = ("nearest", "stochastic")[turn % 2]
    compression = pycomm.Int8(BLOCKS[turn % 3], rounding, seed=turn << 40 | 5)
    dtype, op = FLOATS[turn % 3], ("avg", "sum")[size % 2]
    compressing.check(Case(compression, dtype, 701, algorithm, op, steps=30), size)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "size"), sweep.a_fifth_of(ALGORITHMS, FLOATS, range(1, 6)), ids=str
)
def test_every_block_around_every_border(algorithm, dtype, size):
    for turn, block in enumerate(BLOCKS):
        for count in (0, 1, block - 1, block, block + 1, 3 * block + 17):
            rounding = ("nearest", "stochastic")[(turn + count) % 2]
            compression = pycomm.Int8(block, rounding, seed=count)
            op, feedback = ("avg", "sum")[turn % 2], count % 3 == 0
            compressing.check(
                Case(compression, dtype, count, algorithm, op, feedback, block * turn), size
            )


@pytest.mark.parametrize("size", range(2, 6))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_tiles(algorithm, size):
    """As little staging as there may be, with several turns of the owners."""
    staging_bytes = smallest_staging(size)
    compression = pycomm.Int8(512, ("nearest", "stochastic")[size % 2])
    count = 9 * 4096 * size + 16384 + 77
    compressing.check(
        Case(compression, torch.bfloat16, count, algorithm, steps=2, offset=512 * 77),
        size,
        staging_bytes,
    )


@pytest.mark.parametrize("size", range(1, 5))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_around_the_smallest_scale(algorithm, size):
    """Some blocks are too small for a scale that is not subnormal, and wait in the residual."""
    rounding = ("nearest", "stochastic")[size % 2]
    case = Case(pycomm.Int8(128, rounding), count=5003, algorithm=algorithm, op="sum", steps=20)
    compressing.check(replace(case, scale=2.0**-122), size)
