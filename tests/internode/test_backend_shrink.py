"""torch.distributed's shrink_group on groups of the backend that span nodes."""

import itertools
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import backends
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.nn.parallel import DistributedDataParallel

import pycomm

SECONDS = 20.0  # the groups' timeout
SOON = 10.0


def member(rank, size, store, nodes, function, *args):
    """For :class:`helpers.Ranks`: ``function(rank, *args)`` on a backend that spans nodes."""
    spanning.pretend(nodes[rank])
    return backends.member(rank, size, store, lambda *_: function(rank, *args), SECONDS)


def survivors_of(nodes, victims, function, *args):
    """Results of the ranks that `function` does not kill."""
    with helpers.Ranks(len(nodes), member, nodes, function, *args) as ranks:
        outcomes = ranks.wait_for(rank for rank in range(len(nodes)) if rank not in victims)
    assert all(outcome.error is None for outcome in outcomes), [o.trace for o in outcomes]
    return [outcome.value for outcome in outcomes]


def total(group=None):
    """The sum of 1 from every rank."""
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    assert x.eq(x[0]).all()
    return x[0].item()


def meet(group=None):
    """A barrier, and time for slower ranks to leave it before anybody does harm."""
    dist.barrier(group)
    time.sleep(0.3)


def fail(group=None):
    """Runs operations until one fails; returns the rank to blame."""
    while True:
        try:
            total(group)
        except pycomm.CollectiveError as error:
            return error.rank


def shrink(excluded, group=None):
    """The smaller group, and the ranks that have been left out."""
    excluded = set(excluded)
    while True:
        try:
            return dist.shrink_group(sorted(excluded), group), sorted(excluded)
        except pycomm.PeerDied as error:  # several have died
            excluded.add(error.rank)


