"""Sharded training goes on with ranks that have joined it: as if states came from a checkpoint."""

import threading
import time
from pathlib import Path

import growing
import helpers
import pytest
import sharding
import torch
from surviving import STEPS, Training, expect
from torch import nn
from wrapping import data_parallel

import pycomm

REMAINDER = {"dtype": torch.bfloat16, "master_weights": "remainder"}
CASES = {
    "fp32": {"max_norm": 0.1},
    "8 bits, gradients": {"states": "8bit", "shard": "gradients"},
    "remainder": REMAINDER,
    "master": {"dtype": torch.bfloat16, "master_weights": "fp32", "states": "8bit"},
    "compressed": {"compression": pycomm.Cast()},
}


def same(states, expected):
    for state in states:
        assert sharding.difference(expected, state) is None


def go_on(training, group, is_new):
    """What all ranks call when the group has grown."""
    progress = {"step": 2} if not is_new else {}
    if not is_new:
        training.model.regroup(group)
    pycomm.share_state(training.optimizer, progress, receive=is_new, group=group)
    training.train(group.rank, range(progress["step"], STEPS))
    return training.state()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_newcomers_take_their_part_of_the_states(world, name, replicas):
    options, smaller = CASES[name], world(2)

    def live(group):
        if group.rank < 2:
            training = Training(smaller.groups[group.rank], replicas=replicas, **options)
            training.train(group.rank, range(2), edits=True)
        else:
            training = Training(group, seed=7, replicas=replicas, **options)
        return go_on(training, group, group.rank >= 2)

    states = world(4).run(live)
    same(states, expect([(0, (0, 1)), (2, (0, 1, 2, 3))], edits=True, **options))


@pytest.mark.parametrize("options", [{}, {"publish": pycomm.Cast()}])
def test_newcomers_on_other_nodes(world, options):
    """With `publish`, what its code has lost is dropped, as in a checkpoint."""
    smaller = world(2, nodes=[1, 1])

    def live(group):
        if group.rank < 2:
            training = Training(smaller.groups[group.rank], **options)
            training.train(group.rank, range(2))
        else:
            training = Training(group, seed=7, **options)
        return go_on(training, group, group.rank >= 2)

    states = world(3, nodes=[1, 2]).run(live)
    nodes = [[1, 1], [1, 2]]
    same(states, expect([(0, (0, 1)), (2, (0, 1, 2))], nodes=nodes, **options))


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("name", ["8 bits, gradients", "remainder"])
def test_a_rank_is_lost_and_another_one_comes(world, name, fails):
    """The step in which it is lost, when parameters and states are new, is undone."""
    options, former, stepped = CASES[name], world(3), threading.Barrier(2)

    def live(group):
        if group.rank == 2:
            lost = Training(former.groups[1], replicas=2, **options)
            lost.train(1, range(2))
            if fails == "after":
                lost.backward(1, 2)
                lost.optimizer._replicas._replicas.end_step = former.groups[1].close
                lost.optimizer.step()
            former.groups[1].close()
            training = Training(group, seed=7, replicas=2, **options)
        else:
            own = former.groups[2 * group.rank]
            training = Training(own, replicas=2, **options)
            training.train(own.rank, range(2))
            with pytest.raises(pycomm.PeerDied):
                training.train(own.rank, range(2, 3))
            stepped.wait()
        return go_on(training, group, group.rank == 2)

    states = world(3).run(live)

    def again(group, state):
        training = Training(group, **options)
        training.load(state)
        training.train(group.rank, range(2, STEPS))
        return training.state()

    def before(group):
        training = Training(group, **options)
        training.train(group.rank, range(2))
        return training.state()

    checkpoint = world(3).run(before)[0]
    same(states, world(3).run(again, checkpoint)[0])


SMALL_BUCKETS = {"bucket_cap_mb": 0.005}  # so that all ranks have a part of each parameter


