"""Local SGD with several inner optimizers, and with those that others have wrapped."""

import golden
import pytest
import torch
from torch import nn

import pycomm
from pycomm import hooks, optim


class Wrapping:
    """Wraps an optimizer, as Lightning does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def make_model():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def batch_of(rank, step):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


def make(parameters):
    return optim.FusedSGD(parameters, lr=0.05, momentum=0.9, master_weights="fp32")


def one(model):
    return [make(model.parameters())]


def two(model):
    return [make(model[0].parameters()), make(model[2].parameters())]


def wrapped(model):
    return [Wrapping(Wrapping(make(model.parameters())))]


def train(group, split, **options):
    model = make_model()
    optimizers = split(model)
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    state = hooks.LocalSGDState(model.named_parameters(), given, period=2, group=group, **options)
    wrapper = pycomm.DataParallel(model, state=state)
    for step in range(4):
        wrapper(batch_of(group.rank, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.step()
    inner = optimizers[0].optimizer.optimizer if split is wrapped else None
    masters = [
        (inner or next(o for o in optimizers if parameter in o.state)).full_weights(parameter)
        for parameter in model.parameters()
    ]
    return [parameter.detach().clone() for parameter in model.parameters()], masters


@pytest.mark.parametrize("options", [{}, {"outer_lr": 0.7, "outer_momentum": 0.9}])
@pytest.mark.parametrize("split", [two, wrapped])
def test_masters_are_exchanged_as_with_one(world, split, options):
    expected = world(2).run(lambda group: train(group, one, **options))
    seen = world(2).run(lambda group: train(group, split, **options))
    for (parameters, masters), (wanted, wanted_masters) in zip(seen, expected, strict=True):
        assert all(map(golden.same_bits, parameters, wanted))
        assert all(map(golden.same_bits, masters, wanted_masters))
        assert all(map(golden.same_bits, masters, seen[0][1]))


def test_accelerate_s_wrapper(world):
    accelerate = pytest.importorskip("accelerate")
    (group,) = world(1)
    accelerate.Accelerator(cpu=True)

    def prepared(model):
        return [accelerate.optimizer.AcceleratedOptimizer(make(model.parameters()))]

    model = make_model()
    (optimizer,) = prepared(model)
    state = hooks.LocalSGDState(model.named_parameters(), optimizer, period=1, group=group)
    wrapper = pycomm.DataParallel(model, state=state)
    wrapper(batch_of(0, 0)).sum().backward()
    optimizer.step()
    assert state.step()


def test_optimizers_must_cover_the_parameters(world):
    (group,) = world(1)
    model = make_model()

    def check(optimizers, message):
        with pytest.raises(ValueError, match=message):
            hooks.LocalSGDState(model.named_parameters(), optimizers, period=2, group=group)

    check(make(model[0].parameters()), r"does not have 2\.weight: pass all optimizers")
    check([make(model.parameters()), make(model[2].parameters())], r"got 2\.weight twice")
    check([*two(model), make([nn.Parameter(torch.ones(3))])], "must name every parameter")
    with pytest.raises(TypeError, match="got none"):
        hooks.LocalSGDState(model.named_parameters(), [], period=2, group=group)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got 3"):
        hooks.LocalSGDState(model.named_parameters(), 3, period=2, group=group)


def test_an_optimizer_that_steps_twice_is_noticed(world):
    (group,) = world(1)
    model = make_model()
    first, second = two(model)
    state = hooks.LocalSGDState(model.named_parameters(), [first, second], period=2, group=group)
    wrapper = pycomm.DataParallel(model, state=state)
    wrapper(batch_of(0, 0)).sum().backward()
    first.step()
    second.step()
    with pytest.raises(RuntimeError, match="after every step"):
        second.step()
