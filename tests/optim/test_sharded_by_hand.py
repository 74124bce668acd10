"""Sharded steps by hand, as the tests for a GPU take them, are those of the whole model."""

import pytest
import sharded_by_hand
import torch
from optimizing import Case

import pycomm

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb"])
@pytest.mark.parametrize("size", [1, 3])
def test_bits_of_the_whole(name, size):
    case = Case(name, dtype=BF16, master="remainder", states="8bit")
    whole = sharded_by_hand.steps_of_the_whole(case, size)
    with pycomm.LocalWorld(size) as world:
        for found in world.run(sharded_by_hand.steps, case, "cpu"):
            for parameter, wanted in zip(found, whole, strict=False):
                assert torch.equal(parameter, wanted)
            assert [float(found_inf) for found_inf in found[-5::2]] == [0, 1, 0]
