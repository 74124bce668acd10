"""Evaluations of wrappers and their copies make nothing that lasts, in any of torch's modes."""

import contextlib
import copy

import golden
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pycomm
from pycomm import hooks, optim

MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
SHARDS = (None, "optimizer", "gradients")


def make_model():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def batch_of(rank, step):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(group, shard, evaluate):
    model = pycomm.DataParallel(make_model(), group=group, shard=shard)
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
    outputs = []
    for step in range(3):
        model(batch_of(group.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(evaluate(model))
    return outputs, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shard", SHARDS)
def test_a_frozen_copy(world, shard, mode):
    """A frozen copy, as for a moving average, runs on one rank only, so it must not communicate."""

    def body(group):
        averages = {}

        def evaluate(model):
            if group.rank:
                return None
            if not averages:
                averages["usual"] = copy.deepcopy(model).requires_grad_(False).eval()
            average = averages["usual"]
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
            with MODES[mode]():
                average(torch.ones(4, 8))
                average.state_dict()
            assert average._own_exchange is None
            return average(torch.ones(4, 8)).clone()

        return train(group, shard, evaluate)

    expected = world(2).run(lambda group: train(group, None, lambda _: None))
    for (_, got), (_, wanted) in zip(world(2).run(body), expected, strict=True):
        assert all(map(golden.same_bits, got, wanted))


@pytest.mark.parametrize("shard", SHARDS)
def test_torch_s_averaged_model(world, shard):
    def body(group):
        averages = []

        def evaluate(model):
            if not averages:
                averages.append(AveragedModel(model))
            averages[0].update_parameters(model)
            with torch.inference_mode():
                return averages[0].eval()(torch.ones(4, 8)).clone()

        return train(group, shard, evaluate)

    for outputs, _ in world(2).run(body):
        assert len(outputs) == 3


@pytest.mark.parametrize("shard", SHARDS)
def test_a_copy_that_is_evaluated_and_then_trained(world, shard):
    """It lays out its memory in its first training forward, in whatever mode it was used before."""

    def body(group):
        model = copy.deepcopy(pycomm.DataParallel(make_model(), group=group, shard=shard))
        with torch.inference_mode():
            model.eval()(torch.ones(4, 8))
            model.state_dict()
        model.train()
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        for step in range(3):
            model(batch_of(group.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = world(2).run(lambda group: train(group, None, lambda _: None))
    for got, (_, wanted) in zip(world(2).run(body), expected, strict=True):
        assert all(map(golden.same_bits, got, wanted))


@pytest.mark.parametrize("options", [{}, {"outer_momentum": 0.9, "compression": pycomm.Int8()}])
def test_exchanges_of_parameters_in_inference_mode(world, options):
    def body(group, mode):
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        state = hooks.LocalSGDState(
            model.named_parameters(), inner, period=3, group=group, **options
        )
        wrapper = pycomm.DataParallel(model, state=state)
        with MODES[mode]():
            state.exchange()
        for step in range(6):
            wrapper(batch_of(group.rank, step)).square().mean().backward()
            inner.step()
            inner.zero_grad()
            state.step()
            with MODES[mode]():
                state.exchange()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = world(2).run(body, "plain")
    for got, wanted in zip(world(2).run(body, "inference"), expected, strict=True):
        assert all(map(golden.same_bits, got, wanted))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_first_step_in_inference_mode(states):
    def steps(mode):
        model = make_model()
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01, states=states)
        for step in range(3):
            model(batch_of(0, step)).square().mean().backward()
            with MODES[mode]() if step == 0 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(map(golden.same_bits, steps("inference"), steps("plain")))
