"""A sharded step gives the bits of a step without shards: parameters, states and norms.

The programs of support/sharding.py are drawn at random.
"""

import pytest
import sharding
import torch
from hypothesis import given, settings
from sharding_programs import programs

import pycomm


@pytest.mark.slow
@given(program=programs())
@settings(max_examples=12)
def test_bits_are_those_without_shards(program):
    sharding.check(program)


@pytest.mark.slow
@given(program=programs())
@settings(max_examples=75)
def test_bits_are_those_without_shards_in_more_programs(program):
    sharding.check(program)


def stats_after_steps(group, shard):
    module = torch.nn.Linear(300, 300)
    model = pycomm.DataParallel(module, group=group, shard=shard)
    optimizer = pycomm.optim.FusedAdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    return model.comm_state.stats()


def test_stats_count_steps_and_bytes_of_shards():
    with pycomm.LocalWorld(2) as world:
        # A step reads gradients only. A slot has padding, too: the bias comes first, and the weight
        # begins at a multiple of 1,024 elements.
        for shard, sent in (("optimizer", 300 + 300 * 300), ("gradients", 1024 + 300 * 300)):
            for stats in world.run(stats_after_steps, shard):
                assert stats["steps"] == 3
                assert stats["bytes_in"] == 4 * (300 + 300 * 300)
                assert stats["bytes_wire"] == 4 * sent  # half of 2 ranks, both ways


def bytes_of_backwards(group):
    model = pycomm.DataParallel(torch.nn.Linear(300, 300), group=group, shard="gradients")
    counted = []
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
        counted.append(model.comm_state.stats()["bytes_wire"])
    return counted


def test_a_backward_that_adds_to_averages_gathers_them():
    with pycomm.LocalWorld(2) as world:
        for first, second in world.run(bytes_of_backwards):
            assert second == pytest.approx(1.5 * first, rel=0.01)  # a third is of parameters
