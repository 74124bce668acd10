"""Programs that assign states under torch's names, as ReLoRA and optimizer resets do."""

import golden
import pytest
import torch
from torch import nn

import pycomm
from pycomm import optim

SHAPE = (48, 96)  # large enough for 8 bits
CASES = {
    "adamw": (optim.FusedAdamW, {}, ("exp_avg", "exp_avg_sq")),
    "lion": (optim.FusedLion, {}, ("exp_avg",)),
    "sgd": (optim.FusedSGD, {"momentum": 0.9}, ("momentum_buffer",)),
    "lamb": (optim.FusedLAMB, {}, ("exp_avg", "exp_avg_sq")),
}
STATES = ("fp32", "bf16", "fp16", "8bit")


class Products(nn.Module):
    """A model with its gradients as inputs."""

    def __init__(self, factors):
        super().__init__()
        self.factors = nn.ParameterList(factors)

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.factors, gradients, strict=True))


def values(seed, scale=1.0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def step(optimizer, parameter, seed):
    parameter.grad = values(seed)
    optimizer.step()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("rule", CASES)
def test_they_count_as_if_a_checkpoint_had_them(rule, states):
    make, options, names = CASES[rule]
    assigned, loaded = nn.Parameter(values(0)), nn.Parameter(values(0))
    one, other = (make([p], lr=0.01, states=states, **options) for p in (assigned, loaded))
    for optimizer, parameter in ((one, assigned), (other, loaded)):
        step(optimizer, parameter, 1)
    given = {name: values(2, 0.1).square() for name in names}
    one.state[assigned].update(given)
    checkpoint = other.state_dict(format="torch")
    checkpoint["state"][0].update(given)
    other.load_state_dict({**checkpoint, "param_groups": other.state_dict()["param_groups"]})
    saved = one.state_dict()["state"][0]
    for optimizer, parameter in ((one, assigned), (other, loaded)):
        step(optimizer, parameter, 3)
    assert golden.same_bits(assigned, loaded)
    for name in names:  # one version of each
        assert len([key for key in saved if key.split("_code")[0].split("_root")[0] == name]) == 1
    assert set(one.state[assigned]) == set(other.state[loaded]) == set(saved)


@pytest.mark.parametrize("states", STATES)
def test_a_momentum_before_the_first_step(states):
    parameter = nn.Parameter(values(0))
    optimizer = optim.FusedSGD([parameter], lr=1.0, momentum=0.5, states=states)
    optimizer.state[parameter]["momentum_buffer"] = torch.full(SHAPE, 2.0)
    parameter.grad = torch.zeros(SHAPE)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), values(0) - 1)


@pytest.mark.parametrize("states", STATES)
def test_another_shape_raises(states):
    parameter = nn.Parameter(values(0))
    optimizer = optim.FusedAdamW([parameter], states=states)
    step(optimizer, parameter, 1)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg .*shape"):
        step(optimizer, parameter, 2)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_whole_states_of_sharded_parameters(world, shard, states):
    """All ranks assign states; the steps equal those of one optimizer with the mean gradient."""
    shapes = SHAPE, (96,), (7,)  # parts of some ranks are empty, or all

    def random(rank, seed, scale=1.0):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        return [scale * torch.randn(shape, generator=generator) for shape in shapes]

    def body(group):
        module = Products(random(0, 0))
        model = pycomm.DataParallel(module, group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01, states=states)
        for number in (1, 2, 3):
            optimizer.zero_grad()
            model(random(0, number)).backward()
            if number == 2:
                for parameter, moment in zip(module.factors, random(0, 9, 0.1), strict=True):
                    optimizer.state[parameter]["exp_avg"] = moment
                    optimizer.state[parameter]["exp_avg_sq"] = moment.square()
            optimizer.step()
        return [parameter.detach().clone() for parameter in module.factors]

    seen = world(3).run(body)
    alone = [nn.Parameter(each) for each in random(0, 0)]
    optimizer = optim.FusedAdamW(alone, lr=0.01, states=states)
    for number in (1, 2, 3):
        for parameter, gradient in zip(alone, random(0, number), strict=True):
            parameter.grad = gradient
        if number == 2:
            for parameter, moment in zip(alone, random(0, 9, 0.1), strict=True):
                optimizer.state[parameter]["exp_avg"] = moment
                optimizer.state[parameter]["exp_avg_sq"] = moment.square()
        optimizer.step()
    for rank in seen:
        for got, expected in zip(rank, alone, strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-6)
