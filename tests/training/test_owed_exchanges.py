"""A rank whose forward has raised still makes later calls together with the other ranks."""

import copy

import golden
import pytest
import torch
from torch import nn

import pycomm
from pycomm import optim

SHARDS = (None, "optimizer", "gradients")
generator = torch.Generator().manual_seed(0)
NET = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
for parameter in NET.parameters():
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)


class OwnError(Exception):
    """An error of the test's own."""


class Training:
    """One rank's model and optimizer."""

    def __init__(self, group, shard):
        self.group, self.module = group, copy.deepcopy(NET)
        self.model = pycomm.DataParallel(self.module, group=group, shard=shard)
        self.optimizer = optim.FusedAdamW(self.model.parameters(), lr=0.01)

    def backward(self, seed, raises=False):
        """Returns True if it succeeded."""
        seed = 10 * seed + self.group.rank
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

        def fail(*_):
            raise OwnError

        hook = self.module[1].register_forward_hook(fail) if raises else None
        try:
            loss = self.model(batch).square().mean()
        except OwnError:
            return False
        finally:
            if hook is not None:
                hook.remove()
        try:
            loss.backward()
        except RuntimeError as error:
            if "backward has raised on ranks" not in str(error):
                raise
            return False
        return True

    def parameters(self):
        return [parameter.detach().clone() for parameter in self.module.parameters()]


CALLS = {
    "step": lambda training: training.optimizer.step(),
    "state_dict": lambda training: training.optimizer.state_dict(),
    "reduce_gradients": lambda training: training.model.reduce_gradients(),
    "model's state_dict": lambda training: training.model.state_dict(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shard", SHARDS)
def test_what_comes_after_an_error_that_was_caught(world, shard, call):
    def body(group):
        training = Training(group, shard)
        for step in range(5):
            lost = step == 2
            assert training.backward(step, raises=lost and group.rank == 1) != lost
            CALLS[call if lost else "step"](training)
            training.optimizer.zero_grad()
        return training.parameters()

    alone = copy.deepcopy(NET)
    optimizer = optim.FusedAdamW(alone.parameters(), lr=0.01)
    for step in (0, 1, 3, 4):
        for rank in range(3):
            batch = torch.Generator().manual_seed(10 * step + rank)
            (alone(torch.randn(4, 8, generator=batch)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got in world(3).run(body):
        for one, expected in zip(got, alone.parameters(), strict=True):
            torch.testing.assert_close(one, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_rank_that_empties_its_gradients_after_an_error(world, shard, set_to_none, weighs):
    """The others still add to averages of the backward before."""

    def body(group):
        training = Training(group, shard)
        weight = group.rank + 1.0 if weighs else None
        seen = []
        for step in range(4):
            for micro in range(3):
                training.model.weigh(weight)
                raises = step == 1 and micro == 1 and group.rank == 1
                fine = training.backward(3 * step + micro, raises)
                if not fine:
                    training.optimizer.zero_grad(set_to_none=set_to_none)
            seen.append(fine)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=set_to_none)
        assert all(seen)
        return training.parameters()

    first, *others = world(2).run(body)
    for other in others:
        assert all(map(golden.same_bits, first, other))
    if shard is not None:
        for unsharded in world(2).run(lambda group: body_of(group, None, set_to_none, weighs)):
            assert all(map(golden.same_bits, first, unsharded))


def body_of(group, shard, set_to_none, weighs):
    """The same without an error in the second micro-batch of step 1, which counts on no rank."""
    training = Training(group, shard)
    for step in range(4):
        for micro in range(3):
            if step == 1 and micro < 2:
                continue  # dropped by the error
            training.model.weigh(group.rank + 1.0 if weighs else None)
            assert training.backward(3 * step + micro)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=set_to_none)
    return training.parameters()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_of_another_model(world, shard):
    """Of two in turn, as in a GAN: the others wait in the backward of the first one."""

    def body(group):
        first, second = Training(group, shard), Training(group, shard)
        for step in range(3):
            assert second.backward(step)
            assert first.backward(step, raises=step == 1 and group.rank == 1) == (step != 1)
            for training in (second, first):
                training.optimizer.step()
                training.optimizer.zero_grad()
        return first.parameters() + second.parameters()

    one, other = world(2).run(body)
    assert all(map(golden.same_bits, one, other))
