"""Hooks made of other hooks: they wait for a bucket's future, or go on with it."""

import helpers
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks


def done(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def wait(state, bucket):
    return done(hooks.comm_hook(state, bucket).wait())


def then(state, bucket):
    return hooks.comm_hook(state, bucket).then(lambda future: future.value() * 1)


def then_wait(state, bucket):
    future = hooks.comm_hook(state, bucket)
    return done(future.then(lambda f: f.wait() * 0.5).then(lambda f: f.value() * 2).wait())


def poll(state, bucket):
    future = hooks.comm_hook(state, bucket)
    while not future.done():
        pass
    return done(future.value())


def through_fp16(state, bucket):
    """As torch's own wrappers of hooks do."""
    future = hooks.comm_hook(state, bucket)
    return future.then(lambda f: f.value().half().float())


HOOKS = {"wait": wait, "then": then, "then wait": then_wait, "poll": poll, "fp16": through_fp16}


def train(group, name, compression):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
    model = DistributedDataParallel(module, bucket_cap_mb=0.004)
    state = hooks.CommState(compression, model.named_parameters())
    model.register_comm_hook(state, HOOKS[name] if name else hooks.comm_hook)
    for step in range(3):
        model.zero_grad()
        batch = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + group.rank))
        model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def compare(group, compression):
    expected = train(group, None, compression)
    for name in HOOKS:
        wanted = [g.half().float() for g in expected] if name == "fp16" else expected
        assert all(map(torch.equal, train(group, name, compression), wanted)), name


@pytest.mark.parametrize("compression", [None, pycomm.Int8()])
def test_composed_hooks(compression):
    helpers.run_group(2, compare, compression)


class OwnError(Exception):
    """An error of a function that runs after the exchange."""


def fail(_group):
    model = DistributedDataParallel(nn.Linear(30, 40))
    state = hooks.AllReduceState()

    def raise_own(_):
        raise OwnError

    def hook(state, bucket):
        return hooks.comm_hook(state, bucket).then(raise_own)

    model.register_comm_hook(state, hook)
    with pytest.raises(OwnError):
        model(torch.ones(2, 30)).sum().backward()

    model = DistributedDataParallel(nn.Linear(30, 40))

    def recover(state, bucket):
        return hooks.comm_hook(state, bucket).then(raise_own).then(lambda _: bucket.buffer() * 0)

    model.register_comm_hook(state, recover)
    model(torch.ones(2, 30)).sum().backward()
    assert not model.module.weight.grad.any()


def test_an_error_after_the_exchange():
    helpers.run_group(2, fail)