def write_weights(training):
    """Before the next step; returns what was written and what is read."""
    random, wrote, read = torch.Generator().manual_seed(3), [], []
    for parameter in training.model.parameters():
        wrote.append(torch.randn(parameter.shape, generator=random))
        training.optimizer.set_full_weights(parameter, wrote[-1])
        read.append(training.optimizer.full_weights(parameter))
    return wrote, read


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["remainder", "master"])
def test_weights_are_written_before_newcomers_take_their_part(world, name, replicas):
    options, smaller = CASES[name] | SMALL_BUCKETS, world(2)

    def live(group):
        is_new = group.rank == 2
        own = group if is_new else smaller.groups[group.rank]
        training = Training(own, replicas=replicas, **options)
        if not is_new:
            training.train(group.rank, range(2))
            training.model.regroup(group)
        pycomm.share_state(training.optimizer, receive=is_new, group=group)
        training.optimizer.sharded_state_dict(training.model)
        return write_weights(training)

    for wrote, read in world(3).run(live):
        same([read], wrote)


@pytest.mark.parametrize("name", ["remainder", "master"])
def test_weights_are_written_before_parts_of_lost_ranks_have_moved(world, name):
    options, former, lost = CASES[name] | SMALL_BUCKETS, world(3), threading.Barrier(3)

    def live(group):
        is_new = group.rank == 2
        own = former.groups[1 if is_new else 2 * group.rank]
        training = Training(own, replicas=2, **options)
        training.train(own.rank, range(2))
        assert own.should_commit()
        lost.wait()
        if is_new:
            own.close()
            training = Training(group, seed=7, replicas=2, **options)
        else:
            training.model.regroup(group)
        pycomm.share_state(training.optimizer, receive=is_new, group=group)
        with pytest.raises(RuntimeError, match="must be called after a step"):
            training.optimizer.sharded_state_dict(training.model)
        return write_weights(training)

    for wrote, read in world(3).run(live):
        same([read], wrote)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_newcomer_is_lost_before_it_has_a_part(world, replicas, shared):
    smaller, larger, last = world(2), world(3), world(2)

    def live(group):
        if group.rank == 2:
            training = Training(group, seed=7, replicas=replicas)
            if shared:
                pycomm.share_state(training.optimizer, receive=True, group=group)
            return None
        training = Training(smaller.groups[group.rank], replicas=replicas)
        training.train(group.rank, range(2))
        training.model.regroup(group)
        if shared:
            pycomm.share_state(training.optimizer, group=group)
        training.model.regroup(last.groups[group.rank])
        training.train(group.rank, range(2, STEPS))
        return training.state()

    same(larger.run(live)[:2], expect([(0, (0, 1))]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_before_the_first_step_there_is_nothing_to_share(world, replicas):
    smaller = world(2)

    def live(group):
        if group.rank == 2:
            training = Training(group, seed=7, replicas=replicas)
        else:
            training = Training(smaller.groups[group.rank], replicas=replicas)
            training.model.regroup(group)
        training.train(group.rank, range(STEPS))
        return training.state()

    same(world(3).run(live), expect([(0, (0, 1, 2))]))


def test_steps_need_states_that_are_shared(world):
    smaller = world(1)

    def live(group):
        if group.rank == 1:
            training = Training(group)
        else:
            training = Training(smaller.groups[0])
            training.train(0, range(1))
            training.model.regroup(group)
            for call in (training.optimizer.step, training.optimizer.state_dict):
                with pytest.raises(RuntimeError, match=r"call pycomm.share_state\(optimizer"):
                    call()
        return

    world(2).run(live)


def test_states_are_shared_after_regroup(world):
    smaller = world(1)

    def live(group):
        if group.rank:
            optimizer = pycomm.optim.FusedAdamW(nn.Linear(2, 2).parameters())
        else:
            training = Training(smaller.groups[0])
            training.train(0, range(1))
            optimizer = training.optimizer
        with pytest.raises(ValueError, match="objects must have states of") as raised:
            pycomm.share_state(optimizer, receive=group.rank == 1, group=group)
        return str(raised.value.__cause__)

    assert "must be called after regroup()" in world(2).run(live)[0]


def test_parts_are_not_overwritten(world):
    def live(group):
        training = Training(group)
        training.train(group.rank, range(1))
        if group.rank:
            with pytest.raises(ValueError, match="receive must be False on a rank that has its"):
                pycomm.share_state(training.optimizer, receive=True, group=group)
        else:
            pycomm.share_state(training.optimizer, group=group)

    world(2).run(live)


def test_a_lost_rank_takes_its_part_with_it_although_another_one_comes(world):
    former = world(2)

    def live(group):
        if group.rank:
            lost = Training(former.groups[1])
            lost.train(1, range(1))
            former.groups[1].close()
            with pytest.raises(ValueError, match=r"lost with their parts .* replicas=2"):
                Training(group)
            return None
        training = Training(former.groups[0])
        training.train(0, range(1))
        before = training.model.module.parts[0].detach().clone()
        with pytest.raises(ValueError, match=r"ranks \[1\] are lost with their parts .* replicas"):
            training.model.regroup(group)
        assert training.model.comm_state.group is former.groups[0]
        return torch.equal(before, training.model.module.parts[0])

    assert world(2).run(live) == [True, None]


def test_a_failed_step_without_replicas_is_noticed_on_all_ranks(world):
    """Nobody is lost, but one rank does not know which parameters are new."""

    def live(group):
        training = Training(group)
        training.train(group.rank, range(1))
        if group.rank:
            training.model._exchange.strategy.shards.guard.step_failed()
        assert group.should_commit()
        group.abort()
        with pytest.raises(RuntimeError, match="partly those of a step that has failed"):
            training.model.regroup(group.shrink())

    world(2).run(live)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"shard": "optimizer"}, {}),
        ({"shard": "optimizer"}, {"shard": "gradients"}),
        ({"shard": "optimizer", "replicas": 2}, {"shard": "optimizer"}),
    ],
)
def test_newcomers_with_other_options_are_refused(world, ours, theirs):
    smaller = world(1)

    def live(group):
        if group.rank:
            with pytest.raises(ValueError, match=r"rank 1 has .*, but rank 0 has"):
                data_parallel(nn.Linear(3, 3), group=group, **theirs)
        else:
            model = data_parallel(nn.Linear(3, 3), group=smaller.groups[0], **ours)
            with pytest.raises(pycomm.CollectiveError, match=r"rank 1 has .*, but rank 0 has"):
                model.regroup(group)

    world(2).run(live)


