"""Ranks with different numbers of batches and a sharded model, in join().

All ranks must end with the bits of a model without shards on the rank that trained longest.
"""

import copy
import os
import signal

import golden
import helpers
import hypothesis.strategies as st
import pytest
import sharding
import torch
from hypothesis import given, settings
from sharding import Parameter, Program, Step
from sharding_programs import programs
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm import optim

STAGES = ["optimizer", "gradients"]
both_stages = pytest.mark.parametrize("stage", STAGES)
PARAMETERS = (Parameter((5000,)), Parameter((64, 65), group=1), Parameter((7,)))
FOUR = (Step(),) * 4


@st.composite
def joins(draw):
    program = draw(programs(joins=True))
    most = len(program.steps)
    return program, [draw(st.integers(0, most)) for _ in range(program.ranks)]


@given(drawn=joins())
@settings(max_examples=100)
def test_bits_are_those_without_shards(drawn):
    sharding.check_join(*drawn)


def check(batches, steps=FOUR, parameters=PARAMETERS, dtype=torch.float32, **options):
    program = Program(len(batches), dtype, parameters, steps, **options)
    sharding.check_join(program, batches)


@pytest.mark.parametrize("rule", ["adamw", "momentum", "lamb"])
@pytest.mark.parametrize("batches", [[2, 4], [4, 2], [0, 3], [3, 3], [0, 0], [1, 4, 0]], ids=str)
def test_batches_of_ranks(batches, rule):
    check(batches, rule=rule, options={"max_norm": 0.5}, scheduled=True)


def test_loss_scaling():
    steps = (Step(), Step(overflows_on=1), Step(), Step(overflows_on=1), Step())
    check([1, 5, 2], steps, dtype=torch.float16, scaled=True, options={"master_weights": "fp32"})


