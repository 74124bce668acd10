"""Going on after a failure by torch.distributed's own means: abort, shrink_group, reconfigure."""

import os
import signal
import threading
import time
from datetime import timedelta

import backends
import helpers
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend

SOON = 20.0  # seconds; a group's timeout is 60


def total(group=None):
    """The sum of 1 from every rank."""
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    assert x.eq(x[0]).all()
    return x[0].item()


def die_if(rank, victims):
    """Ends the ranks `victims` when all ranks have left a barrier."""
    dist.barrier()
    time.sleep(0.1)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)


def arrive(store, size):
    """A barrier over a Store, after which no rank is in an operation that others have left."""
    store.add("arrived", 1)
    helpers.wait_until(lambda: store.add("arrived", 0) == size, 30)


def culprit(group=None):
    """The rank that the next operation names."""
    with pytest.raises(pycomm.PeerDied) as error:
        total(group)
    return error.value.rank


def loss_of(model, numbers):
    inputs = torch.tensor(numbers).repeat(4, 1).T
    return (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()


def trained(wrap, numbers):
    """The parameters of a linear model after three steps."""
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1)
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, numbers).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def go_on_without(rank, size, victims):
    die_if(rank, victims)
    excluded = {culprit()}
    while True:
        try:
            group = dist.shrink_group(sorted(excluded))
            break
        except pycomm.PeerDied as error:  # several have died
            excluded.add(error.rank)
    left = [r for r in range(size) if r not in victims]
    assert excluded == set(victims)
    assert group is dist.group.WORLD
    assert dist.get_backend() == "pycomm"
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(rank), len(left))
    assert total() == len(left)
    dist.barrier()

    # DistributedDataParallel trains as one process does with all survivors' data.
    ours = trained(DistributedDataParallel, [float(rank)])
    alone = trained(lambda net: net, [float(r) for r in left])
    torch.testing.assert_close(ours, alone)

    pair = dist.new_group([0, 1])
    assert pair is not None
    if dist.get_rank() < 2:
        assert total(pair) == 2
        other, x = 1 - dist.get_rank(), torch.zeros(5)
        if dist.get_rank() == 0:
            dist.send(torch.arange(5.0), other, group=pair)
        else:
            dist.recv(x, other, group=pair)
            assert x.tolist() == [0, 1, 2, 3, 4]
    return rank


@pytest.mark.parametrize("victims", [(0,), (1,), (1, 3)])
def test_survivors_of_kill_9_shrink_the_default_group(victims):
    size = 3 + len(victims) // 2
    with backends.ranks(size, go_on_without, victims) as ranks:
        left = [r for r in range(size) if r not in victims]
        outcomes = ranks.wait_for(left)
    assert [outcome.value for outcome in outcomes] == left, [o.trace for o in outcomes]


def shrink_in_turn(rank, _size):
    for _ in range(2):
        die_if(dist.get_rank(), [1])
        dist.shrink_group([culprit()])
    return rank, total()


def test_a_shrunk_group_shrinks_in_turn():
    with backends.ranks(4, shrink_in_turn) as ranks:
        outcomes = ranks.wait_for([0, 3])
    assert [outcome.value for outcome in outcomes] == [(0, 2), (3, 2)], [o.trace for o in outcomes]


def leave_a_live_rank_out(rank, _size, used):
    """Rank 0 of [0, 1, 2] is left out of a group that has not failed."""
    group = dist.new_group([0, 1, 2])
    if used:
        total(group)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(pycomm.Aborted):
            total(group)
        dist.destroy_process_group(group)
        seen = None
    else:
        flags = [dist.distributed_c10d.SHRINK_DEFAULT, dist.distributed_c10d.SHRINK_ABORT]
        smaller = dist.shrink_group([0], group, flags[used])
        seen = dist.get_rank(smaller), total(smaller)
        assert dist.get_process_group_ranks(smaller) == [1, 2]
        half = dist.new_group([1, 2], use_local_synchronization=True)
        assert total(half) == 2
    assert time.monotonic() - begin < SOON
    assert total() == 3  # the default group goes on
    return seen


@pytest.mark.parametrize("used", [False, True])
def test_a_live_rank_is_left_out_of_a_group_without_waiting_for_it(used):
    assert backends.run(3, leave_a_live_rank_out, used) == [None, (0, 2), (1, 2)]


