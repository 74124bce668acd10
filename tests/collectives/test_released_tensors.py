"""Tensors in the window after an error: no other rank touches a failed rank's tensor."""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import helpers
import pytest
import sweep
import torch

import pycomm

ALGORITHMS = ("two_shot", "ring", "tree")
SENTINEL = -7.0


def repeat_until_it_fails(group, algorithm, elements, started=lambda: None):
    """All-reduces of a window tensor. Returns the error, and the tensor, overwritten at once."""
    x = group.empty(elements)
    expected = torch.full((elements,), float(sum(range(1, group.size + 1))))
    x.fill_(group.rank + 1)
    try:
        pycomm.barrier(group=group)  # a rank may be aborted before it leaves it
        started()
        while True:
            x.fill_(group.rank + 1)
            pycomm.all_reduce(x, algorithm=algorithm, group=group)
            assert torch.equal(x, expected), "an operation that succeeded returned garbage"
    except pycomm.CollectiveError as error:
        x.fill_(SENTINEL)
        return error, x


def is_untouched(x):
    return bool((x == SENTINEL).all())


@pytest.mark.parametrize(("size", "algorithm"), sweep.half_of([2, 3], ALGORITHMS))
def test_abort_in_the_middle(world, size, algorithm):
    rng = random.Random(f"{size} {algorithm}")
    for _ in range(6):
        local_world = world(size)

        def body(group):
            timer = threading.Timer(rng.uniform(0.005, 0.05), group.abort)
            started = timer.start if group.rank == 0 else lambda: None
            error, x = repeat_until_it_fails(group, algorithm, 2 << 20, started)
            time.sleep(0.05)
            return error, is_untouched(x)

        for error, untouched in local_world.run(body):
            assert type(error) is pycomm.Aborted
            assert error.rank == 0
            assert untouched
        local_world.close()


def outlive_a_sleeper(group, algorithm, folder):
    """Returns the error, and true if no other rank has changed the tensor when all have ended."""
    mark = folder / f"{group.rank}"
    error, x = repeat_until_it_fails(group, algorithm, 2 << 20, mark.touch)
    (folder / f"{group.rank} raised").touch()
    helpers.wait_until(lambda: (folder / "over").exists())
    return type(error), error.rank, error.completed, is_untouched(x)


def run_with_a_sleeper(algorithm, seed, folder):
    """Stops the last of three ranks in the middle, until the others have given up."""
    folder.mkdir()
    arguments = ({"timeout": 0.7}, algorithm, folder)
    with helpers.Ranks(3, helpers.in_group, outlive_a_sleeper, *arguments) as ranks:
        helpers.wait_until(lambda: all((folder / f"{r}").exists() for r in range(3)))
        time.sleep(random.Random(f"{algorithm} {seed}").uniform(0.02, 0.06))
        ranks.signal(2, signal.SIGSTOP)
        helpers.wait_until(lambda: all((folder / f"{r} raised").exists() for r in range(2)))
        ranks.signal(2, signal.SIGCONT)
        helpers.wait_until(lambda: (folder / "2 raised").exists())
        (folder / "over").touch()
        return [outcome.value or outcome for outcome in ranks.join()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stopped_rank_that_wakes_up(algorithm, tmp_path):
    values = run_with_a_sleeper(algorithm, 0, tmp_path / "0")
    assert {value[:2] for value in values} == {(pycomm.Timeout, 2)}
    assert all(untouched for *_, untouched in values)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_stopped_ranks_that_wake_up(algorithm, tmp_path):
    for seed in range(1, 11):
        values = run_with_a_sleeper(algorithm, seed, tmp_path / str(seed))
        assert {value[:2] for value in values} == {(pycomm.Timeout, 2)}
        assert all(untouched for *_, untouched in values), seed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_is_killed(algorithm, tmp_path):
    arguments = ({"timeout": 60}, algorithm, tmp_path)
    with helpers.Ranks(4, helpers.in_group, outlive_a_sleeper, *arguments) as ranks:
        helpers.wait_until(lambda: all((tmp_path / f"{r}").exists() for r in range(4)))
        time.sleep(0.03)
        ranks.signal(3, signal.SIGKILL)
        helpers.wait_until(lambda: all((tmp_path / f"{r} raised").exists() for r in range(3)))
        (tmp_path / "over").touch()
        outcomes = ranks.wait_for(range(3))
    for outcome in outcomes:
        kind, culprit, _, untouched = outcome.value
        assert (kind, culprit, untouched) == (pycomm.PeerDied, 3, True)


@pytest.mark.parametrize("size", [2, 4])
def test_errors_tell_what_is_complete(world, size):
    """All ranks have completed `completed` operations, and none more than one beyond it."""
    local_world = world(size)
    done = 5

    def body(group):
        for _ in range(done):
            pycomm.all_reduce(torch.ones(1 << 16), algorithm="two_shot", group=group)
        if group.rank == 0:
            time.sleep(0.05)
            group.abort()
        with pytest.raises(pycomm.Aborted, match=f"every rank: operations up to {done}") as caught:
            pycomm.all_reduce(torch.ones(4), group=group)
        return caught.value.completed, caught.value.sequence

    assert set(local_world.run(body)) == {(done, done + 1)}


def test_errors_tell_that_nothing_is_complete(world):
    local_world = world(2, timeout=0.3)
    with pytest.raises(pycomm.Timeout, match="every rank: none") as caught:
        pycomm.barrier(group=local_world.groups[0])
    assert caught.value.completed == 0


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "compressed_all_reduce"])
def test_memory_that_is_replaced_while_a_call_waits(world, name):
    """Another thread gives the tensors of a waiting call other memory."""
    count = 4 << 20  # its memory goes back to the system when it is freed
    first, second = world(2).groups

    def tensors(value):
        own = torch.full((count,), value)
        return [torch.zeros(2 * count), own] if name == "all_gather" else [own]

    early, late = tensors(1.0), tensors(3.0)
    function = getattr(pycomm, name)
    extra = {"compression": pycomm.Identity()} if name == "compressed_all_reduce" else {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function, *early, group=first, **extra)
        helpers.wait_until(lambda: not first._core.idle())
        for tensor in early:
            tensor.data = torch.zeros(1)
        function(*late, group=second, **extra)
        running.result(timeout=60)
    wanted = {"all_reduce": 4.0, "broadcast": 1.0, "all_gather": 1.0, "compressed_all_reduce": 2.0}
    assert late[0][:count].eq(wanted[name]).all()
