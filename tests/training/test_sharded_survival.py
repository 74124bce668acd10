"""Sharded training goes on when ranks are lost: as if its states came from a checkpoint."""

import copy
import os
import random
import signal
import threading

import helpers
import pytest
import sharding
import torch
from surviving import STEPS, Training, common_end, expect
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import optim
from pycomm._training import replicas
from pycomm.optim._shard_executors import OnCpuShards

SHARDS = ["optimizer", "gradients"]
EDITED = {"dtype": torch.bfloat16, "master_weights": "remainder"}  # a change drops remainders


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def copy_half(area, *_):
    present, before = area.own.bytes
    half = len(before) // 2
    before[:half] = present[:half]
    kill()


def run_and_die(executor, step):
    run(executor, step)
    kill()


run = OnCpuShards.run


def survive(group, deaths, options):
    """Trains until this rank is killed, or to the end.

    Args:
        group: the ranks.
        deaths: for each victim, the step and the moment of its death.
        options: those of :class:`Training`.

    Returns:
        For each loss the number of steps that count and the ranks that are left; the state.
    """
    training, number, step = Training(group, replicas=2, **options), group.rank, 0
    losses = [(0, group.ranks)]
    while step < STEPS or training.model.comm_state.group is not group:
        when, moment = deaths.get(number, (None, None))
        moment = moment if when == step else None
        try:
            if training.model.comm_state.group is not group:
                if moment == "regrouping":
                    replicas._open_file = kill
                training.model.regroup(group)
                losses.append((step, group.ranks))
                continue
            if moment == "sharing":
                replicas._open_file = kill
            elif moment == "backward":
                training.model.module.parts[2].register_hook(kill)
            elif moment == "copying":
                replicas._Area.begin_step = copy_half
            elif moment == "updated":
                OnCpuShards.run = run_and_die
            elif isinstance(moment, float):
                timer = threading.Timer(moment, kill)
                timer.start()
            training.backward(number, step)
            if training.model.should_commit():
                training.optimizer.step()
                if moment == "stepped":
                    kill()
                elif isinstance(moment, float):
                    timer.join()
                step += 1
        except pycomm.CollectiveError:
            with pytest.raises((pycomm.PycommError, RuntimeError)):
                training.optimizer.step()  # must leave the copies alone
            group = group.shrink()
    return losses, training.state()


def check(size, deaths, **options):
    """Kills ranks, and compares the survivors with training from checkpoints."""
    with helpers.Ranks(size, helpers.in_group, survive, {"timeout": 30}, deaths, options) as ranks:
        outcomes = ranks.wait_for([rank for rank in range(size) if rank not in deaths])
    losses, state = common_end(outcomes)
    assert sharding.difference(expect(losses, **options), state) is None
    return [steps for steps, _ in losses[1:]]


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        ("backward", {"max_norm": 0.1}),
        ("copying", {"states": "8bit"}),
        ("updated", {"states": "8bit", "max_norm": 0.1, "shard": "gradients"}),
        ("stepped", {"dtype": torch.bfloat16, "master_weights": "remainder"}),
    ],
)
def test_ranks_are_killed_one_after_the_other(moment, options):
    steps = check(4, {1: (2, moment), 2: (4, "updated")}, **options)
    assert steps == [3 if moment == "stepped" else 2, 4]


def test_a_rank_is_killed_in_the_first_step():
    assert check(3, {1: (0, "sharing")}, states="8bit") == [0]


def test_a_rank_is_killed_while_the_others_regroup():
    assert check(4, {1: (2, "updated"), 2: (2, "regrouping")}, states="8bit") == [2]


@pytest.mark.parametrize("shard", SHARDS)
def test_a_parameter_is_frozen_before(shard):
    """Its states move to the new owners like the others."""
    assert check(3, {1: (3, "updated")}, shard=shard, freezes=2) == [3]


def test_ranks_are_killed_together():
    deaths = dict.fromkeys((0, 1, 3), (1, "updated"))
    assert check(4, deaths, dtype=torch.bfloat16, master_weights="fp32") == [1]


def killed_at_random(seed):
    """Kills a rank around the step, which takes milliseconds, or many of them beside other load."""
    rng = random.Random(seed)
    deaths = {rng.randrange(3): (3, 10 ** rng.uniform(-4, -0.5))}
    return check(3, deaths, elements=200_000, states="8bit", shard=rng.choice(SHARDS))


@pytest.mark.slow
def test_a_rank_is_killed_at_random():
    for seed in range(2):
        killed_at_random(seed)


@pytest.mark.slow
def test_forty_ranks_are_killed_at_random():
    """Some before the step, some after it, and some in the middle."""
    assert {steps for seed in range(40) for steps in killed_at_random(100 + seed)} >= {3, 4}


