"""Ctrl-C and other exceptions during operations: no rank hangs."""

import contextlib
import os
import signal
import threading
import time

import helpers
import pytest
import torch
from torch import nn

import pycomm


def leave_by_an_exception(rank, size, store, folder):
    """Rank 0 leaves by an exception, with a pending operation that rank 1 never joins."""
    helpers.join_world(rank, size, store)
    start = time.monotonic()
    with contextlib.suppress(KeyError), pycomm.init(timeout=60) as group:
        if rank == 0:
            pycomm.barrier(group=group, async_op=True)
            raise KeyError
        helpers.wait_until((folder / "left").exists)
        with pytest.raises(pycomm.Aborted) as caught:
            pycomm.barrier(group=group)
        return caught.value.rank
    (folder / "left").touch()
    return time.monotonic() - start


def test_an_exception_leaves_a_with_block_at_once(tmp_path):
    took, culprit = helpers.run_ranks(2, leave_by_an_exception, tmp_path)
    assert took < 20
    assert culprit == 0


def test_an_exception_leaves_a_world_at_once():
    start = time.monotonic()
    with contextlib.suppress(KeyError), pycomm.LocalWorld(2, timeout=60) as world:
        pycomm.barrier(group=world.groups[1], async_op=True)  # the first to be closed
        raise KeyError
    assert time.monotonic() - start < 20


@contextlib.contextmanager
def interrupted():
    """Ctrl-C soon, and a KeyboardInterrupt at once."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - start < 10
    timer.join()


def in_close(group):
    pycomm.barrier(group=group, async_op=True)
    group.close()


def in_wait(group):
    pycomm.barrier(group=group, async_op=True).wait()


def in_an_operation_of_torch(group):
    torch.ops.pycomm.all_reduce(torch.ones(3), "sum", "auto", group.name)


@pytest.mark.parametrize("where", [in_close, in_wait, in_an_operation_of_torch])
def test_ctrl_c_is_an_abort_elsewhere(world, where):
    """Rank 2 never comes."""
    groups = world(3).groups
    found = []

    def wait_in_vain():
        with pytest.raises(pycomm.CollectiveError) as caught:
            pycomm.barrier(group=groups[1])
        found.append((caught.type, caught.value.rank))

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    with interrupted():
        where(groups[0])
    thread.join()
    assert found == [(pycomm.Aborted, 0)]


def test_ctrl_c_in_trim(world):
    """trim() stops waiting; the operation goes on."""
    groups = world(2).groups
    work = pycomm.barrier(group=groups[0], async_op=True)
    with interrupted():
        groups[0].trim()
    pycomm.barrier(group=groups[1])
    work.wait()
    groups[0].trim()


def test_trim_of_a_group_that_fails_meanwhile(world):
    groups = world(2).groups
    work = pycomm.barrier(group=groups[0], async_op=True)
    timer = threading.Timer(0.3, groups[1].abort)
    timer.start()
    with pytest.raises(pycomm.Aborted):
        groups[0].trim()
    with pytest.raises(pycomm.Aborted):
        work.wait()
    timer.join()


def test_ctrl_c_in_run(world):
    over, found = threading.Event(), []

    def body(group):
        if group.rank == 1:
            over.wait(20)
            return
        with pytest.raises(pycomm.CollectiveError) as caught:
            pycomm.barrier(group=group)
        found.append(caught.type)

    local_world = world(2)
    with interrupted():
        local_world.run(body)
    helpers.wait_until(lambda: found)
    over.set()
    assert found == [pycomm.Aborted]


def backward_in_vain(group, folder):
    """Rank 2 never comes."""
    model = pycomm.DataParallel(nn.Linear(4, 4), group=group)
    loss = model(torch.ones(2, 4)).sum()
    if group.rank == 2:
        helpers.wait_until((folder / "over").exists)
        return None
    (folder / str(group.rank)).touch()
    with pytest.raises((KeyboardInterrupt, pycomm.CollectiveError)) as caught:
        loss.backward()
    return caught.type, getattr(caught.value, "rank", None)


def test_ctrl_c_in_backward(tmp_path):
    arguments = (backward_in_vain, {"timeout": 60}, tmp_path)
    with helpers.Ranks(3, helpers.in_group, *arguments) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGINT)
        outcomes = ranks.wait_for([0, 1], 20)
        (tmp_path / "over").touch()
        ranks.join()
    found = [outcome.value for outcome in outcomes]
    assert found == [(KeyboardInterrupt, None), (pycomm.Aborted, 0)], outcomes
