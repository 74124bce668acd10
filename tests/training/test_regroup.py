"""Training goes on when ranks are lost: as if the survivors had always been alone."""

import copy
import signal
import threading
from pathlib import Path

import helpers
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapping import data_parallel

import pycomm
from pycomm import hooks

STEPS = 3


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Linear(128, 8))


def backward(model, number, step):
    random = torch.Generator().manual_seed(1000 * number + step)
    model(torch.randn(16, 64, generator=random)).square().mean().backward()


def train(model, optimizer, number, steps):
    for step in steps:
        backward(model, number, step)
        assert model.should_commit()
        optimizer.step()
        optimizer.zero_grad()


def lose_one(group, **options):
    """Trains with three ranks until rank 1 leaves; returns the survivors' models at that point."""
    model = data_parallel(make_net(), group=group, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, group.rank, range(STEPS))
    if group.rank == 1:
        group.close()
        return None
    with pytest.raises(pycomm.PeerDied):
        train(model, optimizer, group.rank, [STEPS])
    return model, optimizer


@pytest.mark.parametrize("compression", [None, pycomm.Int8()], ids=str)
def test_survivors_train_as_if_they_had_always_been_alone(compression):
    options = {"compression": compression, "feedback": False}

    def live(group):
        lost = lose_one(group, **options)
        if lost is None:
            return None
        model, optimizer = lost
        before = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
        smaller = group.shrink()
        model.regroup(smaller)
        assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer, smaller.ranks[smaller.rank], range(STEPS, 2 * STEPS))
        return smaller.ranks, before, model.module.state_dict()

    def alone(group, states):
        ranks, (weights, moments), _ = states[group.rank]
        net = make_net()
        net.load_state_dict(weights)
        model = data_parallel(net, group=group, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.load_state_dict(moments)
        train(model, optimizer, ranks[group.rank], range(STEPS, 2 * STEPS))
        return net.state_dict()

    with pycomm.LocalWorld(3) as world:
        survivors = [state for state in world.run(live) if state is not None]
    assert [state[0] for state in survivors] == [(0, 2)] * 2
    with pycomm.LocalWorld(2) as world:
        expected = world.run(alone, survivors)
    for (_, _, weights), wanted in zip(survivors, expected, strict=True):
        for name, value in wanted.items():
            assert torch.equal(weights[name], value), name


def test_a_step_that_is_not_taken_loses_nothing():
    def live(group):
        model = pycomm.DataParallel(make_net(), group=group, compression=pycomm.TopK(density=0.1))
        mine = copy.deepcopy(model.module)
        backward(mine, group.rank, 0)
        backward(model, group.rank, 0)
        for _ in range(2):  # gives back once
            assert not model.should_commit(ready=group.rank != 1)
        kept = model.comm_state.residual("0.weight")
        return kept.clone(), mine[0].weight.grad

    with pycomm.LocalWorld(3) as world:
        kept, gradients = zip(*world.run(live), strict=True)
    torch.testing.assert_close(sum(kept), sum(gradients), rtol=1e-5, atol=1e-6)


def test_a_step_that_was_not_decided_goes_back_into_the_residuals():
    backward_done = threading.Barrier(3)  # or a failure could end a slower rank's backward

    def live(group):
        model = pycomm.DataParallel(make_net(), group=group, compression=pycomm.TopK(density=0.1))
        backward(model, group.rank, 0)
        backward_done.wait(60)
        if group.rank == 1:
            group.close()
            return None
        with pytest.raises(pycomm.PeerDied):
            model.should_commit()
        name, state = "0.weight", model.comm_state
        mean, kept = model.module[0].weight.grad.clone(), state.residual(name).clone()
        model.regroup(group.shrink())
        assert torch.equal(state.residual(name), kept + mean)
        model.regroup(state.group)  # gives nothing back a second time
        assert torch.equal(state.residual(name), kept + mean)
        return state.stats()["residuals_lost"], state.step

    with pycomm.LocalWorld(3) as world:
        assert world.run(live) == [(1.0, 1), None, (1.0, 1)]


def test_a_newcomer_in_the_place_of_a_lost_rank_does_not_hide_it():
    """The group has shrunk and grown before one regroup()."""

    def live(group):
        def wrap(group):
            return pycomm.DataParallel(make_net(), group=group, compression=pycomm.TopK(0.1))

        model = wrap(before.groups[group.rank])
        backward(model, group.rank, 0)
        state = model.comm_state
        if group.rank == 1:  # lost; a newcomer has its number
            state = hooks.CommState(pycomm.TopK(0.1), make_net().named_parameters(), group=group)
        state.regroup(group)
        state.regroup(group)  # counts nothing a second time
        return state.stats()["residuals_lost"], state.step

    with pycomm.LocalWorld(3) as before, pycomm.LocalWorld(3) as after:
        assert after.run(live) == [(1.0, 1), (0.0, 1), (1.0, 1)]


def test_a_step_that_was_taken_is_not_given_back():
    def live(group):
        model = pycomm.DataParallel(make_net(), group=group, compression=pycomm.TopK(density=0.1))
        backward(model, group.rank, 0)
        assert model.should_commit()
        kept = model.comm_state.residual("0.weight").clone()
        model.regroup(group.shrink())
        return torch.equal(model.comm_state.residual("0.weight"), kept)

    with pycomm.LocalWorld(2) as world:
        assert all(world.run(live))


def test_a_failure_after_the_exchanges_loses_nothing():
    """All buckets have landed, but the backward has not ended well."""

    both = threading.Barrier(2)

    def live(group):
        model = pycomm.DataParallel(make_net(), group=group, compression=pycomm.TopK(density=0.1))
        exchange, name = model._exchange, "0.weight"

        def fail(*_):
            kept.append(model.comm_state.residual(name).clone())
            kept.append(model.module[0].weight.grad.clone())
            both.wait()
            group.abort()
            raise pycomm.Aborted("on purpose")

        kept = []
        exchange._compare = fail
        with pytest.raises(pycomm.Aborted):
            backward(model, group.rank, 0)
        model.regroup(group.shrink())
        return torch.equal(model.comm_state.residual(name), sum(kept))

    with pycomm.LocalWorld(2) as world:
        assert all(world.run(live))


def test_when_it_may_not_be_called():
    with pycomm.LocalWorld(1) as world:
        (group,) = world.groups
        model = pycomm.DataParallel(make_net(), group=group)
        with model.join(), pytest.raises(ValueError, match="outside of join"):
            model.regroup(group)
        model(torch.ones(2, 64))
        with pytest.raises(RuntimeError, match="must come after a backward"):
            model.should_commit()
        state = pycomm.hooks.CommState(group=group)
        group.close()
        with pytest.raises(pycomm.GroupUnusable, match="closed"):
            state.regroup(group)


def test_parameters_that_differ_are_found():
    def live(group):
        model = pycomm.DataParallel(make_net(), group=group)
        assert model.should_commit()  # both have made it
        if group.rank == 1:
            with torch.no_grad():
                model.module[3].bias[0] += 1
        with pytest.raises(RuntimeError, match="only some of them took a step"):
            model.regroup(group.shrink())
        return True

    with pycomm.LocalWorld(2) as world:
        assert all(world.run(live))


def test_what_cannot_survive_says_so():
    with pycomm.LocalWorld(1) as world:
        (group,) = world.groups
        model = pycomm.DataParallel(make_net(), shard="optimizer", group=group)
        with pytest.raises(ValueError, match="shard"):
            model.should_commit()
        model.regroup(group)  # nothing is lost, and there is no optimizer yet
        with pytest.raises(TypeError, match="group"):
            pycomm.DataParallel(make_net(), group=group).regroup("smaller")


def train_hooked(rank, size, store):
    """Trains under DistributedDataParallel, which survivors make anew."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    net = make_net()
    state = hooks.Int8State(net.named_parameters())
    model, process_group, steps = None, None, 0
    while steps < 10:
        try:
            if model is None:
                model = DistributedDataParallel(
                    net, process_group=process_group, broadcast_buffers=False
                )
                model.register_comm_hook(state, hooks.int8_hook)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if steps == 5 and group.size == 3:
                Path(f"{store}.{rank}").touch()
                helpers.wait_until(Path(f"{store}.go").exists)
                if rank == 0:
                    signal.pause()
            backward(model, rank, steps)
            commits = state.should_commit()
        except pycomm.CollectiveError:
            group = group.shrink()
            state.regroup(group)
            process_group = dist.new_group(list(group.ranks), use_local_synchronization=True)
            net.zero_grad()
            model = None
            continue
        assert commits
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    bounds = pycomm.all_reduce(torch.stack([weights, -weights]), "max")
    assert torch.equal(bounds[0], -bounds[1])
    return group.ranks, steps, state.stats()["residuals_lost"]


def test_hooks_go_on_in_a_new_distributed_data_parallel():
    with helpers.Ranks(3, train_hooked) as ranks:
        for rank in range(3):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        Path(f"{ranks.store}.go").touch()
        ranks.signal(0, signal.SIGKILL)
        for outcome in ranks.wait_for([1, 2]):
            assert outcome.value == ((1, 2), 10, 1.0), outcome
