"""Parameters and buffers that torch's wrapper ignores are each rank's own."""

import golden
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks, optim

IGNORED = ["expert.weight", "expert.bias", "tower.weight", "expert.seen"]


class Mixture(nn.Module):
    """A router that all ranks have in common, an expert per rank, and a frozen tower."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Linear(8, 8)
        for parameter in self.router.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        # Ranks' experts differ in shape, too.
        self.expert = nn.Linear(8, 4 + rank)
        self.expert.register_buffer("seen", torch.full((3 + rank,), float(rank)))
        for parameter in self.expert.parameters():
            parameter.data.fill_(0.1 * (rank + 1))
        self.tower = nn.Linear(4 + rank, 4, bias=False).requires_grad_(False)
        self.tower.weight.data.fill_(rank + 1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, IGNORED)

    def forward(self, batch):
        self.expert.seen += 1
        return self.tower(self.expert(self.router(batch).tanh()))


def batch_of(rank, step):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def by_hand(ranks, steps):
    """The ranks' models after steps in which only routers get averages."""
    models = [Mixture(rank) for rank in range(ranks)]
    steppers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch_of(rank, step)).square().mean().backward()
        for parameters in zip(*(model.router.parameters() for model in models), strict=True):
            mean = sum(parameter.grad for parameter in parameters) / ranks
            for parameter in parameters:
                parameter.grad = mean.clone()
        for stepper in steppers:
            stepper.step()
    return models


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_each_rank_keeps_and_trains_its_own(world, shard):
    def body(group):
        module = Mixture(group.rank)
        model = pycomm.DataParallel(module, group=group, shard=shard)
        make = optim.FusedSGD if shard else torch.optim.SGD  # takes sharded ones, or others
        optimizers = [make(each.parameters(), lr=0.05) for each in (module.router, module.expert)]
        for step in range(3):
            model.zero_grad()
            model(batch_of(group.rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return {name: value.clone() for name, value in module.state_dict().items()}

    for got, expected in zip(world(2).run(body), by_hand(2, 3), strict=True):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(got[name], value)


def test_join_and_checkpoints_leave_them_alone(world):
    def body(group):
        module = Mixture(group.rank)
        model = pycomm.DataParallel(module, group=group)
        with model.join():
            for step in range(2 + group.rank):
                model(batch_of(group.rank, step)).sum().backward()
        assert module.tower.weight.eq(group.rank + 1).all()
        return [parameter.detach().clone() for parameter in module.router.parameters()]

    one, other = world(2).run(body)
    assert all(map(golden.same_bits, one, other))


def test_local_sgd_must_not_exchange_them(world):
    def body(group):
        module = Mixture(group.rank)
        named = dict(module.named_parameters())
        stepper = torch.optim.SGD(module.parameters(), lr=0.1)
        state = hooks.LocalSGDState(named.items(), stepper, period=2, group=group)
        with pytest.raises(ValueError, match=r"params must leave out expert\.weight"):
            pycomm.DataParallel(module, state=state)
        stepper = torch.optim.SGD(module.router.parameters(), lr=0.1)
        routers = [(name, each) for name, each in named.items() if name.startswith("router")]
        state = hooks.LocalSGDState(routers, stepper, period=1, group=group)
        model = pycomm.DataParallel(module, state=state)
        model(batch_of(group.rank, 0)).sum().backward()
        stepper.step()
        state.step()
        assert module.expert.weight.eq(0.1 * (group.rank + 1)).all()
        return [parameter.detach().clone() for parameter in module.router.parameters()]

    one, other = world(2).run(body)
    assert all(map(golden.same_bits, one, other))
