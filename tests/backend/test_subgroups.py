"""Groups of some of the default group's ranks: they cost nothing until they are used."""

import contextlib
import itertools
import os
import random
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import backends
import pytest
import torch
import torch.distributed as dist
from backends import cost

import pycomm


def members_of(size, count):
    """Lists of ranks: all, pairs and everything between."""
    subsets = [s for k in range(2, size + 1) for s in itertools.combinations(range(size), k)]
    return list(itertools.islice(itertools.cycle(subsets), count))


def use(group, members, number):
    """Every kind of operation; the group's first one is sometimes a message."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if number % 2:
        exchange(group, rank, size, number)
    x = torch.arange(300 * (number % 7) + 1, dtype=torch.float32) + rank
    dist.all_reduce(x, group=group)
    assert x.tolist() == [size * i + size * (size - 1) / 2 for i in range(x.numel())]
    y = torch.full((5,), rank, dtype=torch.int8)
    dist.broadcast(y, members[-1], group=group)
    assert y.tolist() == [size - 1] * 5
    if number % 2 == 0:
        exchange(group, rank, size, number)


def exchange(group, rank, size, number):
    sent, got = torch.full((20_000,), float(rank + number)), torch.empty(20_000)
    after = dist.isend(sent, group=group, group_dst=(rank + 1) % size)
    dist.recv(got, group=group, group_src=(rank - 1) % size)
    after.wait()
    assert got.eq((rank - 1) % size + number).all()


def make_many(rank, size, count):
    members = members_of(size, count)
    dist.all_reduce(torch.ones(100))  # the default group's own threads and memory
    before = cost()
    groups = [dist.new_group(ranks) for ranks in members]
    unused = cost()
    for number, (group, ranks) in enumerate(zip(groups, members, strict=True)):
        if rank in ranks:
            use(group, ranks, number)
    used = cost()
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.barrier()
    return before, unused, used, cost()


def test_200_groups_of_4_ranks_leave_nothing():
    for before, unused, used, after in backends.run(4, make_many, 200, seconds=120):
        assert unused == before
        assert used[1] == before[1]
        assert after[1:] == before[1:]
        # A page per group goes when the rank that has it makes or leaves another group.
        assert after[0] <= before[0] + (200 << 12) < used[0]


def first_message(rank, _size):
    """Ranks 1 and 2 use the group, and the others do not."""
    group = dist.new_group([0, 1, 2, 3])
    x = torch.full((100_000,), float(rank))
    if rank == 1:
        dist.send(x, 2, group)
    elif rank == 2:
        dist.recv(x, 1, group)
    dist.destroy_process_group(group)
    dist.barrier()
    return x[-1].item()


def test_two_ranks_may_be_the_only_ones():
    assert backends.run(4, first_message) == [0.0, 1.0, 1.0, 3.0]


def same_name(rank, _size):
    """Groups with hashed names: the name of a destroyed one is used again."""
    results = []
    for number in range(5):
        group = dist.new_group([0, 2], use_local_synchronization=True)
        if rank in (0, 2):
            x = torch.full((10,), float(rank + number))
            dist.all_reduce(x, group=group)
            results.append(x[0].item())
            dist.destroy_process_group(group)
    return results


def test_a_name_may_be_used_again():
    expected = [2.0 + 2 * number for number in range(5)]
    assert backends.run(3, same_name) == [expected, [], expected]


def at_once(rank, size):
    """All ranks use many groups for the first time, each in an order of its own."""
    groups = [dist.new_group(range(size)) for _ in range(12)]
    tensors = [torch.full((50,), float(rank + number)) for number in range(12)]
    order = list(range(12))
    random.Random(rank).shuffle(order)
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
    for work in works.values():
        work.wait()
    return [x[0].item() for x in tensors]


def test_first_uses_at_once():
    assert backends.run(4, at_once) == [[6.0 + 4 * number for number in range(12)]] * 4


def abort_unused(rank, _size):
    group = dist.new_group([0, 1])
    if rank == 0:
        group._get_backend(torch.device("cpu")).abort()
        dist.barrier()
        return None
    dist.barrier()
    with pytest.raises(pycomm.Aborted) as error:
        dist.all_reduce(torch.ones(3), group=group)
    return error.value.rank


def test_an_abort_before_the_first_use():
    assert backends.run(2, abort_unused) == [None, 0]


def never_used(rank, _size):
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.destroy_process_group(group)
        dist.barrier()
        dist.barrier()
        return None
    dist.barrier()
    with pytest.raises(pycomm.PeerDied) as error:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    return error.value.rank


def test_a_rank_that_left_without_using_the_group():
    assert backends.run(2, never_used) == [None, 0]


def in_window(rank, size):
    """A tensor in the window lies in the windows of all groups, and outlives one that ends."""
    default = dist.group.WORLD._get_backend(torch.device("cpu"))
    x = default.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu"))
    results = []
    for number in range(3):
        group = dist.new_group(range(size))
        x.fill_(float(rank + number))
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        results.append(x[-1].item())
    dist.all_reduce(x)
    return [*results, x[0].item()]


def test_tensors_in_the_window():
    assert backends.run(3, in_window) == [[3.0, 6.0, 9.0, 27.0]] * 3


def broadcast_for_long(x, group):
    for _ in range(100_000):
        dist.broadcast(x, 0, group=group)


def stopped_peer(rank, size):
    """One group fails because a rank is stopped; its tensor is then used in another group."""
    default = dist.group.WORLD._get_backend(torch.device("cpu"))
    first = dist.new_group(range(size), timeout=timedelta(seconds=1))
    second = dist.new_group(range(size))
    x = default.allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    x.fill_(1.0)
    with pytest.raises(pycomm.CollectiveError):
        broadcast_for_long(x, first)
    kept = x.eq(1.0).all().item()
    x.fill_(float(rank))
    dist.all_reduce(x, group=second)
    return kept, x[0].item(), x[-1].item()


def test_a_tensor_survives_the_failure_of_one_group():
    with backends.ranks(2, stopped_peer) as ranks:
        time.sleep(4)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(4)
        ranks.signal(1, signal.SIGCONT)
        assert [outcome.value for outcome in ranks.join()] == [(True, 1.0, 1.0)] * 2


def split_and_merge(rank, _size):
    """Splits and merges without torch.distributed's functions, which demand an accelerator."""
    world = dist.group.WORLD
    half = world.split_group([0, 1] if rank < 2 else [2, 3])
    x = torch.full((3,), float(rank))
    half.allreduce([x]).wait()
    alone = half.split_group([half.rank()])
    alone.allreduce([x]).wait()
    store = dist.distributed_c10d._get_default_store()
    merged = half.merge_remote_group(store, 4, group_name="both halves")
    y = torch.ones(100_000)
    merged.allreduce([y]).wait()
    names = [group._get_backend(torch.device("cpu")).name() for group in (half, alone, merged)]
    seats = half.rank(), half.size(), alone.size(), merged.size()
    for group in (alone, merged, half):
        group.shutdown()
    return x.tolist(), y.eq(4).all().item(), seats, names


