"""Casts and the identity: the fused all-reduce equals the model bit for bit, with feedback."""

import compressing
import pytest
import torch
from compressing import ALGORITHMS, FLOATS, Case

import pycomm

COMPRESSIONS = (pycomm.Cast(), pycomm.Cast(torch.float16), pycomm.Identity())


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_steps_with_feedback(algorithm, size):
    turn = size + 2 * ALGORITHMS.index(algorithm)
    compression, dtype = COMPRESSIONS[turn % 3], FLOATS[turn // 2 % 3]
    op = ("avg", "sum")[size % 2]
    compressing.check(Case(compression, dtype, 701, algorithm, op, steps=30), size)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_counts_dtypes_and_offsets(algorithm, compression):
    for turn, count in enumerate((0, 1, 127, 128, 129, 1023, 1025, 16383, 16385)):
        dtype, size = FLOATS[turn % 3], 1 + turn % 5
        case = Case(
            compression, dtype, count, algorithm, feedback=turn % 2 == 0, offset=turn * 1152
        )
        compressing.check(case, size)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_tiles(algorithm, size):
    """As little staging as there may be."""
    for compression, staging in ((pycomm.Cast(), 3), (pycomm.Identity(), 5)):
        case = Case(compression, torch.float32, 9 * 4096 * size + 77, algorithm, steps=2)
        compressing.check(case, size, 2 * 4 * (size + 1) * 4096 * staging)
