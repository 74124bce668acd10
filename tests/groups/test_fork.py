"""A forked child may not touch its parent's group, and cannot spoil it by accident."""

import gc
import os
import signal
import time
import traceback

import pytest
import torch

import pycomm


def in_child(body):
    """Runs `body` in a forked child; its exception fails the test, its hang as well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("the child hung")
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_waits_are_refused(world):
    groups = world(2).groups
    done = pycomm.all_reduce(torch.ones(4), group=world(1).groups[0], async_op=True)
    done.wait()
    work = pycomm.all_reduce(torch.ones(4), group=groups[0], async_op=True)

    def body():
        done.wait()
        with pytest.raises(pycomm.GroupUnusable, match="parent of this forked"):
            work.wait()

    in_child(body)
    pycomm.all_reduce(torch.ones(4), group=groups[1])
    work.wait()


def test_operations_are_refused(world):
    local_world = world(2)
    group = local_world.groups[0]
    x, y = torch.ones(4), torch.ones(8)
    local_world.run(lambda g: pycomm.barrier(group=g))

    def body():
        for call in (
            lambda: pycomm.all_reduce(x, group=group),
            lambda: pycomm.all_reduce(x, out=torch.empty(4), group=group),
            lambda: pycomm.all_reduce(x, group=group, async_op=True),
            lambda: pycomm.reduce_scatter(x, y, group=group),
            lambda: pycomm.all_gather(y, x, group=group),
            lambda: pycomm.broadcast(x, group=group),
            lambda: pycomm.barrier(group=group),
            lambda: torch.ops.pycomm.all_reduce(x, "sum", "auto", group.name),
            lambda: group.empty(4),
        ):
            with pytest.raises((pycomm.GroupUnusable, RuntimeError), match="parent of this forked"):
                call()

    in_child(body)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]


def test_a_child_has_nothing_to_name(world):
    (group,) = world(1)
    group._core.subject = "mine"

    def body():
        assert group._core.subject == ""

    in_child(body)
    assert group._core.subject == "mine"
    group._core.subject = ""


def test_a_child_makes_a_group_of_its_own(world):
    local_world = world(2)
    local_world.run(lambda g: pycomm.barrier(group=g))

    def body():
        with pycomm.LocalWorld(2) as own:
            assert own.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]

    in_child(body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_child_that_closes_or_drops_the_group_harms_nobody(asynchronous):
    local_world = pycomm.LocalWorld(2, timeout=20)

    def use(group):
        work = pycomm.all_reduce(torch.ones(1), group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()

    local_world.run(use)

    def body():
        nonlocal local_world
        local_world.close()
        del local_world
        gc.collect()

    in_child(body)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]
    local_world.close()


def test_a_child_that_aborts_harms_nobody(world):
    local_world = world(2, timeout=20)
    in_child(local_world.groups[0].abort)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]


def test_a_child_that_drops_a_tensor_of_the_window_leaves_its_memory(world):
    group = world(2).groups[0]
    kept = [group.empty(100_000).fill_(7)]

    def body():
        kept.clear()
        gc.collect()

    in_child(body)
    assert bool((kept[0] == 7).all())
