"""A parameter belongs to one pycomm.DataParallel at a time: the last one that was made with it."""

import copy
import gc

import helpers
import pytest
import torch
import wrapped
from torch import nn
from wrapped import TINY

import pycomm
import pycomm.optim as optim


def network():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh())


NETWORK = network()  # drawn by one thread, as the random numbers are everyone's


def wrap(module, group, **options):
    return pycomm.DataParallel(module, bucket_mb=TINY, group=group, **options)


def check_steps(group, model, alone, steps=range(3), loss=wrapped.batch_loss):
    for step in steps:
        model.zero_grad()
        loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, loss)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def refused(name):
    return pytest.raises(ValueError, match=f"'{name}'.* made later")


def wrapped_anew(group, flat):
    """The old wrapper lives on, but does nothing any more, and says so."""
    module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
    old = wrap(module, group)
    if flat:
        optim.flatten(module.parameters())
    check_steps(group, old, alone, range(2))
    loss = wrapped.batch_loss(old, group.rank, 2)
    new = wrap(module, group)
    check_steps(group, new, alone)
    with refused("0.weight"):
        wrapped.batch_loss(old, group.rank, 0)
    with refused("0.weight"):
        loss.backward()
    with torch.no_grad():
        assert torch.equal(*(wrapped.batch_loss(m, group.rank, 0) for m in (old, new)))
    check_steps(group, new, alone)


def two_heads(group, flat):
    """A wrapper for each head over a common trunk; one for all of them works."""
    trunk, heads = copy.deepcopy(NETWORK), [nn.Linear(40, 5, bias=False) for _ in range(2)]
    if flat:
        optim.flatten(trunk.parameters())
    first, second = (wrap(nn.Sequential(trunk, head), group) for head in heads)
    with refused("0.0.weight"):
        wrapped.batch_loss(first, group.rank, 0)
    check_steps(group, second, copy.deepcopy(second.module))
    assert first.module[1].weight.grad is None
    both = wrap(Heads(trunk, heads), group)
    check_steps(group, both, copy.deepcopy(both.module))


class Heads(nn.Module):
    def __init__(self, trunk, heads):
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x):
        x = self.trunk(x)
        return torch.cat([head(x) for head in self.heads], 1)


def nested(group, flat):
    inner = wrap(copy.deepcopy(NETWORK), group)
    outer = wrap(nn.Sequential(nn.Linear(40, 40), inner), group)
    if flat:
        optim.flatten(outer.parameters())
    with refused("0.weight"):
        wrapped.batch_loss(outer, group.rank, 0)
    outer.module[1] = inner.module
    check_steps(group, outer, copy.deepcopy(outer.module))


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("body", [wrapped_anew, two_heads, nested])
def test_the_last_wrapper_averages_and_the_others_refuse(world, body, flat):
    world(2).run(body, flat)
    helpers.run_group(2, body, flat)


def dropped(group):
    """At once: no cycle waits for the collector, and nobody is refused."""
    gc.disable()
    module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
    model = wrap(module, group)
    check_steps(group, model, alone)
    loss = wrapped.batch_loss(model, group.rank, 0)
    model = wrap(model.module, group)
    model.zero_grad()
    loss.backward()  # of the old wrapper's forward: the new one has it
    assert wrapped.same(wrapped.gradients_of(model), wrapped.mean_gradients(alone, 2, 0))
    check_steps(group, model, alone)
    gc.enable()
    assert [len(p._post_accumulate_grad_hooks) for p in module.parameters()] == [1] * 4


def test_a_wrapper_that_is_gone_owns_nothing():
    helpers.run_group(2, dropped)


def test_a_wrapper_that_could_not_be_made_takes_nothing(world, monkeypatch):
    (group,) = world(1)
    model = wrap(copy.deepcopy(NETWORK), group)
    with monkeypatch.context() as patch:
        patch.setattr(pycomm.Group, "empty", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrap(model.module, group)
    check_steps(group, model, copy.deepcopy(NETWORK))
