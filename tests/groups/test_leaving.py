"""Leaving: close() after the last operation harms no rank; leaving earlier counts as death."""

import multiprocessing
import os
import pickle
import signal
import time

import helpers
import pytest
import torch

import pycomm

OPERATIONS = {
    "one_shot": lambda x, group: pycomm.all_reduce(x, algorithm="one_shot", group=group),
    "two_shot": lambda x, group: pycomm.all_reduce(x, algorithm="two_shot", group=group),
    "ring": lambda x, group: pycomm.all_reduce(x, algorithm="ring", group=group),
    "tree": lambda x, group: pycomm.all_reduce(x, algorithm="tree", group=group),
    "broadcast": lambda x, group: pycomm.broadcast(x, 0, group=group),
    "barrier": lambda _, group: pycomm.barrier(group=group),
}


def last_operation_then_leave(group, names, elements):
    """Each operation has a new group, which ranks leave as soon as they can; the last is late."""
    x = torch.full((elements,), float(group.rank + 1))
    for name in names:
        x.fill_(group.rank + 1)
        if group.rank == group.size - 1:
            time.sleep(0.05)
        OPERATIONS[name](x, group)
    return x


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_process_may_end_after_its_last_operation(name):
    size, elements = 3, 5000
    results = helpers.run_group(size, last_operation_then_leave, ["ring", name], elements)
    for rank, result in enumerate(results):
        value = {"broadcast": 1, "barrier": rank + 1}.get(name, 1 + 2 + 3)
        assert torch.equal(result, torch.full((elements,), float(value)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_thread_may_close_after_its_last_operation(world, name):
    for size in (2, 3, 5):

        def body(group):
            x = torch.full((100,), float(group.rank + 1))
            OPERATIONS[name](x, group)
            group.close()
            return x[0].item()

        got = world(size).run(body)
        total = size * (size + 1) / 2
        expected = {"broadcast": [1.0] * size, "barrier": [r + 1.0 for r in range(size)]}
        assert got == expected.get(name, [total] * size)


@pytest.mark.parametrize("name", OPERATIONS)
def test_closing_too_early_counts_as_death(world, name):
    def body(group):
        if group.rank == 1:
            group.close()
            return
        x = torch.ones(100)
        with pytest.raises(pycomm.PeerDied, match=r"rank 1 .* died or left during") as caught:
            OPERATIONS[name](x, group)
        assert caught.value.rank == 1
        assert caught.value.pid == os.getpid()
        with pytest.raises(pycomm.GroupUnusable, match="rank 1"):
            pycomm.barrier(group=group)

    world(3, timeout=20).run(body)


def test_close_is_idempotent_and_final(world):
    group = world(1).groups[0]
    x = torch.ones(3)
    work = pycomm.all_reduce(x, group=group, async_op=True)
    group.close()
    group.close()
    work.wait()
    for call in (
        lambda: pycomm.all_reduce(x, group=group),
        lambda: pycomm.all_reduce(x, out=torch.empty(3), group=group),
        lambda: pycomm.all_reduce(x, group=group, async_op=True),
        lambda: pycomm.broadcast(x, group=group),
        lambda: pycomm.barrier(group=group),
        lambda: group.empty(3),
    ):
        with pytest.raises(pycomm.GroupUnusable, match="closed"):
            call()


def test_close_finishes_what_was_started(world):
    local_world = world(2)

    def body(group):
        xs = [torch.full((1000,), float(i)) for i in range(50)]
        for x in xs:
            pycomm.all_reduce(x, group=group, async_op=True)
        group.close()
        return [x[-1].item() for x in xs]

    assert local_world.run(body) == [[2.0 * i for i in range(50)]] * 2


def exit_with_work_in_flight(rank, size, store):
    helpers.join_world(rank, size, store)
    x = torch.ones(1 << 20)
    pycomm.all_reduce(x)  # makes the default group, which nobody closes
    for _ in range(20):
        pycomm.all_reduce(x, "max", async_op=True)


def test_a_process_may_end_with_work_in_flight():
    helpers.run_ranks(2, exit_with_work_in_flight)


def reduce_again(group, victim, ready):
    """After a death the survivors make a new group among themselves."""
    import torch.distributed as dist

    ready.joinpath(str(group.rank)).touch()
    try:
        while True:
            pycomm.all_reduce(torch.ones(5), group=group)
    except pycomm.PeerDied as error:
        assert error.rank == victim  # noqa: PT017
    survivors = [rank for rank in range(group.size) if rank != victim]
    among_survivors = dist.new_group(survivors, use_local_synchronization=True)
    with pycomm.init(among_survivors) as smaller:
        total = pycomm.all_reduce(torch.tensor([group.rank]), group=smaller).item()
    os._exit(total)  # torch.distributed's own end would wait for the dead


def test_survivors_can_make_a_new_group(tmp_path):
    with helpers.Ranks(3, helpers.in_group, reduce_again, {}, 1, tmp_path) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.join()
    assert [outcome.exitcode for outcome in outcomes] == [2, -signal.SIGKILL, 2]


@pytest.mark.parametrize(
    "kind",
    [pycomm.PeerDied, pycomm.Timeout, pycomm.Mismatch, pycomm.Aborted, pycomm.CollectiveError],
)
def test_errors_keep_their_attributes_when_pickled(kind):
    error = kind("what happened", rank=3, pid=4711, operation="all_gather", sequence=42)
    for copy in (
        pickle.loads(pickle.dumps(error)),
        multiprocessing.reduction.ForkingPickler.loads(
            bytes(multiprocessing.reduction.ForkingPickler.dumps(error))
        ),
    ):
        assert type(copy) is kind
        assert str(copy) == "what happened"
        assert (copy.rank, copy.pid, copy.operation, copy.sequence) == (3, 4711, "all_gather", 42)
    unusable = pickle.loads(pickle.dumps(pycomm.GroupUnusable("closed")))
    assert type(unusable) is pycomm.GroupUnusable
    assert str(unusable) == "closed"