def check_messages(group=None):
    """A message around the ring of ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x, y = torch.full((5,), float(rank)), torch.zeros(5)
    messages = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert y.tolist() == [(rank - 1) % size] * 5


def trained(wrap, numbers):
    """The parameters of a linear model after three steps."""
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1)
    model, inputs = wrap(net), torch.tensor(numbers).repeat(4, 1).T
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def go_on_without(rank, nodes, victims):
    meet()
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    world, excluded = shrink([fail()])
    left = [r for r in range(len(nodes)) if r not in victims]
    assert excluded == list(victims)
    assert world is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(rank), len(left))
    assert total() == len(left)
    check_messages()

    # DistributedDataParallel trains as one process does with all survivors' data.
    ours = trained(DistributedDataParallel, [float(rank)])
    torch.testing.assert_close(ours, trained(lambda net: net, [float(r) for r in left]))

    for pair in itertools.combinations(range(len(left)), 2):  # on a node, and between nodes
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            assert total(group) == 2
            check_messages(group)
            dist.destroy_process_group(group)
    return rank


@pytest.mark.parametrize(
    ("nodes", "victims"),
    [("aab", [0]), ("aab", [2]), ("abab", [0, 3]), ("abcc", [1]), ("abbc", [0, 2])],
    ids=str,
)
def test_survivors_of_kill_9_shrink_the_default_group(nodes, victims):
    left = [rank for rank in range(len(nodes)) if rank not in victims]
    assert survivors_of(nodes, victims, go_on_without, nodes, victims) == left


_begun: list[dist.Work] = []


def lose_a_rank_without_gloo(rank):
    """The others have begun an operation over Gloo, rank 2 never will."""
    if rank != 2:
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,))
        _begun.append(dist.all_reduce(sparse, async_op=True))
    meet()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    culprit, begin = fail(), time.monotonic()
    shrink([culprit])
    elapsed = time.monotonic() - begin
    check_messages()
    return rank, total(), elapsed < SOON


def test_nobody_waits_for_the_gloo_of_a_rank_that_has_died():
    expected = [(rank, 2.0, True) for rank in range(2)]
    assert survivors_of("abc", [2], lose_a_rank_without_gloo) == expected


def shrink_in_turn(rank):
    for _ in range(2):
        meet()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        shrink([fail()])
    return rank, total()


def test_a_shrunk_group_shrinks_in_turn():
    assert survivors_of("abcb", [1, 2], shrink_in_turn) == [(0, 2), (3, 2)]


def die_while_others_shrink(rank):
    """Rank 2 dies when all survivors of rank 1 are about to have the smaller group."""
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        pycomm.Group.should_commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    fail()
    with pytest.raises(pycomm.PeerDied, match=r"ranks \[2\] are gone, too") as raised:
        dist.shrink_group([1])
    assert raised.value.rank == 2
    dist.shrink_group([1, 2])
    return rank, total()


@pytest.mark.parametrize("nodes", ["abcd", "aabb", "aaaa"])
def test_all_survivors_have_the_smaller_group_or_none(nodes):
    assert survivors_of(nodes, [1, 2], die_while_others_shrink) == [(0, 2), (3, 2)]


def leave_out(rank, whole):
    """Rank 1 is left out of a group that has not failed."""
    group = None if whole else dist.new_group([0, 1, 2])
    if rank == 3 and not whole:
        dist.barrier()
        return dist.get_rank(), total()
    meet(group)
    if rank == 1:
        fail(group)
        seen = None
    else:
        began = time.monotonic()
        smaller = dist.shrink_group([1], group)
        assert time.monotonic() - began < SOON
        seen = dist.get_rank(smaller), total(smaller)
    if not whole:
        dist.barrier()  # the default group goes on
        assert total() == 4
    elif rank != 1:
        meet()
    return seen


def test_a_live_rank_is_left_out_of_the_default_group():
    assert survivors_of("abc", [], leave_out, True) == [(0, 2), None, (1, 2)]


def test_a_live_rank_is_left_out_of_another_group():
    assert survivors_of("abcc", [], leave_out, False) == [(0, 2), None, (1, 2), (3, 4)]


def wait_in_vain(rank):
    """Work of all kinds is under way when rank 1 dies; rank 0 waits for rank 2 only."""
    check_messages()
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums = [torch.ones(count) for count in (10, 100_000)]
    works = [dist.all_reduce(x, async_op=True) for x in sums]
    works.append(dist.all_gather([torch.empty(3) for _ in range(3)], sums[0][:3], async_op=True))
    works.append(dist.irecv(torch.empty(4), 1))
    if rank == 0:
        with pytest.raises(pycomm.PeerDied) as caught:
            dist.recv(torch.empty(4), 2)
        culprit = caught.value.rank
    else:
        time.sleep(1)  # rank 0 must be waiting
        culprit = fail()
    began = time.monotonic()
    world, excluded = shrink([culprit])
    assert excluded == [1]
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    assert time.monotonic() - began < SOON
    assert total() == 2
    check_messages()
    return dist.get_rank(world)


def test_work_under_way_ends():
    assert survivors_of("abc", [1], wait_in_vain) == [0, 1]


def differ(rank):
    """Rank 3 passes another list."""
    meet()
    if rank == 1:
        fail()
        return None
    lists = {0: [1], 2: [1], 3: [1, 2]}
    with pytest.raises(ValueError, match="must be the same on every rank"):
        dist.shrink_group(lists[rank])
    dist.shrink_group([1])
    return total()


def test_lists_that_differ_are_refused_on_all_ranks():
    assert survivors_of("abcd", [], differ) == [3, None, 3, 3]


def be_late(rank):
    """Rank 2 lives, is not excluded, and comes late."""
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fail()
    if rank == 2:
        time.sleep(3)
    told = []
    try:
        dist.shrink_group([1], pg_options=Backend.Options("pycomm", timedelta(seconds=1.5)))
    except pycomm.Timeout as error:
        told = [error.rank]
        dist.shrink_group([1])
    return *told, total()


def test_a_rank_that_lives_is_waited_for():
    assert survivors_of("abcd", [1], be_late) == [(2, 3), (3,), (2, 3)]


def survive(rank, begun, stop):
    """Runs operations until told to stop; returns how many ranks are left."""
    Path(f"{begun}.{rank}").touch()
    excluded, stops = [], torch.zeros(1)
    while True:
        try:
            if excluded:
                shrink(excluded)
                excluded = []
            assert total() == dist.get_world_size()
            stops.fill_(Path(stop).exists())
            dist.broadcast(stops, 0)
            if stops:
                dist.barrier()  # so that nobody leaves while others still need it
                return dist.get_world_size()
        except pycomm.PeerDied as error:
            excluded = [error.rank]


@pytest.mark.parametrize("seed", range(4))
def test_survivors_of_random_kills(seed, tmp_path):
    choice = random.Random(seed)
    nodes = choice.choice(["abc", "abcd", "aabb", "abba", "aabbc"])
    victims = choice.sample(range(len(nodes)), choice.randint(1, len(nodes) - 1))
    begun, stop = tmp_path / "begun", tmp_path / "stop"
    with helpers.Ranks(len(nodes), member, nodes, survive, str(begun), str(stop)) as ranks:
        for rank in range(len(nodes)):
            helpers.wait_until(Path(f"{begun}.{rank}").exists)
        for victim in victims:
            time.sleep(choice.random() / 10)
            ranks.signal(victim, signal.SIGKILL)
        stop.touch()
        left = [rank for rank in range(len(nodes)) if rank not in victims]
        found = [(outcome.value, outcome.trace) for outcome in ranks.wait_for(left)]
    assert all(trace == "" for _, trace in found), found


def be_late_in_the_second_try(rank, folder):
    """Two have died, the list names one of them at first, and rank 3 comes late with both."""
    meet()
    if rank < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    fail()
    with pytest.raises(pycomm.PeerDied, match="gone, too"):
        dist.shrink_group([1])
    if rank == 3:
        helpers.wait_until(lambda: len(list(Path(folder).glob("told*"))) == 2, 60)
    else:
        Path(folder, f"come{rank}").touch()
        helpers.wait_until(lambda: len(list(Path(folder).glob("come*"))) == 2, 60)
    told = []
    try:
        dist.shrink_group([0, 1], pg_options=Backend.Options("pycomm", timedelta(seconds=1.5)))
    except pycomm.Timeout as error:
        Path(folder, f"told{rank}").touch()
        told = [error.rank, error.operation]
        dist.shrink_group([0, 1])
    return *told, total()


def test_a_late_rank_is_told_by_its_first_number(tmp_path):
    expected = [(3, "shrink", 3), (3,), (3, "shrink", 3)]
    assert survivors_of("abcde", [0, 1], be_late_in_the_second_try, str(tmp_path)) == expected