def misuse_shrink(rank, _size):
    made = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert made.supports_shrinking
    for excluded in ([2], [-1], [rank]):
        with pytest.raises(ValueError, match="ranks_to_exclude must be other ranks, 0 to 1, got"):
            made.shrink(excluded)
    return total()


def test_bad_ranks_are_refused_and_do_no_harm():
    assert backends.run(2, misuse_shrink) == [2, 2]


OPERATIONS = {
    "sync": lambda: dist.all_reduce(torch.ones(10)),
    "async": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
    "message": lambda: dist.recv(torch.ones(10), (dist.get_rank() + 1) % 3),
}


def abort_under_way(rank, _size, operation):
    """Ranks 0 and 1 wait for rank 2, which lets a thread abort the group twice."""
    group = dist.group.WORLD
    dist.barrier()
    if rank == 2:
        time.sleep(0.1)
        thread = threading.Thread(target=lambda: [group.abort() for _ in range(2)])
        thread.start()
        thread.join()
    with pytest.raises(pycomm.Aborted) as error:
        OPERATIONS[operation]()
    assert error.value.rank == 2
    group.abort()
    for run in OPERATIONS.values():
        with pytest.raises(dist.DistBackendError):
            run()
    begin = time.monotonic()
    dist.destroy_process_group()
    group.abort()  # does nothing
    assert time.monotonic() - begin < 5


def abort_member(rank, size, store, operation):
    backends.join(rank, size, store)
    abort_under_way(rank, size, operation)
    backends.join(rank, size, f"{store}-2")
    assert total() == size
    arrive(dist.FileStore(f"{store}-arrivals", size), size)
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    backends.join(rank, size, f"{store}-3")
    result = total()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("operation", OPERATIONS)
def test_abort_ends_what_is_under_way_on_all_ranks(operation):
    assert helpers.run_ranks(3, abort_member, operation) == [3, 3, 3]


class Unconnected:
    def __init__(self, error):
        self.error = error

    def connect(self):
        raise self.error

    def close(self):
        pass


def test_abort_of_a_group_whose_first_use_fails():
    def made(error):
        return backend._c10d().Backend(0, 1, timedelta(seconds=1), "auto", Unconnected(error))

    made(RuntimeError("the Store is gone")).abort()
    with pytest.raises(KeyboardInterrupt):
        made(KeyboardInterrupt()).abort()


# From torch 2.14 on


def join_unconfigured(rank, size, store):
    dist.init_process_group(
        "pycomm",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,
    )


def handles_of(store, name, rank, ranks):
    """The handles of some ranks, exchanged over a Store of their own."""
    store.set(f"{name}/{rank}", dist._get_reconfigure_handle())
    return [store.get(f"{name}/{r}").decode() for r in ranks]


def reconfigured(rank, size, store):
    """Rank 3 joins only after rank 1 has died."""
    exchange = dist.FileStore(f"{store}-handles", size)
    join_unconfigured(rank, size, store)
    assert dist._supports_reconfigure()
    with pytest.raises(pycomm.GroupUnusable, match="not configured yet"):
        total()
    if rank < 3:
        handles = handles_of(exchange, "first", rank, range(3))
        assert dist._reconfigure(11, handles[::-1]).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (2 - rank, 3)
        assert total() == 3
        with pytest.raises(ValueError, match="handles must be unique"):
            dist._reconfigure(12, handles)  # the old ones
        die_if(rank, [1])
        assert culprit() == 1
    handles = handles_of(exchange, "second", rank, [3, 0, 2])
    with pytest.raises(ValueError, match="handles must be unique"):
        dist._reconfigure(13, [*handles, handles[0]])
    dist._reconfigure(14, set(handles)).wait()
    # A set is ordered by the ranks so far: 2, 0 and 3.
    assert dist.get_rank() == [2, 0, 3].index(rank)  # ranks 0 and 2 had become 2 and 0
    assert total() == 3
    with pytest.raises(ValueError, match="uuid must be new"):
        dist._reconfigure(14, handles_of(exchange, "third", rank, [0, 2, 3]))
    assert total() == 3
    pair = dist.new_group([0, 2])
    result = total(pair) if dist.get_rank() != 1 else 2
    dist.destroy_process_group()
    return result


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has no reconfigure")
def test_reconfigure_leaves_the_dead_out_and_takes_new_ranks_in():
    with helpers.Ranks(4, reconfigured) as ranks:
        outcomes = ranks.wait_for([0, 2, 3])
    assert [outcome.value for outcome in outcomes] == [2, 2, 2], [o.trace for o in outcomes]
