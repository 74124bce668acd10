"""Buffers of a wrapped module: when they are sent, and buffers that cannot be."""

import golden
import pytest
import torch
from torch import nn

import pycomm


class Counting(nn.Module):
    """Multiplies with a buffer, which autograd saves, and then changes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("factor", torch.ones(4))

    def forward(self, batch):
        factor = self.factor.clone() if not self.training else self.factor
        outputs = (self.weight * factor * batch).sum()
        self.factor = self.factor * 2
        return outputs


def test_two_forwards_before_a_backward(world):
    """A broadcast between them would change what the first one has saved."""

    def body(group):
        module = Counting()
        model = pycomm.DataParallel(module, group=group)
        module.factor.fill_(group.rank + 1.0)
        first, second = model(torch.ones(4)), model(torch.ones(4))
        (first + second).backward()
        once = module.weight.grad.clone()
        model.zero_grad()
        module.factor.fill_(group.rank + 1.0)
        model(torch.ones(4)).backward()
        return once, module.weight.grad.clone(), module.factor.clone()

    for once, again, factor in world(2).run(body):
        # Rank 0's factor is 1, and 2 in the second forward.
        assert torch.equal(once, torch.full((4,), 3.0))
        assert torch.equal(again, torch.full((4,), 1.0))
        assert torch.equal(factor, torch.full((4,), 2.0))


def test_two_forwards_through_batch_normalisation(world):
    """As a discriminator's forwards of real and generated images."""

    def body(group):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = pycomm.DataParallel(module, group=group)
        for step in range(2):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank + step))
            (model(batch).square().sum() + model(batch + 1).sum()).backward()
        model(batch).sum().backward()
        model.sync_buffers()
        return {name: value.clone() for name, value in module[1].state_dict().items()}

    one, other = world(2).run(body)
    for name, value in one.items():
        assert golden.same_bits(value, other[name])


def test_forwards_that_get_no_backward(world):
    """As a generator's whose images are detached in every step; buffers are sent once per step."""

    def body(group):
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = pycomm.DataParallel(module, group=group)
        seen = []
        module.register_forward_pre_hook(lambda *_: seen.append(module[0].running_mean.clone()))
        for step in range(3):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank + step))
            model(batch).detach()
            model(batch).sum().backward()
        return seen

    one, other = world(2).run(body)
    same = [torch.equal(*pair) for pair in zip(one, other, strict=True)]
    assert same == [True, False] * 3


def test_an_evaluation_after_sync_buffers_is_the_same_everywhere(world):
    def body(group):
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = pycomm.DataParallel(module, group=group)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank))
        model(batch).sum().backward()
        before = module[0].running_mean.clone()
        model.sync_buffers()
        model.eval()
        with torch.no_grad():
            return before, model(torch.ones(2, 4))

    (before, one), (other_before, other) = world(2).run(body)
    assert not torch.equal(before, other_before)
    assert golden.same_bits(one, other)


class Expanded(nn.Module):
    def __init__(self, buffer=False, parameter=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1).expand(4) if parameter else torch.ones(4))
        self.register_buffer("mask", torch.ones(1).expand(4) if buffer else torch.ones(4))

    def forward(self):
        return (self.weight * self.mask).sum()


@pytest.mark.parametrize("name", ["buffer", "parameter"])
def test_expanded_tensors_raise_on_all_ranks(world, name):
    def body(group):
        with pytest.raises(ValueError, match=r"(mask|weight), which is expanded"):
            pycomm.DataParallel(Expanded(**{name: True}), group=group)
        model = pycomm.DataParallel(Expanded(), group=group)
        if name == "buffer":
            model.module.mask = torch.ones(1).expand(4)
            with pytest.raises(ValueError, match="mask, which is expanded"):
                model()
            model.module.mask = torch.ones(4)
        model().backward()

    world(2).run(body)


def test_a_buffer_that_grows_is_named(world):
    def body(group):
        model = pycomm.DataParallel(Expanded(), group=group)
        if group.rank == 1:
            model.module.mask = torch.ones(5)
        with pytest.raises(ValueError, match="mask" if group.rank == 1 else "same shapes"):
            model()

    world(2).run(body)
