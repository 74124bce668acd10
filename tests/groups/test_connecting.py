"""Deaths and interrupts while nodes connect: every rank of every node hears of them."""

from __future__ import annotations

import os
import signal
import time

import helpers
import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import internode


def before_connecting(happen):
    internode.connect = happen


def having_told_its_address(happen):
    original = internode.InterruptibleStore.set

    def tell(store, key, value):
        original(store, key, value)
        if key != "secret":
            happen()

    internode.InterruptibleStore.set = tell


def once_connected(happen):
    original = internode.connect

    def connect(*args):
        original(*args)
        happen()

    internode.connect = connect


STEPS = (before_connecting, having_told_its_address, once_connected)


def struck(rank, size, store, nodes, victim, step, number):
    """The victim sends itself a signal at a step; returns the error of `init`."""
    spanning.pretend(nodes[rank])
    internode._INTERVAL, internode.SILENCE, internode.SILENCE = 0.05, 1.5, 1.5
    helpers.join_world(rank, size, store)

    def happen(*_):
        os.kill(os.getpid(), number)
        time.sleep(60)  # a signal that is no end comes to the main thread

    if rank == victim:
        step(happen)
    start = time.monotonic()
    with pytest.raises((pycomm.CollectiveError, KeyboardInterrupt)) as caught:
        pycomm.init(timeout=60)
    took = time.monotonic() - start
    assert took < 15, took
    return caught.type, getattr(caught.value, "rank", None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("nodes", "victim"), [("aab", 0), ("aab", 2), ("abc", 1)])
def test_a_death(nodes, victim, step):
    """The victim has other ranks on its node, or is alone there."""
    with helpers.Ranks(3, struck, nodes, victim, step, signal.SIGKILL) as ranks:
        outcomes = ranks.wait_for([rank for rank in range(3) if rank != victim], 40)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert outcome.value == (pycomm.PeerDied, victim)


def test_a_death_of_a_rank_that_connects_to_nobody():
    test_a_death("aab", 1, before_connecting)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("nodes", "victim"), [("aab", 0), ("aab", 2)])
def test_ctrl_c(nodes, victim, step):
    found = helpers.run_ranks(3, struck, nodes, victim, step, signal.SIGINT, limit=40)
    wanted = [(pycomm.Aborted, victim)] * 3
    wanted[victim] = (KeyboardInterrupt, None)
    assert found == wanted


def stopped(rank, size, store):
    """Rank 1 stops for a while, alone on its node, before it connects."""
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    if rank == 1:
        original = internode.connect

        def connect(*args):
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args)

        internode.connect = connect
    with pycomm.init(timeout=60) as group:
        return pycomm.all_reduce(torch.ones(1), group=group).item()


def test_a_rank_that_stops_for_a_moment_is_not_dead():
    with helpers.Ranks(2, stopped) as ranks:
        pid = ranks.pids[1]
        helpers.wait_until(lambda: state(pid) == "T")
        time.sleep(1)
        ranks.signal(1, signal.SIGCONT)
        outcomes = ranks.join()
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0], outcomes


def state(pid):
    """A letter; T for stopped."""
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0]


def interrupted_while_meeting(rank, size, store, folder):
    """Rank 1 is interrupted before rank 2 has come; later all ranks make a group."""
    helpers.join_world(rank, size, store)
    caught = None
    if rank == 2:
        helpers.wait_until(lambda: len(list(folder.glob("over-*"))) == 2)
    else:
        (folder / f"comes-{rank}").touch()
        with pytest.raises((pycomm.Aborted, KeyboardInterrupt)) as caught:
            pycomm.init(timeout=60)
        (folder / f"over-{rank}").touch()
    with pycomm.init(timeout=20) as group:
        assert pycomm.all_reduce(torch.ones(1), group=group).item() == size
    return caught and (caught.type, getattr(caught.value, "rank", None))


def test_ctrl_c_before_all_have_come(tmp_path):
    with helpers.Ranks(3, interrupted_while_meeting, tmp_path) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.glob("comes-*"))) == 2)
        time.sleep(0.5)  # until they wait
        ranks.signal(1, signal.SIGINT)
        outcomes = ranks.join(40)
    wanted = [(pycomm.Aborted, 1), (KeyboardInterrupt, None), None]
    assert [outcome.value for outcome in outcomes] == wanted, outcomes
