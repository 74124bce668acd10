"""Ranks with different numbers of batches and a sharded model, in join().

All ranks must end with the bits of a model without shards on the rank that trained longest.
"""

import copy

import helpers
import hypothesis.strategies as st
import pytest
import sharding
import torch
from hypothesis import given, settings
from joins import backward, batch, make, state_of, values
from sharding import Parameter, Program, Step
from sharding_programs import programs
from torch import nn
from torch.utils.checkpoint import checkpoint

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
@settings(max_examples=50)
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
@pytest.mark.parametrize("batches", [[3, 3], [1, 3]], ids=str)
def test_parameters_that_a_rank_writes_after_its_last_batch(world, stage, batches):
    """Those of the ranks that go on count, or those of the last rank."""

    def body(group, shard):
        model, optimizer = make(group, shard)
        with model.join():
            for number in range(batches[group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
            if group.rank == 0:
                with torch.no_grad():
                    model.module[0].weight.mul_(0.5)
        return values(model)

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


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
