"""LocalWorld(serial=True): threads that take turns do what processes do, also at random."""

import contextlib
import functools
import gc
import random
import threading
import time

import forked
import helpers
import numpy
import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint_activation
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm import hooks
from pycomm._runtime import turns

STEPS = 30


class Net(nn.Module):
    """Two blocks with dropout, which are checkpointed if `reentrant` is not None."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 2)
        self.reentrant = reentrant

    def block(self, layer, x):
        return nn.functional.dropout(torch.relu(layer(x)), 0.3)

    def forward(self, x):
        for layer in (self.first, self.second):
            if self.reentrant is None:
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def wrap(net, group, mode):
    """The wrapper, and what steps its parameters."""
    if mode == "local_sgd":
        optimizer = pycomm.optim.FusedAdamW(net.parameters(), 1e-2)
        local = hooks.LocalSGDState(net.named_parameters(), optimizer, period=3, group=group)
        model = pycomm.DataParallel(net, state=local)
        return model, optimizer, local.step
    options = {
        "overlap": {"bucket_cap_mb": 0.001},
        "int8": {"compression": pycomm.Int8()},
        "optimizer": {"shard": "optimizer"},
        "gradients": {"shard": "gradients"},
    }[mode]
    model = pycomm.DataParallel(net, group=group, **options)
    return model, pycomm.optim.FusedAdamW(model.parameters(), 1e-2), lambda: None


def train(group, reentrant=False, mode="overlap", steps=STEPS):
    """Trains with dropout and noise of each rank's own; returns gradients and parameters."""
    torch.manual_seed(0)
    model, optimizer, after = wrap(Net(reentrant), group, mode)
    torch.manual_seed(group.rank + 1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, requires_grad=True)).square().sum().backward()
        if mode in ("overlap", "int8"):
            seen += [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        after()
    return [*seen, *(param.detach().clone() for param in model.parameters())]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@functools.cache
def in_processes(size, mode):
    return helpers.run_group(size, train, None, mode)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_checkpointed_dropout_has_the_gradients_of_processes(world, size, reentrant):
    results = world(size, serial=True).run(train, reentrant)
    assert all(map(same, results, in_processes(size, "overlap")))
    assert same(results[0], results[1])  # averages
    assert all(result[-1].isfinite().all() for result in results)


@pytest.mark.parametrize("mode", ["int8", "optimizer", "gradients", "local_sgd"])
def test_every_way_to_exchange_has_the_bits_of_processes(world, mode):
    assert all(map(same, world(2, serial=True).run(train, False, mode), in_processes(2, mode)))


def test_nodes_are_serial_too(world):
    results = world(4, nodes=[2, 2], serial=True).run(train, False)
    for result in results[1:]:
        assert same(result, results[0])
    assert same(results[0], world(4, nodes=[2, 2], serial=True).run(train, None)[0])


def draw(group, times):
    drawn = []
    for _ in range(times):
        drawn.append((torch.rand(3).tolist(), numpy.random.rand(), random.random()))
        pycomm.barrier(group=group)
    return drawn


def seed_and_draw(group):
    torch.manual_seed(group.rank)
    numpy.random.seed(group.rank)
    random.seed(group.rank)
    pycomm.barrier(group=group)
    return draw(group, 5)


def expected(seed, times):
    """What a rank draws that has the generators for itself."""
    of_torch = torch.Generator().manual_seed(seed)
    of_numpy, of_python = numpy.random.RandomState(seed), random.Random(seed)
    return [
        (torch.rand(3, generator=of_torch).tolist(), of_numpy.rand(), of_python.random())
        for _ in range(times)
    ]


def test_seeds_separate_ranks(world):
    local_world = world(3, serial=True)
    assert local_world.run(seed_and_draw) == [expected(rank, 5) for rank in range(3)]
    # The next run goes on where each rank has stopped.
    goes_on = [first[5:] for first in (expected(rank, 9) for rank in range(3))]
    assert local_world.run(draw, 4) == goes_on


def test_the_caller_keeps_its_own_state(world):
    torch.manual_seed(11)
    numpy.random.seed(11)
    random.seed(11)
    first = world(2, serial=True).run(draw, 2)
    assert first == [expected(11, 2)] * 2  # ranks begin with it
    assert [(torch.rand(3).tolist(), numpy.random.rand(), random.random())] == expected(11, 1)


def test_one_rank_runs_at_a_time_in_rank_order(world, monkeypatch):
    """Also after waits, which end on all ranks at once."""
    monkeypatch.setattr(turns, "_PATIENCE", 30)  # on a busy machine a wait may end late
    order, inside = [], []

    def body(group):
        for turn in range(20):
            inside.append(group.rank)
            time.sleep(0.0005)  # releases the interpreter's lock, not the turn
            order.append(group.rank)
            assert inside == [group.rank]
            inside.clear()
            if turn % 2:
                pycomm.barrier(group=group)
            else:
                pycomm.all_reduce(torch.ones(100), group=group, async_op=True).wait()

    world(3, serial=True).run(body)
    assert order == [0, 1, 2] * 20


def test_a_rank_that_waits_for_a_later_turn_is_overtaken(world):
    def body(group):
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        x = torch.tensor([float(group.rank)])
        for _ in range(3):
            if group.rank == 0:  # the message arrives when all others have had a turn
                pycomm.send(x, right, group=group)
                pycomm.recv(x, left, group=group)
            else:
                y = torch.empty(1)
                pycomm.recv(y, left, group=group)
                pycomm.send(y + 1, right, group=group)
        return x.item()

    assert world(4, serial=True).run(body)[0] == 9.0


def test_operations_inside_of_backward(world):
    """A hook that waits, and operations of torch.ops, which torch calls without the GIL."""

    def body(group):
        torch.manual_seed(group.rank)
        weight = torch.ones(4, requires_grad=True)
        seen = []

        def hook(param):
            works = [pycomm.all_reduce(param.grad, group=group, async_op=True)]
            seen.append(torch.rand(1).item())
            works[0].wait()
            torch.ops.pycomm.all_reduce_(param.grad, "sum", "auto", group.name)
            seen.append(torch.rand(1).item())

        weight.register_post_accumulate_grad_hook(hook)
        (weight * (group.rank + 1)).sum().backward()
        return weight.grad[0].item(), seen

    for rank, (grad, seen) in enumerate(world(2, serial=True).run(body)):
        assert grad == 6.0
        generator = torch.Generator().manual_seed(rank)
        assert seen == [torch.rand(1, generator=generator).item() for _ in range(2)]


class OwnError(Exception):
    pass


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_raises_ends_the_waits_of_others(world, culprit):
    seen = {}

    def body(group):
        pycomm.barrier(group=group)
        if group.rank == culprit:
            raise OwnError("of one rank")
        try:
            pycomm.all_reduce(torch.ones(4), group=group)
        except pycomm.PeerDied as error:
            seen[group.rank] = error.rank
            raise

    with pytest.raises(OwnError):
        world(3, serial=True).run(body)
    assert seen == {rank: culprit for rank in range(3) if rank != culprit}


def test_a_rank_that_returns_early_ends_the_waits_of_others(world):
    def body(group):
        if group.rank == 1:
            return "early"
        with pytest.raises(pycomm.PeerDied, match="has returned"):
            pycomm.barrier(group=group)
        return "late"

    assert world(3, serial=True).run(body) == ["late", "early", "late"]


def test_timeouts_and_aborts(world):
    def waits(group):
        if group.rank == 1:
            with pycomm.LocalWorld.others_run():
                return timed_out.wait(30)
        try:
            return pycomm.recv(torch.empty(1), 1, group=group)
        finally:
            timed_out.set()

    timed_out = threading.Event()
    with pytest.raises(pycomm.Timeout, match="rank 0 waited"):
        world(2, 0.3, serial=True).run(waits)

    def aborts(group):
        if group.rank == 1:
            group.abort()
        with pytest.raises(pycomm.CollectiveError):
            pycomm.barrier(group=group)
        return "ended"

    assert world(2, serial=True).run(aborts) == ["ended"] * 2


def test_survivors_shrink(world):
    def body(group):
        if group.rank == 1:
            raise OwnError
        with contextlib.suppress(pycomm.PeerDied):
            pycomm.barrier(group=group)
        smaller = group.shrink()
        sums.append(pycomm.all_reduce(torch.ones(1), group=smaller).item())

    sums = []
    with pytest.raises(OwnError):
        world(3, serial=True).run(body)
    assert sums == [2.0, 2.0]


def test_a_wait_outside_of_pycomm_needs_others_run(world):
    event = threading.Event()

    def body(group, context):
        if group.rank == 1:
            return event.set()
        with context():
            assert event.wait(30)
        return None

    try:
        with pytest.raises(pycomm.Timeout, match=r"rank 0 .* 0.3 s, and ranks \[1\].*others_run"):
            world(2, 0.3, serial=True).run(body, contextlib.nullcontext)
    finally:
        event.set()
    event.clear()
    world(2, serial=True).run(body, pycomm.LocalWorld.others_run)
    with pycomm.LocalWorld.others_run():  # no effect in other threads
        pass


def test_a_lock_that_is_held_between_turns(world):
    lock, held = threading.Lock(), []

    def body(group):
        for _ in range(3):
            with turns.locked(lock):
                held.append(group.rank)
                group.trim()  # other ranks have their turns, and ask for the lock
                assert held == [group.rank]
                held.clear()

    world(3, serial=True).run(body)


def test_the_end_of_other_groups_ends_no_turn(world):
    """Garbage may be collected at any time, also while a rank holds a lock."""
    garbage, lock, held = [pycomm.LocalWorld(2) for _ in range(3)], threading.Lock(), []

    def body(group):
        with lock:
            held.append(group.rank)
            garbage.pop()
            gc.collect()
            assert held == [group.rank]
            held.clear()
        pycomm.barrier(group=group)

    world(3, 10, serial=True).run(body)


def test_other_threads_of_a_rank_need_no_turn(world):
    def body(group):
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.ones(2).sum().item()))
        thread.start()
        thread.join(30)
        loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2)
        pycomm.barrier(group=group)
        return made, [batch.tolist() for batch in loader]

    assert world(2, serial=True).run(body) == [([2.0], [[0, 1], [2, 3]])] * 2