def test_what_cannot_grow_says_so_on_all_ranks(world):
    smaller, spread = world(1), world(2, nodes=[1, 1])

    def live(group):
        if group.rank:
            with pytest.raises(ValueError, match="a Sharding with a group of its own cannot go on"):
                pycomm.DataParallel(nn.Linear(3, 3), group=group, shard="optimizer")
            with pytest.raises(ValueError, match="replicas=2 needs ranks that are processes"):
                Training(spread.groups[1], replicas=2)
            return
        own = smaller.groups[0]
        options = {"group": own, "shard": "optimizer"}
        model = data_parallel(nn.Linear(3, 3), shard_group=own, **options)
        with pytest.raises(ValueError, match="a Sharding with a group of its own cannot go on"):
            model.regroup(group)
        with pytest.raises(ValueError, match="replicas=2 needs ranks that are processes"):
            Training(own, replicas=2).model.regroup(spread.groups[0])

    world(2).run(live)


def grow_in_training(rank, size, store, path, options):
    is_new = rank >= 2
    if is_new:
        group = pycomm.join(Path(path), 60)
        training = Training(group, seed=7, **options)
    else:
        helpers.join_world(rank, 2, store)
        group = pycomm.init(timeout=60)
        training = Training(group, **options)
        training.train(rank, range(2))
        while group.size < size:
            growing.publish(group, path)
            group = group.grow()
    state = go_on(training, group, is_new)
    pycomm.barrier()
    time.sleep(0.2)
    return state


@pytest.mark.parametrize(
    "options", [{"states": "8bit", "replicas": 2}, {"shard": "gradients", **REMAINDER}]
)
def test_processes_join(options, tmp_path):
    states = helpers.run_ranks(3, grow_in_training, str(tmp_path / "door"), options)
    options = {name: value for name, value in options.items() if name != "replicas"}
    same(states, expect([(0, (0, 1)), (2, (0, 1, 2))], **options))