def check_survivors(live, edits, options):
    """Runs three ranks, of which rank 1 leaves after two steps; compares with a checkpoint."""
    with pycomm.LocalWorld(3) as world:
        states = [state for state in world.run(live) if state is not None]
    expected = expect([(0, (0, 1, 2)), (2, (0, 2))], edits, **options)
    for state in states:
        assert sharding.difference(expected, state) is None


@pytest.mark.parametrize("options", [{"states": "8bit"}, EDITED])
def test_a_rank_leaves(options):
    """A thread, which closes its group and drops model and optimizer."""
    edits = options is EDITED

    def live(group):
        training = Training(group, replicas=2, **options)
        training.train(group.rank, range(2), edits)
        if group.rank == 1:
            group.close()
            return None
        with pytest.raises(pycomm.PeerDied):
            training.backward(group.rank, 2)
        group = group.shrink()
        training.model.regroup(group)
        assert all(parameter.grad is None for parameter in training.model.parameters())
        training.train(group.ranks[group.rank], range(2, STEPS))
        return training.state()

    check_survivors(live, edits, options)


@pytest.mark.parametrize("master", ["remainder", "fp32"])
def test_writes_of_the_program_survive_the_step_that_fails(master):
    """Parameters are changed by hand, and a rank leaves before its step has seen that."""
    options = EDITED | {"master_weights": master}
    begun = threading.Barrier(3)

    def live(group):
        training = Training(group, replicas=2, **options)
        training.train(group.rank, range(2), edits=True)
        training.backward(group.rank, 2)
        begin_step = training.optimizer._replicas._replicas.begin_step

        def begin(parameters):
            begin_step(parameters)
            begun.wait()

        if group.rank == 1:
            begun.wait()
            group.close()
            return None
        training.optimizer._replicas._replicas.begin_step = begin
        with pytest.raises(pycomm.PeerDied):
            training.optimizer.step()
        group = group.shrink()
        training.model.regroup(group)
        training.train(group.ranks[group.rank], range(2, STEPS))
        return training.state()

    check_survivors(live, True, options)


def test_a_parameter_is_taken_out_of_the_optimizer():
    def live(group, fails):
        training = Training(group, replicas=2)
        training.train(group.rank, range(2))
        removed = training.optimizer.param_groups[0]["params"].pop(1)
        del training.optimizer.state[removed]
        if fails:
            assert group.should_commit()  # all have come here
            group.abort()
            training.model.regroup(group.shrink())
        training.train(group.rank, range(2, 4))
        return training.state()

    states = []
    for fails in (False, True):
        with pycomm.LocalWorld(2) as world:
            states += world.run(live, fails)
    assert all(sharding.difference(states[0], state) is None for state in states)


def test_a_step_that_is_not_taken_changes_nothing():
    def live(group):
        training = Training(group, replicas=2)
        training.backward(group.rank, 0)
        training.optimizer.step()
        before = training.state()
        training.backward(group.rank, 1)
        assert not training.model.should_commit(ready=group.rank != 1)
        return sharding.difference(before, training.state())

    with pycomm.LocalWorld(2) as world:
        assert world.run(live) == [None, None]


def test_only_the_step_that_failed_is_undone():
    """Of two optimizers; the failure comes after the update, so all parameters are new."""

    def live(group):
        net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        model = data_parallel(net, group=group, shard="optimizer", replicas=2)
        counts, fails = (optim.FusedAdamW(layer.parameters(), lr=0.1) for layer in net)

        def backward():
            model(torch.full((1, 40), 1.0 + group.rank)).square().sum().backward()

        def fail():
            group.abort()
            raise pycomm.Aborted("on purpose")

        backward()
        counts.step()
        fails.step()
        before = copy.deepcopy((net[1].state_dict(), fails.state_dict()))
        backward()
        counts.step()
        after = copy.deepcopy((net[0].state_dict(), counts.state_dict()))
        fails._replicas._replicas.end_step = fail
        with pytest.raises(pycomm.Aborted):
            fails.step()
        assert not torch.equal(net[1].weight, before[0]["weight"])
        with pytest.raises(RuntimeError, match="regroup"):
            model.state_dict()
        model.regroup(group.shrink())
        now = [
            (net[0].state_dict(), counts.state_dict()),
            (net[1].state_dict(), fails.state_dict()),
        ]
        return sharding.difference([after, before], now)

    with pycomm.LocalWorld(2) as world:
        assert world.run(live) == [None, None]


@pytest.mark.parametrize("steps", [0, 1])
def test_means_of_undone_steps_go_into_the_residuals(steps):
    """Unless another optimizer's step has counted: then some of them would be applied twice."""

    def live(group):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model = data_parallel(
            net, group=group, compression=pycomm.TopK(density=0.1), shard="optimizer", replicas=2
        )
        first, second = (optim.FusedAdamW(layer.parameters()) for layer in net)
        model(torch.full((1, 64), 1.0 + group.rank)).square().sum().backward()
        assert model.should_commit()
        mean = net[0].weight.grad.clone()
        kept = model.comm_state.residual("0.weight").clone()
        if steps:
            first.step()
            assert group.should_commit()
        group.abort()
        for optimizer in (first, second)[steps:]:
            with pytest.raises(pycomm.PycommError):
                optimizer.step()
        model.regroup(group.shrink())
        wanted = kept if steps else kept + mean
        return torch.equal(model.comm_state.residual("0.weight"), wanted)

    with pycomm.LocalWorld(2) as world:
        assert all(world.run(live))