def test_split_and_merge():
    for rank, (x, whole, seats, names) in enumerate(backends.run(4, split_and_merge)):
        assert x == [1.0 if rank < 2 else 5.0] * 3
        assert whole
        assert seats == (rank % 2, 2, 1, 4)
        assert names == ["pycomm"] * 3


def forked(rank, _size):
    """A child of rank 0 can neither use nor leave a group of its parent's."""
    group, cpu = dist.new_group([0, 1]), torch.device("cpu")
    dist.all_reduce(torch.ones(3))
    used = dist.group.WORLD._get_backend(cpu)
    if rank == 0 and (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            with pytest.raises(pycomm.GroupUnusable, match="forked"):
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(RuntimeError, match="parent of this forked"):
                used.allocate_tensor(3, dtype=torch.float32, device=cpu)
            group.shutdown()
            code = 0
        os._exit(code)
    refused = rank != 0 or os.waitpid(child, 0)[1] == 0
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return refused, x.tolist()


def test_a_forked_child_has_no_part():
    assert backends.run(2, forked) == [(True, [2.0] * 3)] * 2


def error_of(group):
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except Exception as error:
        return type(error).__name__
    return None


def fail_first_use(rank, _size):
    """Rank 0 has no address space left when it first uses the group; later it has."""
    group, others = dist.new_group([0, 1, 2]), dist.new_group([1, 2])
    dist.barrier()
    errors = []
    if rank == 0:
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
        errors.append(error_of(group))
        resource.setrlimit(resource.RLIMIT_AS, before)
    dist.barrier()
    errors.append(error_of(group))
    if rank > 0:
        dist.all_reduce(torch.ones(3), group=others)
    dist.destroy_process_group(group)
    x = torch.ones(3)
    dist.all_reduce(x)
    return errors, x.tolist()


def test_a_first_use_that_fails():
    first, *others = backends.run(3, fail_first_use)
    assert first == (["MemoryError", "GroupUnusable"], [3.0] * 3)
    assert others == [(["PeerDied"], [3.0] * 3)] * 2
