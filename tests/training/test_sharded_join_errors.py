"""Errors in join() of a sharded model: in the loop, on some ranks, and of ranks that disagree."""

import os
import signal

import golden
import helpers
import pytest
import sharding
import torch
from joins import backward, batch, make, state_of, values

from pycomm import optim

both_stages = pytest.mark.parametrize("stage", ["optimizer", "gradients"])


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


@both_stages
def test_parameters_that_are_changed_without_a_trace(world, stage):
    """Ranks without batches have not changed theirs, so steps were not those without shards."""

    def body(group):
        model, optimizer = make(group, stage)
        with model.join():
            for number in range([3, 1][group.rank]):
                backward(model, group.rank, number)
                optimizer.step()
                model.module[0].weight.data.clamp_(-0.05, 0.05)

    for error in errors_of(world, 2, body):
        assert isinstance(error, RuntimeError), error
        assert "differ between ranks at the end of join()" in str(error)