def test_states_without_replicas_are_lost():
    """They have been loaded after the last step."""

    def live(group):
        training = Training(group, replicas=2)
        training.backward(group.rank, 0)
        training.optimizer.step()
        training.load(training.state())
        assert group.should_commit()  # all have loaded it
        if group.rank == 1:
            group.close()
            return True
        with pytest.raises(pycomm.PeerDied):
            training.backward(group.rank, 1)
        with pytest.raises(RuntimeError, match=r"ranks \[1\] are lost .* load a checkpoint"):
            training.model.regroup(group.shrink())
        return True

    with pycomm.LocalWorld(3) as world:
        assert all(world.run(live))


def test_a_failed_step_beside_states_without_replicas_is_not_undone_by_half(monkeypatch):
    """No rank is lost. Two optimizers have loaded states, and the first step of one fails."""
    net = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70))

    def live(group):
        model = data_parallel(copy.deepcopy(net), group=group, shard="optimizer", replicas=2)
        fails, waits = (optim.FusedAdamW(layer.parameters()) for layer in model.module)
        model(torch.ones(1, 70)).sum().backward()
        for one in (fails, waits):
            one.step()
            one.load_state_dict(one.state_dict())
        model(torch.ones(1, 70)).sum().backward()
        assert group.should_commit()
        monkeypatch.setattr(replicas.Replicas, "end_step", fail)
        with pytest.raises(pycomm.PeerDied):
            fails.step()
        with pytest.raises(RuntimeError, match="partly those of a step that has failed"):
            model.regroup(later.groups[group.rank])
        return True

    def fail(_):
        raise pycomm.PeerDied("a rank has died")

    with pycomm.LocalWorld(2) as world, pycomm.LocalWorld(2) as later:
        assert all(world.run(live))


def test_without_replicas_the_error_names_lost_ranks():
    def live(group):
        training = Training(group)
        training.backward(group.rank, 0)
        training.optimizer.step()
        assert group.should_commit()  # all have stepped
        if group.rank == 1:
            group.close()
            return True
        smaller = group.shrink()
        with pytest.raises(ValueError, match=r"ranks \[1\] are lost .* replicas=2"):
            training.model.regroup(smaller)
        return True

    with pycomm.LocalWorld(3) as world:
        assert all(world.run(live))


def test_ranks_with_different_states_are_told():
    def live(group):
        training = Training(group, replicas=2, states=("fp32", "8bit")[group.rank])
        training.backward(group.rank, 0)
        with pytest.raises(RuntimeError, match="states of different kinds"):
            training.optimizer.step()
        return True

    with pycomm.LocalWorld(2) as world:
        assert all(world.run(live))


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"stage": "parameters"}, ValueError, "stage must be 'optimizer' or 'gradients', got 'par"),
        ({"replicas": 3}, ValueError, "replicas must be 1 or 2, got 3"),
        ({"group": 0}, TypeError, "group must be a pycomm.Group or None, got 0"),
    ],
)
def test_options(options, error, complaint):
    with pytest.raises(error, match=complaint):
        pycomm.Sharding(**{"stage": "optimizer", **options})


@pytest.mark.parametrize("shard", ["parameters", True, 2])
def test_the_wrapper_names_what_shard_may_be(shard):
    with (
        pycomm.LocalWorld(1) as world,
        pytest.raises(
            ValueError, match=f"shard must be None, .* or a pycomm.Sharding, got {shard!r}"
        ),
    ):
        pycomm.DataParallel(nn.Linear(2, 2), group=world.groups[0], shard=shard)


@pytest.mark.parametrize(
    "option", ["local_sgd", "exclude", "feedback", "warmup_steps", "replicas", "publish"]
)
def test_options_that_have_moved_are_named_with_their_place(option):
    with pytest.raises(TypeError, match=rf"DataParallel\(\) has no {option} any more: give"):
        pycomm.DataParallel(nn.Linear(2, 2), **{option: None})


def test_what_has_no_replicas():
    def wrap(group, **options):
        with pytest.raises(ValueError, match="replicas=2 needs"):
            data_parallel(nn.Linear(2, 2), group=group, shard="optimizer", replicas=2, **options)
        return True

    with pycomm.LocalWorld(2, nodes=[1, 1]) as world:
        assert all(world.run(wrap))
    with pycomm.LocalWorld(2) as world:
        assert all(world.run(lambda group: wrap(group, shard_group=group)))
