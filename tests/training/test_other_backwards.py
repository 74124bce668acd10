"""Backwards through the module itself, which no forward of the wrapper announces."""

import copy

import golden
import helpers
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import pycomm
from pycomm import optim

STEPS = 4
SHARDS = (None, "optimizer", "gradients")


def make_model():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


class Training:
    """One rank's training loop, with probes: backwards through the module.

    Args:
        group: the ranks.
        shard: the wrapper's option.
        probing: the ranks that probe, in all steps but the third.
        zeroes: whether they zero gradients after that.
    """

    def __init__(self, group, shard, probing=(), zeroes=True):
        self.module = make_model()
        self.model = pycomm.DataParallel(self.module, group=group, shard=shard)
        make = optim.FusedSGD if shard else torch.optim.SGD
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self._random = torch.Generator().manual_seed(group.rank)
        self._probes, self._zeroes = group.rank in probing, zeroes

    def batch(self):
        return torch.randn(16, 8, generator=self._random)

    def probe(self, step):
        inputs = self.batch()
        if self._probes and step != 2:
            self.module(inputs).sum().backward()
            if self._zeroes:
                self.optimizer.zero_grad()

    def run(self, place):
        for step in range(STEPS):
            if place == "before the forward":
                self.probe(step)
            outputs = self.model(self.batch())
            if place == "before the backward":
                self.probe(step)
            outputs.square().mean().backward()
            if place == "before the step":
                self.probe(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if place == "after the step":
                self.probe(step)
        return [parameter.detach().clone() for parameter in self.module.parameters()]


@pytest.mark.parametrize("place", ["before the forward", "after the step"])
@pytest.mark.parametrize("probing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_that_are_zeroed_leave_no_trace(world, shard, probing, place):
    def body(group, probing):
        return Training(group, shard, probing).run(place)

    expected = world(2).run(body, ())
    for got, wanted in zip(world(2).run(body, probing), expected, strict=True):
        assert all(map(golden.same_bits, got, wanted))


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_that_stay_are_averaged_with_the_next(world, shard):
    """As in DistributedDataParallel."""

    def body(group):
        training = Training(group, shard, probing=(1,), zeroes=False)
        probed, batch = training.batch(), training.batch()
        if group.rank == 1:
            training.module(probed).sum().backward()
        training.model(batch).square().mean().backward()
        training.model.reduce_gradients()
        return probed, batch, [parameter.grad.clone() for parameter in training.module.parameters()]

    seen = world(2).run(body)
    module = make_model()
    loss = module(seen[1][0]).sum() + sum(module(batch).square().mean() for _, batch, _ in seen)
    (loss / 2).backward()
    for _, _, gradients in seen:
        for parameter, got in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(got, parameter.grad)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_with_a_gradient_that_is_no_average_raises(world, shard):
    def body(group):
        training = Training(group, shard, probing=(0, 1), zeroes=False)
        with pytest.raises(RuntimeError, match=r"average: a backward|on a divided gradient"):
            training.run("before the step")
        training.optimizer.zero_grad()
        return training.run("no probe")

    one, other = world(2).run(body)
    assert all(map(golden.same_bits, one, other))


def test_clipping_makes_no_average_of_it(world):
    def body(group):
        training = Training(group, None)
        training.model(training.batch()).sum().backward()
        training.module(training.batch()).sum().backward()
        torch.nn.utils.clip_grad_norm_(training.module.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="average: a backward"):
            training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        training.optimizer.step()

    world(2).run(body)


def test_a_hook_that_drops_the_gradient(world):
    def body(group):
        module = make_model()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        pycomm.DataParallel(module, group=group)
        module(torch.ones(2, 8)).sum().backward()

    world(2).run(body)


class Renormed(nn.Module):
    """Writes its weight in every forward, and again in backward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, max_norm=0.5)

    def forward(self, numbers):
        return torch.utils.checkpoint.checkpoint(
            self.embedding, numbers, use_reentrant=False, preserve_rng_state=False
        )


def test_an_embedding_that_renorms_its_weight_in_backward(world):
    def body(group):
        model = pycomm.DataParallel(Renormed(), group=group)
        for _ in range(2):
            with torch.no_grad():
                model.module.embedding.weight.mul_(10)
            model(torch.tensor([1, 2])).sum().backward()

    world(2).run(body)


@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_that_probe_between_forward_and_backward(world, shard):
    """The probe gets the exchange of the backward, as in torch, so that all ranks must do so."""

    def body(group):
        with pytest.raises(
            (RuntimeError, pycomm.Mismatch), match=r"outputs|sharded_step"
        ) as raised:
            Training(group, shard, probing=(0,)).run("before the backward")
        return type(raised.value)

    assert len(set(world(2).run(body))) == 1


def test_each_rank_s_own_step_is_for_no_sync(world):
    def body(group):
        training = Training(group, None)
        alone = copy.deepcopy(training.module)
        inputs = training.batch()
        with training.model.no_sync():
            training.model(inputs).sum().backward()
        training.optimizer.step()
        alone(inputs).sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        assert all(map(golden.same_bits, training.module.parameters(), alone.parameters()))

    world(2).run(body)


def accumulated(training, as_closure):
    """The parameters after a step whose first backward was in no_sync()."""

    def last():
        loss = training.model(training.batch()).square().mean()
        loss.backward()
        return loss

    with training.model.no_sync():
        training.model(training.batch()).square().mean().backward()
    if as_closure:
        training.optimizer.step(closure=last)
    else:
        last()
        training.optimizer.step()
    return [parameter.detach().clone() for parameter in training.module.parameters()]


@pytest.mark.parametrize("shard", SHARDS)
def test_a_closure_s_gradients_count_not_those_before_it(world, shard):
    """As in Lightning, which passes the last batch of an accumulation as a closure."""

    def body(group):
        plain, by_closure = (accumulated(Training(group, shard), way) for way in (False, True))
        assert all(map(golden.same_bits, plain, by_closure))

    world(2).run(body)


def test_a_closure_that_goes_round_the_wrapper_is_refused(world):
    def body(group):
        training = Training(group, None)

        def around():
            training.module(training.batch()).sum().backward()

        around()
        with pytest.raises(RuntimeError, match="is not the ranks' average"):
            training.optimizer.step(around)

    world(2).run(body)


def step_around(rank, size, store, by_name):
    """What a step raises whose closure goes round the wrapper, as nothing before it has."""
    with helpers.member(rank, size, store) as group:
        training = Training(group, None)

        def around():
            training.model(training.batch()).sum().backward()
            training.module(training.batch()).sum().backward()

        try:
            if by_name:
                training.optimizer.step(closure=around)
            else:
                training.optimizer.step(around)
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("by_name", [False, True])
def test_the_first_step_with_such_a_closure_is_told_afterwards(by_name):
    for told in helpers.run_ranks(2, step_around, by_name):
        assert "is not the ranks' average" in told
        assert told.endswith("The step has been taken, so parameters differ between ranks")


class Scaled(torch.optim.SGD):
    """An optimizer of a program, whose first argument is no closure."""

    def step(self, factor=1.0, closure=None):
        loss = None if closure is None else closure()
        self.factor = factor
        super().step()
        return loss


def test_other_arguments_of_steps_stay_as_they_are(world):
    def body(group):
        training = Training(group, None)
        training.module(training.batch()).sum().backward()  # from now on, steps are checked
        other = torch.nn.Linear(2, 1)
        optimizer, calls = Scaled(other.parameters(), lr=0.1), []
        optimizer.step(0.5)
        assert optimizer.factor == 0.5
        optimizer.step(0.25, closure=lambda: calls.append(1))
        assert (optimizer.factor, calls) == (0.25, [1])
        optimizer.step(closure=None)
        assert optimizer.factor == 1.0

    world(2).run(body)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_penalty_through_the_module(world, shard):
    """In the backward of the loss; its graph does not pass the wrapper's outputs."""

    def loss_of(call, module, batch, probed):
        probed = probed.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(probed).sum(), probed, create_graph=True)
        return call(batch).square().mean() + (slope.norm(dim=1) - 1).square().mean()

    def body(group):
        training = Training(group, shard)
        batches = training.batch(), training.batch()
        for _ in range(2):
            loss_of(training.model, training.module, *batches).backward()
            training.model.reduce_gradients()
            gradients = [parameter.grad.clone() for parameter in training.module.parameters()]
            training.optimizer.zero_grad()
        return batches, gradients

    seen = world(2).run(body)
    module = make_model()
    (sum(loss_of(module, module, *batches) for batches, _ in seen) / 2).backward()
    for _, gradients in seen:
        for parameter, got in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(got, parameter.grad)


def step_in_hooks(parameters):
    """Steps each parameter as soon as it has its gradient."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in parameters}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def step_as_torch_does(parameters):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})


@pytest.mark.parametrize("register", [step_in_hooks, step_as_torch_does])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stepping", [(0, 1), (1,)])
@pytest.mark.parametrize("shard", SHARDS)
def test_steps_within_a_backward_raise(world, shard, stepping, first, register):
    """They would use each rank's own gradients."""

    def body(group):
        module = make_model()
        if first and group.rank in stepping:
            register(list(module.parameters()))
        model = pycomm.DataParallel(module, group=group, shard=shard)
        if not first and group.rank in stepping:
            register(list(module.parameters()))
        where = ", ".join(map(str, stepping))
        with pytest.raises(RuntimeError, match=rf"changed during backward on ranks \[{where}\]"):
            model(torch.ones(2, 8)).sum().backward()

    world(2).run(body)