def test_only_one_serial_world_runs(world):
    inner = world(1, serial=True)
    with pytest.raises(RuntimeError, match="serial=True runs already"):
        world(2, serial=True).run(lambda _: inner.run(lambda group: group.rank))
    assert inner.run(lambda group: group.rank) == [0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_preserves_shared_states_is_refused(world, reentrant):
    x = torch.ones(3, requires_grad=True)

    def body(_group, **options):
        return checkpoint(torch.sin, x, use_reentrant=reentrant, **options).sum().item()

    with pytest.raises(RuntimeError, match=r"serial=True\), or .*preserve_rng_state=False"):
        world(2).run(body)
    value = body(None)  # in the main thread
    assert world(1).run(body) == [value]
    assert world(2).run(functools.partial(body, preserve_rng_state=False)) == [value] * 2


@pytest.mark.filterwarnings("ignore:module forward hook")
def test_a_composable_checkpoint_is_refused_too(world):
    """torch's module has a name of its own for the function; here it is imported before."""

    def body(_group):
        return checkpoint_activation.checkpoint(nn.Linear(2, 2))(torch.ones(1, 2))

    with pytest.raises(RuntimeError, match="serial=True"):
        world(2).run(body)


def test_without_the_exchange_of_states_ranks_disturb_each_other(world, monkeypatch):
    """Without the exchange, the results differ, so the other tests can fail."""
    monkeypatch.setattr(turns.RandomState, "restore", lambda _: None)
    results = world(2, serial=True).run(train, False)
    assert not all(map(same, results, in_processes(2, "overlap")))


def test_contexts_in_which_others_run_may_be_nested():
    def body(group):
        with pycomm.LocalWorld.others_run(), pycomm.LocalWorld.others_run():
            pass
        return pycomm.all_reduce(torch.ones(1), group=group).item()

    with pycomm.LocalWorld(2, timeout=10, serial=True) as world:
        assert world.run(body) == [2.0, 2.0]


def in_child(group):
    """What a child of a rank may do: all that needs no other rank."""
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.all_reduce(torch.ones(3), group=group)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    pycomm.optim.FusedAdamW([parameter], lr=0.5).step()
    assert parameter.max() < 1
    checkpoint(torch.relu, parameter, use_reentrant=False).sum().backward()
    with pycomm.LocalWorld(2, serial=True) as world:
        sums = world.run(lambda each: pycomm.all_reduce(torch.ones(1), group=each).item())
    assert sums == [2.0, 2.0]


def fork(group, others):
    if group.rank == 0:
        with pycomm.LocalWorld.others_run() if others else contextlib.nullcontext():
            forked.in_child(functools.partial(in_child, group))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("serial", [False, True])
def test_a_forked_child_has_no_turns(serial, others):
    with pycomm.LocalWorld(2, serial=serial) as world:
        world.run(fork, others)