@pytest.mark.parametrize("zero", ["none", "optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients(zero, set_to_none):
    """Ranks leave the loop between two backwards of one step, too."""
    one, two = Step(steps=0, zero=zero, set_to_none=set_to_none), Step(zero="none")
    check([3, 6, 0], (one, two) * 3)
    check([2, 3, 4], (Step(without_sync=2, backwards=2, zero=zero, set_to_none=set_to_none),) * 4)


def test_gradients_that_are_read_or_changed():
    check([1, 4, 2], (Step(reads=True), Step(clips=True), Step(clips=True), Step(reads=True)))


def test_parameters_that_are_changed_by_hand():
    edited = (Step(edits=True),) * 4
    for master in (None, "fp32", "remainder"):
        check([1, 4], edited, dtype=torch.bfloat16, options={"master_weights": master})


def test_two_optimizers():
    check([1, 4, 3], optimizers=2)


def test_parameters_that_few_ranks_use():
    nobody, not_last = frozenset(range(3)), frozenset([2])
    parameters = (*PARAMETERS, Parameter((50,), unused_on=nobody), Parameter((9,), frozen=True))
    check([4, 1, 3], parameters=(*parameters, Parameter((1100,), unused_on=not_last)))


def test_steps_that_all_ranks_skip():
    check([1, 4], (Step(), Step(steps=0), Step(steps=2), Step(steps=0)))


def test_checkpoints_in_join():
    check([1, 4, 0], (Step(checkpoint=True),) * 4)


def network():
    torch.manual_seed(0)
    layers = nn.Linear(40, 130), nn.BatchNorm1d(130), nn.GELU(), nn.Linear(130, 33)
    return nn.Sequential(*layers)


NETWORK = network()


def make(group, stage, **options):
    net = copy.deepcopy(NETWORK)
    model = pycomm.DataParallel(net, group=group, shard=stage, bucket_cap_mb=0.01)
    return model, optim.FusedAdamW(model.parameters(), lr=0.01, **options)


def batch(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, rank, number):
    model.zero_grad()
    model(batch(rank, number)).square().mean().backward()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_processes(group, stage, batches):
    """Returns parameters and states at the ends of the loop and of join(), and those after more."""
    model, optimizer = make(group, stage)
    seen = []
    for _ in range(2):
        with model.join():
            for number in range(batches[group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
            if stage is None:
                seen.append(copy.deepcopy((values(model), optimizer.state_dict())))
            if batches[group.rank] == max(batches):
                model(batch(group.rank, 0))  # without a backward
        if stage is not None:
            seen.append(copy.deepcopy((values(model), optimizer.state_dict())))
    assert stage is None or model.comm_state.step == 2 * max(batches)
    backward(model, group.rank, 9)  # training goes on without join()
    optimizer.step()
    return [*seen, (values(model), optimizer.state_dict())]


@both_stages
def test_processes_join_twice_and_train_on(stage):
    plain, runs = (helpers.run_group(3, in_processes, s, [3, 0, 2]) for s in (None, stage))
    for run in runs:
        assert sharding.difference(run[0], plain[0][0]) is None
        assert sharding.difference(run, runs[0]) is None


@both_stages
def test_buffers_and_frozen_parameters_are_the_last_rank_s(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        model.module.register_parameter("frozen", frozen)
        with model.join():
            for number in range([1, 3][group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
                frozen.add_(1 + group.rank)
            before = state_of(model)
        return before, state_of(model)

    (_, first), (expected, second) = world(2).run(body)
    assert sharding.difference(first, expected) is None
    assert sharding.difference(second, expected) is None


@both_stages
def test_options_are_those_of_the_ranks_that_go_on(world, stage):
    """Also if they are tensors, which stay the same."""

    def body(group):
        rate = torch.tensor(0.01)
        model, optimizer = make(group, stage)
        optimizer.param_groups[0]["lr"] = rate
        with model.join():
            for number in range([1, 3][group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
                rate.mul_(0.5)
                optimizer.max_norm = 1.0 + number
        return rate.item(), optimizer.param_groups[0]["lr"] is rate, state_of(model)

    (rate, is_same, first), (expected, _, second) = world(2).run(body)
    assert (rate, is_same) == (expected, True)
    assert sharding.difference(first, second) is None


@both_stages
def test_optimizers_of_torch(world, stage):
    """They keep all states on every rank; at the end parameters are those of the last one."""

    def body(group, shard):
        model, _ = make(group, shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with model.join():
            for number in range([1, 4][group.rank]):
                backward(model, group.rank, number)
                model.reduce_gradients()
                optimizer.step()
        return state_of(model)

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


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


@both_stages
def test_weights_that_are_zero_on_all_ranks(world, stage):
    """Those with batches raise an error, and all go on."""

    def body(group, shard):
        model, optimizer = make(group, shard)
        with model.join():
            for number in range([1, 4][group.rank]):
                model.zero_grad()
                loss = model(batch(group.rank, number), weight=float(number != 1)).square().mean()
                if number == 1:
                    with pytest.raises(ValueError, match="got 0 on all"):
                        loss.backward()
                else:
                    loss.backward()
                    optimizer.step()
        return values(model)

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@both_stages
@pytest.mark.parametrize("use", ["penalty", "checkpoint", "closure", "torch's scaler", "dropped"])
def test_other_loops(world, stage, use):
    def body(group, shard):
        model, optimizer = make(group, shard)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        with model.join():
            for number in range([1, 4][group.rank]):
                model.zero_grad()
                train(model, optimizer, scaler, batch(group.rank, number).requires_grad_(), number)
        return values(model)

    def train(model, optimizer, scaler, x, number):
        if use == "penalty":
            loss = model(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + gradient.square().sum()).backward()
            optimizer.step()
        elif use == "checkpoint":
            checkpoint(model, x, use_reentrant=True).square().mean().backward()
            optimizer.step()
        elif use == "dropped":
            model(x).square().mean().backward()
            model.module[number % 2].bias.grad = None
            optimizer.step()
        elif use == "closure":

            def closure():
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        else:
            loss = model(x).square().mean() * (torch.inf if number == 2 else 1)
            scaler.scale(loss).backward()
            model.reduce_gradients()
            scaler.step(optimizer)
            scaler.update()

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "second loss"])
@both_stages
def test_errors_that_a_loop_catches(world, stage, where):
    """A batch is skipped on all ranks, as without shards; also the last one of a rank."""

    def body(group, shard):
        model, optimizer = make(group, shard)
        steps = []
        with model.join():
            for number in range([2, 5, 4][group.rank]):
                try:
                    train(model, group.rank, number)
                except (OwnError, RuntimeError):
                    continue  # gradients are dropped on all ranks
                optimizer.step()
                optimizer.zero_grad()
                steps.append(number)
        return steps, values(model)

    def train(model, rank, number):
        fails = (rank, number) in [(1, 3), (0, 1), (1, 0)]
        x = batch(rank, number)
        if fails and where == "backward":
            x = Raises.apply(x.requires_grad_())
        out = model(x[:, :3] if fails and where == "forward" else x)
        if fails and where == "loss":
            raise OwnError
        out.square().mean().backward()
        if where == "second loss":
            loss = model(x).square().mean()
            if fails:
                raise OwnError  # the others average the first gradients before they add to them
            loss.backward()

    plain, sharded = (world(3).run(body, shard) for shard in (None, stage))
    assert [steps for steps, _ in sharded] == [[], [2, 4], [2]]
    assert sharding.difference(plain, sharded) is None


def errors_of(world, size, body):
    """The error of every rank's body, which all end."""
    seen = [None] * size

    def caught(group):
        try:
            body(group)
        except Exception as error:
            seen[group.rank] = error

    world(size, timeout=10).run(caught)
    return seen


@pytest.mark.parametrize("where", ["backward", "step"])
@both_stages
def test_an_error_that_leaves_join(world, stage, where):
    """All ranks raise at once; when all have left, they can train on."""

    def body(group):
        model, optimizer = make(group, stage)
        with pytest.raises((OwnError, RuntimeError)) as caught:
            train(model, optimizer, group.rank)
        backward(model, group.rank, 5)
        optimizer.step()
        return str(caught.value), state_of(model)["0.weight"]

    def train(model, optimizer, rank):
        with model.join():
            for number in range([4, 1, 3][rank]):
                fails = (rank, number) == (2, 1)
                model.zero_grad()
                x = batch(rank, number).requires_grad_()
                model(Raises.apply(x) if fails and where == "backward" else x).sum().backward()
                optimizer.step()
                if fails:
                    raise OwnError

    runs = world(3, timeout=10).run(body)
    if where == "backward":
        assert "backward has raised on ranks [2]" in runs[0][0]
        assert "have raised an error inside of join()" in runs[1][0]
    else:
        assert all("a forward and an error in the loop" in runs[rank][0] for rank in (0, 1))
    assert all(golden.same_bits(weight, runs[0][1]) for _, weight in runs)


@both_stages
def test_ranks_that_do_different_things(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        with model.join():
            for number in range([3, 3, 0][group.rank]):
                backward(model, group.rank, number)
                if group.rank == 0:
                    optimizer.step()

    for error in errors_of(world, 3, body):
        assert isinstance(error, RuntimeError), error
        assert "come to a forward and optimizer.step()" in str(error)


@both_stages
def test_an_optimizer_that_another_rank_does_not_have(world, stage):
    def body(group):
        model, _ = make(group, stage)
        with model.join():
            for number in range([2, 0][group.rank]):
                backward(model, group.rank, number)
                optim.FusedSGD(model.parameters(), lr=0.1).step()

    for error in errors_of(world, 2, body):
        assert isinstance(error, RuntimeError), error
        assert "rank 1 cannot take part in join() any more: it has no FusedSGD" in str(error)


@pytest.mark.parametrize("batches", [1, 2])
@both_stages
def test_gradients_dropped_too_early(world, stage, batches):
    """They still count in the others' next average, also if this rank has more batches."""

    def body(group):
        model, _ = make(group, stage)
        with model.join():
            for number in range([2, batches][group.rank]):
                loss = model(batch(group.rank, number)).square().mean()
                if (group.rank, number) == (1, 1):
                    break
                loss.backward()
            if group.rank == 1:
                model.zero_grad()

    for error in errors_of(world, 2, body):
        assert isinstance(error, RuntimeError), error
        assert "dropped or changed before" in str(error)


@pytest.mark.parametrize("call", ["load_state_dict", "sharded_state_dict", "full_weights"])
def test_calls_that_are_refused(world, call):
    def body(group):
        model, optimizer = make(group, "optimizer")
        argument = {
            "load_state_dict": optimizer.state_dict(),
            "sharded_state_dict": model,
            "full_weights": next(model.parameters()),
        }[call]
        with pytest.raises(RuntimeError, match="inside of join"), model.join():
            getattr(optimizer, call)(argument)

    world(1).run(body)


def test_join_inside_of_join(world):
    def body(group):
        one, other = (make(group, "optimizer")[0] for _ in range(2))
        with one.join(), pytest.raises(ValueError, match="inside of another"), other.join():
            pass

    world(2).run(body)


def test_groups_that_span_nodes(world):
    """Each node divides the states anew."""

    def body(group, stage):
        model, optimizer = make(group, stage)
        with model.join():
            for number in range([1, 4, 0, 2][group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
        return values(model)

    plain, sharded = (world(4, nodes=[2, 2]).run(body, stage) for stage in (None, "optimizer"))
    assert sharding.difference(plain, sharded) is None


def killed_in_join(group, stage):
    model, optimizer = make(group, stage)
    with model.join():
        for number in range([4, 0, 4][group.rank]):
            if (group.rank, number) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, group.rank, number)
            optimizer.step()


@both_stages
def test_a_killed_rank(stage):
    """A rank without batches learns of it, too."""
    with helpers.Ranks(3, helpers.in_group, killed_in_join, {"timeout": 30}, stage) as ranks:
        for outcome in ranks.wait_for([0, 1]):
            assert type(outcome.error).__name__ == "PeerDied", outcome
            assert outcome.error.rank == 2
