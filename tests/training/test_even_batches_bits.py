"""Training with pycomm.even_batches: all ranks have the bits of join() without shards.

After every step, parameters are those of the rank that has most batches.
"""

import copy

import helpers
import hypothesis.strategies as st
import pytest
import sharding
import sweep
import torch
from hypothesis import given, settings
from sharding import Parameter, Program, Step
from sharding_programs import programs
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm import optim

PARAMETERS = (Parameter((5000,)), Parameter((64, 65), group=1), Parameter((7,)))
FOUR = (Step(),) * 4


@st.composite
def uneven(draw):
    program = draw(programs(uneven=True))
    most = len(program.steps)
    return program, [draw(st.integers(1, most)) for _ in range(program.ranks)]


@pytest.mark.slow
@given(drawn=uneven())
@settings(max_examples=6)
def test_bits_are_those_of_join_without_shards(drawn):
    sharding.check_even(*drawn)


@pytest.mark.slow
@given(drawn=uneven())
@settings(max_examples=50)
def test_bits_are_those_of_join_in_more_programs(drawn):
    sharding.check_even(*drawn)


def check(batches, steps=FOUR, parameters=PARAMETERS, dtype=torch.float32, **options):
    program = Program(len(batches), dtype, parameters, steps, **options)
    sharding.check_even(program, batches)


@pytest.mark.parametrize("rule", ["adamw", "momentum", "lamb"])
@pytest.mark.parametrize("batches", [[1, 4], [4, 1], [3, 3], [1, 4, 2]], ids=str)
def test_batches_of_ranks(batches, rule):
    check(batches, rule=rule, options={"max_norm": 0.5}, scheduled=True)


@pytest.mark.parametrize("compression", [None, pycomm.Int8(), pycomm.TopK(0.1)], ids=str)
@pytest.mark.parametrize("nodes", [None, (2, 2)])
def test_residuals_and_nodes(nodes, compression):
    check([1, 4, 3, 2], nodes=nodes, compression=compression)


def test_loss_scaling():
    """Also if a batch that overflows is repeated."""
    steps = (Step(), Step(overflows_on=1), Step(), Step(overflows_on=1), Step())
    check([1, 5, 2], steps, dtype=torch.float16, scaled=True, options={"master_weights": "fp32"})
    check([5, 1, 2], steps, dtype=torch.float16, scaled=True, options={"master_weights": "fp32"})


@pytest.mark.parametrize(
    ("set_to_none", "zero"), sweep.half_of([True, False], ["none", "optimizer", "model"])
)
def test_accumulated_gradients(zero, set_to_none):
    """Ranks run out of batches between two backwards of one step, too."""
    one, two = Step(steps=0, zero=zero, set_to_none=set_to_none), Step(zero="none")
    check([3, 6, 1], (one, two) * 3)
    check([2, 3, 4], (Step(without_sync=2, backwards=2, zero=zero, set_to_none=set_to_none),) * 4)


def test_gradients_that_are_read_or_changed():
    check([1, 4, 2], (Step(reads=True), Step(clips=True), Step(clips=True), Step(reads=True)))


@pytest.mark.parametrize("master", [None, "fp32", "remainder"])
def test_parameters_that_are_changed_by_hand(master):
    edited = (Step(edits=True),) * 4
    check([1, 4], edited, dtype=torch.bfloat16, options={"master_weights": master})


def test_weights_of_ones_own():
    check([1, 4, 2], (Step(weighs=True),) * 4)


def test_two_optimizers():
    check([1, 4, 3], optimizers=2)


@pytest.mark.parametrize("unused_on", [[2], [0, 2]], ids=str)
def test_parameters_that_few_ranks_use(unused_on):
    """The only ranks that use one may have run out of batches: then nobody steps it."""
    few = Parameter((1100,), unused_on=frozenset(unused_on))
    nobody = Parameter((50,), unused_on=frozenset(range(3)))
    check([4, 1, 3], parameters=(*PARAMETERS, few, nobody, Parameter((9,), frozen=True)))


def test_steps_that_all_ranks_skip():
    check([1, 4], (Step(), Step(steps=0), Step(steps=2), Step(steps=0)))


# A small model, in other loops.


def network():
    torch.manual_seed(0)
    layers = nn.Linear(40, 130), nn.BatchNorm1d(130), nn.GELU(), nn.Linear(130, 33)
    return nn.Sequential(*layers)


NETWORK = network()


