"""abort() and Ctrl-C: waiting ranks raise Aborted at once, and the group is unusable."""

import os
import signal
import threading
import time

import helpers
import pytest
import torch

import pycomm


def expect_aborted(group, culprit, operation="all_reduce"):
    """Waits for the last rank until another one aborts; returns the time of the error."""
    with pytest.raises(pycomm.Aborted, match=f"rank {culprit} .*aborted the group") as caught:
        pycomm.all_reduce(torch.ones(4), group=group)
    at = time.monotonic()
    assert (caught.value.rank, caught.value.operation) == (culprit, operation)
    with pytest.raises(pycomm.GroupUnusable, match="aborted the group"):
        pycomm.barrier(group=group)
    return at


@pytest.mark.parametrize("size", [2, 4])
def test_from_another_thread(world, size):
    local_world = world(size)
    aborted_at = []

    def abort_soon():
        time.sleep(0.3)
        aborted_at.append(time.monotonic())
        local_world.groups[size - 1].abort()
        local_world.groups[size - 1].abort()  # idempotent

    thread = threading.Thread(target=abort_soon)
    thread.start()

    def body(group):
        return expect_aborted(group, size - 1) if group.rank < size - 1 else thread.join()

    times = local_world.run(body)[:-1]
    assert all(at - aborted_at[0] <= 1 for at in times)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whoever_enters_later_raises_too(world, size):
    for _ in range(20):  # whichever rank comes first
        local_world = world(size)
        local_world.groups[0].abort()
        local_world.run(expect_aborted, 0)


def test_pending_work_is_let_go(world):
    local_world = world(2)
    group = local_world.groups[0]
    works = [pycomm.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
    group.abort()
    for work, kind in zip(works, (pycomm.Aborted, *[pycomm.PycommError] * 2), strict=True):
        with pytest.raises(kind, match="aborted the group"):
            work.wait()
        assert work.is_completed()


def wait_in_vain(group, started):
    """Rank 0 gets a Ctrl-C while ranks 0 and 1 wait for rank 2, which never comes."""
    if group.rank == 2:
        helpers.wait_until(lambda: (started / "over").exists())
        return None
    (started / str(group.rank)).touch()
    try:
        pycomm.all_reduce(torch.ones(4), group=group)
    except KeyboardInterrupt:
        at, error = time.monotonic(), "KeyboardInterrupt"
    except pycomm.Aborted as caught:
        at, error = time.monotonic(), caught
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.barrier(group=group)
    return at, error


def test_ctrl_c_in_a_process(tmp_path):
    with helpers.Ranks(3, helpers.in_group, wait_in_vain, {}, tmp_path) as ranks:
        helpers.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        time.sleep(0.2)
        pressed = ranks.signal(0, signal.SIGINT)
        first, second = ranks.wait_for([0, 1])
        (tmp_path / "over").touch()
        ranks.join()
    at, error = first.value
    assert error == "KeyboardInterrupt"
    assert at - pressed <= 1
    at, error = second.value
    assert isinstance(error, pycomm.Aborted)
    assert error.rank == 0
    assert error.pid == first.pid
    assert at - pressed <= 1


def if_asynchronous_wait(result):
    if isinstance(result, pycomm.Work):
        result.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_leaves_wait_at_once(world, asynchronous):
    """Runs in the main thread, in which Python runs signal handlers."""
    group = world(2).groups[0]
    x = torch.ones(4)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if_asynchronous_wait(pycomm.all_reduce(x, group=group, async_op=asynchronous))
    assert time.monotonic() - start <= 1.3
    timer.join()
    group.abort()


def interrupt_while_others_wait(*_):
    """Rank 0 of two; rank 1 never comes."""
    group = pycomm.LocalWorld(2).groups[0]
    works = []

    def submit():
        works.extend(pycomm.barrier(group=group, async_op=True) for _ in range(2))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Timer(0.2, submit)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pycomm.barrier(group=group)
    thread.join()
    errors = []
    for work in works * 2:  # each wait() raises
        with pytest.raises(pycomm.Aborted, match="rank 0") as caught:
            work.wait()
        errors.append(str(caught.value))
    return errors


def test_ctrl_c_while_another_thread_has_work():
    """In a process of its own, which an exception that is raised twice would end."""
    (errors,) = helpers.run_ranks(1, interrupt_while_others_wait)
    assert len(errors) == 4
    assert all("KeyboardInterrupt" in error for error in errors)


def interrupt_while_raising(*_):
    """In calls by both ways into C++: the short way, and pybind11's."""

    def interrupted(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)

    pycomm.Aborted.__init__ = interrupted
    for call in (pycomm.all_reduce, pycomm.broadcast):
        groups = pycomm.LocalWorld(2).groups
        groups[1].abort()
        with pytest.raises(KeyboardInterrupt):
            call(torch.ones(4), group=groups[0])


def test_ctrl_c_while_an_error_is_raised():
    helpers.run_ranks(1, interrupt_while_raising)
