"""A failure is raised by works, by later calls, and in a signal's handler."""

import os
import signal
import threading

import helpers
import pytest
import torch

import pycomm


def submit(group):
    return pycomm.all_reduce(torch.ones(3), group=group, async_op=True)


def test_every_work_names_the_culprit(world):
    groups = world(3).groups
    works = [submit(groups[0]) for _ in range(3)]
    groups[1].close()
    for work in works:
        with pytest.raises(pycomm.PeerDied, match="rank 1") as caught:
            work.wait()
        assert caught.value.rank == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_call_raises_what_nobody_has_been_told(world, asynchronous):
    """The next call raises the error once; then the group is unusable."""
    groups = world(2).groups
    work = submit(groups[0])
    groups[1].close()
    helpers.wait_until(work.is_completed)
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(3), group=groups[0], async_op=asynchronous)
    assert caught.value.rank == 1
    with pytest.raises(pycomm.GroupUnusable, match="rank 1"):
        submit(groups[0])
    with pytest.raises(pycomm.PeerDied):
        work.wait()


def test_a_failure_that_wait_has_raised_is_told(world):
    groups = world(2).groups
    work = submit(groups[0])
    groups[1].close()
    with pytest.raises(pycomm.PeerDied):
        work.wait()
    with pytest.raises(pycomm.GroupUnusable, match="rank 1"):
        submit(groups[0])


def come_back(*_):
    """Rank 0 of two, which waits in vain, is interrupted by a handler that uses the group."""
    uses = {
        "close": lambda group: group.close(),
        "collective": lambda group: pycomm.barrier(group=group),
    }
    found = {}
    for name, use in uses.items():
        group = pycomm.LocalWorld(2).groups[0]
        signal.signal(signal.SIGUSR1, lambda *_, group=group, use=use: use(group))
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(
            pycomm.GroupUnusable, match="a signal's handler may only abort"
        ) as caught:
            pycomm.barrier(group=group)
        found[name] = caught.type
        timer.join()
    return list(found)


def test_a_handler_does_not_wait_for_its_own_thread():
    assert helpers.run_ranks(1, come_back, limit=20) == [["close", "collective"]]