def batch(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()


def penalty(model, optimizer, x):
    x.requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()


def reentrant_checkpoint(model, optimizer, x):
    x.requires_grad_()
    output = checkpoint(model, x, use_reentrant=True, preserve_rng_state=False)
    output.square().mean().backward()
    optimizer.step()


def closure(model, optimizer, x):
    def loss():
        made = model(x).square().mean()
        made.backward()
        return made

    optimizer.step(loss)


def averages_first(model, optimizer, x):
    model(x).square().mean().backward()
    model.reduce_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


STEPS = {
    step.__name__: step
    for step in (plain_step, penalty, reentrant_checkpoint, closure, averages_first)
}


def run(group, stage, batches, step, join=False):
    """Trains; returns the parameters after each step, and the optimizer's last states."""
    net = copy.deepcopy(NETWORK)
    model = pycomm.DataParallel(net, group=group, shard=stage, bucket_cap_mb=0.01)
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
    own, seen = batches[group.rank], []

    def train(number):
        model.zero_grad()
        STEPS[step](model, optimizer, batch(group.rank, number))
        seen.append([parameter.detach().clone() for parameter in model.parameters()])

    if join:
        with model.join():
            for number in range(own):
                train(number)
            return seen, copy.deepcopy(optimizer.state_dict())
    for number, weight in pycomm.even_batches(range(own), group):
        model.weigh(weight)
        train(number)
    return seen, optimizer.state_dict()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stage", [None, "optimizer", "gradients"])
def test_other_loops(world, stage, step):
    batches = [2, 4, 1]
    joined = world(3).run(run, None, batches, step, True)
    for even in world(3).run(run, stage, batches, step):
        assert len(even[0]) == 4
        assert sharding.difference(even, joined[1]) is None


@pytest.mark.parametrize("stage", [None, "optimizer", "gradients"])
def test_processes(stage):
    batches = [3, 1, 2]
    joined = helpers.run_group(3, run, None, batches, "plain_step", True)
    for even in helpers.run_group(3, run, stage, batches, "plain_step"):
        assert sharding.difference(even, joined[0]) is None


def test_gradient_accumulation(world):
    """A loader yields lists of batches; the last forward's weight counts for the whole step."""

    def body(group, join):
        net = copy.deepcopy(NETWORK)
        model = pycomm.DataParallel(net, group=group, shard=None if join else "optimizer")
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        lists = [[[0, 1], [2]], [[0, 1], [2, 3], [4]]][group.rank]
        seen = []

        def train(numbers, **weight):
            model.zero_grad()
            for number in numbers[:-1]:
                with model.no_sync():
                    model(batch(group.rank, number)).square().mean().backward()
            model(batch(group.rank, numbers[-1]), **weight).square().mean().backward()
            optimizer.step()
            seen.append([parameter.detach().clone() for parameter in model.parameters()])

        if join:
            with model.join():
                for numbers in lists:
                    train(numbers)
        else:
            for numbers, weight in pycomm.even_batches(lists, group):
                train(numbers, weight=weight)
        return seen

    joined, even = (world(2).run(body, join) for join in (True, False))
    for seen in even:
        assert sharding.difference(seen, joined[1]) is None


class OwnError(Exception):
    pass


class Raises(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise OwnError


@pytest.mark.parametrize(
    ("stage", "where"),
    sweep.a_third_of(
        [None, "optimizer", "gradients"], ["forward", "loss", "backward", "second loss"]
    ),
)
def test_errors_that_a_loop_catches(world, stage, where):
    """All ranks skip the batch, as in join(); also the first one, and the last one of a rank."""
    failing = [(0, 2), (1, 0), (1, 4)]  # ranks and steps

    def body(group, shard, join):
        net = copy.deepcopy(NETWORK)
        model = pycomm.DataParallel(net, group=group, shard=shard, bucket_cap_mb=0.01)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        own, seen = [3, 6, 4][group.rank], []

        def step(number, x, weight):
            fails = (group.rank, number) in failing
            if fails and where == "backward":
                x = Raises.apply(x.requires_grad_())
            out = model(x[:, :3] if fails and where == "forward" else x, weight=weight)
            if fails and where == "loss":
                raise OwnError
            out.square().mean().backward()
            if where == "second loss":
                loss = model(x, weight=weight).square().mean()
                if fails:
                    raise OwnError  # the others average the first gradients before they add to them
                loss.backward()
            optimizer.step()

        def train(number, x, weight):
            try:
                step(number, x, weight)
            except pycomm.PycommError:
                raise
            except (OwnError, RuntimeError):
                return  # gradients are dropped on all ranks
            optimizer.zero_grad()
            seen.append((number, [parameter.detach().clone() for parameter in model.parameters()]))

        if join:
            with model.join():
                for number in range(own):
                    train(number, batch(group.rank, number), 1.0)
        else:
            numbered = enumerate(pycomm.even_batches(range(own), group))
            for number, (of_batch, weight) in numbered:
                train(number, batch(group.rank, of_batch), weight)
        return seen

    _, joined, _ = world(3, timeout=20).run(body, None, True)
    assert [number for number, _ in joined] == [1, 3, 5]
    for seen in world(3, timeout=20).run(body, stage, False):
        assert sharding.difference(seen, joined) is None


def test_join_is_refused_with_shards(world):
    def body(group, stage):
        model = pycomm.DataParallel(network(), group=group, shard=stage)
        with pytest.raises(ValueError, match=r"use pycomm\.even_batches"), model.join():
            pass

    for stage in ("optimizer", "gradients"):
        world(2).run(body, stage)
