"""Sharded gradients and torch's own optimizers, which do not average them."""

import copy

import pytest
import torch
from torch import nn

import pycomm

NET = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))
STAGES = ("optimizer", "gradients")


def train(group, shard, reduces, *, steps=2):
    net = copy.deepcopy(NET)
    model = pycomm.DataParallel(net, group=group, shard=shard)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 50, generator=generator)).square().sum().backward()
        if reduces:
            model.reduce_gradients()
        optimizer.step()
    model(torch.zeros(1, 50))
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("shard", STAGES)
def test_a_step_with_gradients_that_are_not_whole_is_found(shard):
    def check(group):
        with pytest.raises(RuntimeError, match=r"not whole: .* reduce_gradients\(\)"):
            train(group, shard, reduces=False)

    with pycomm.LocalWorld(2) as world:
        world.run(check)


@pytest.mark.parametrize("shard", STAGES)
def test_a_step_with_reduced_gradients_has_the_bits_without_shards(shard):
    with pycomm.LocalWorld(2) as world:
        wanted = world.run(train, None, False)
        for got, expected in zip(world.run(train, shard, True), wanted, strict=True):
            assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("shard", STAGES)
def test_parameters_may_be_loaded_between_backward_and_forward(shard):
    def check(group):
        net = copy.deepcopy(NET)
        model = pycomm.DataParallel(net, group=group, shard=shard)
        model(torch.ones(1, 50)).sum().backward()
        net.load_state_dict(NET.state_dict())
        model.zero_grad()
        model(torch.ones(1, 50)).sum().backward()

    with pycomm.LocalWorld(2) as world:
        world.run(check)
