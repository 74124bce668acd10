"""Several threads on one group take turns; several groups do not affect each other."""

import sys
import threading
from contextlib import suppress

import helpers
import pytest
import torch
import torch.distributed as dist

import pycomm


def in_threads(*bodies):
    """Runs the functions at once; raises the exception of the first one that raised."""
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_on_one_group_take_turns(world):
    """Equal operations, so that their order does not matter; every one must be whole."""
    rounds, elements = 300, 3000

    def body(group):
        def work():
            for turn in range(rounds):
                x = torch.full((elements,), float(group.rank + 1))
                if turn % 5:
                    pycomm.all_reduce(x, algorithm="two_shot", group=group)
                else:
                    pycomm.all_reduce(x, algorithm="two_shot", group=group, async_op=True).wait()
                assert torch.equal(x, torch.full((elements,), 6.0))

        in_threads(work, work)
        return group._core.sequence

    assert world(3, staging_bytes=1 << 14).run(body) == [2 * rounds] * 3


def test_two_groups_in_opposite_order(world):
    """Rank 0 uses A and B from two threads in one order, rank 1 in the other."""
    size, rounds = 2, 400
    first, second = world(size), world(size)
    results = {}

    def use(name, group):
        x = torch.ones(100)
        for _ in range(rounds):
            pycomm.all_reduce(x, "avg", group=group)
        results[name, group.rank] = pycomm.all_reduce(x, group=group)[0].item()

    threads = [
        (lambda r=rank, n=name, g=group: use(n, g.groups[r]))
        for rank in range(size)
        for name, group in (
            (("a", first), ("b", second)) if rank == 0 else (("b", second), ("a", first))
        )
    ]
    in_threads(*threads)
    assert results == {(name, rank): 2.0 for name in "ab" for rank in range(size)}


def test_asynchronous_work_on_two_groups_in_opposite_order(world):
    """One thread per rank: that would deadlock if the groups waited for each other."""
    first, second = world(2), world(2)

    def body(group):
        mine = [first.groups[group.rank], second.groups[group.rank]]
        if group.rank == 1:
            mine.reverse()
        xs = [torch.full((50_000,), 1.0) for _ in mine]
        for _ in range(30):
            works = [
                pycomm.all_reduce(x, "max", group=g, async_op=True)
                for x, g in zip(xs, mine, strict=True)
            ]
            for work in works:
                work.wait()
        return [x[0].item() for x in xs]

    assert first.run(body) == [[1.0, 1.0]] * 2


def close_while_others_submit(_rank, _size, _store, turns):
    sys.setswitchinterval(1e-5)
    for _ in range(turns):
        (group,) = pycomm.LocalWorld(1).groups

        def submit(group=group):
            with suppress(pycomm.GroupUnusable):
                while True:
                    pycomm.barrier(group=group, async_op=True)

        in_threads(submit, submit, submit, group.close)
        del group, submit


@pytest.mark.slow
def test_close_while_others_submit():
    """Later calls are refused. Runs in a process of its own, which a stray worker would end."""
    helpers.run_ranks(1, close_while_others_submit, 300)


def subgroups(rank, size, store):
    """Groups of subsets, several on one process group, used in turns."""
    helpers.join_world(rank, size, store)
    subsets = [[0, 1, 2, 3], [0, 2], [1, 3], [1, 2, 3], [3, 0]]
    process_groups = [dist.new_group(ranks) for ranks in subsets]
    groups = {}
    for number, (ranks, process_group) in enumerate(zip(subsets, process_groups, strict=True)):
        if rank in ranks:
            groups[number] = pycomm.init(process_group)
            assert groups[number].rank == dist.get_rank(process_group)
            assert groups[number].size == len(ranks)
            groups[number, "again"] = pycomm.init(process_group)
    results = []
    for _ in range(20):
        for key, group in groups.items():
            ranks = subsets[key if isinstance(key, int) else key[0]]
            x = pycomm.all_reduce(torch.tensor([10**rank]), group=group)
            results.append(x.item() == sum(10**r for r in ranks))
    assert pycomm.default_group() is groups[0]  # the first one made
    for group in groups.values():
        group.close()
    dist.destroy_process_group()
    return all(results), len(results)


def test_subgroups():
    memberships = [3, 3, 3, 4]
    assert helpers.run_ranks(4, subgroups) == [(True, 2 * 20 * number) for number in memberships]


def outsider(rank, size, store):
    helpers.join_world(rank, size, store)
    pair = dist.new_group([0, 1])
    if rank == 2:
        try:
            pycomm.init(pair)
        except ValueError as error:
            result = str(error)
    else:
        with pycomm.init(pair) as group:
            result = pycomm.all_reduce(torch.ones(1), group=group).item()
    dist.barrier()  # nobody ends while others still connect
    return result


def test_a_process_outside_the_group_is_told_so():
    assert helpers.run_ranks(3, outsider) == [2.0, 2.0, "group must contain this process"]
