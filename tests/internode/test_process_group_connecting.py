"""Failures while nodes connect over process groups."""

import os
import signal
import threading
import time
from pathlib import Path

import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm
from pycomm import _connecting, _init

SECONDS = 60.0  # the groups' timeout
SOON = 20.0


def fail_with(failure):
    """Makes this rank fail when it connects the next time."""
    _connecting.Carriers = lambda *_: failure()


def die():
    time.sleep(0.3)  # slower ranks leave the rendezvous
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise RuntimeError("no link")


def make(rank, size, store, nodes, victim, failure):
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    if rank == victim:
        fail_with(failure)
    began = time.monotonic()
    with pytest.raises(pycomm.CollectiveError) as raised:
        pycomm.init(transport="process_group", timeout=SECONDS)
    helpers.wait_until(lambda: "pycomm-carriers" not in [t.name for t in threading.enumerate()])
    dist.destroy_process_group()
    return type(raised.value), raised.value.rank, time.monotonic() - began < SOON


@pytest.mark.parametrize("nodes", ["ab", "abc", "abab"])
def test_a_death_while_nodes_connect_ends_the_wait(nodes):
    with helpers.Ranks(len(nodes), make, nodes, 1, die) as ranks:
        left = [rank for rank in range(len(nodes)) if rank != 1]
        found = [(outcome.value, outcome.trace) for outcome in ranks.wait_for(left)]
    assert found == [((pycomm.PeerDied, 1, True), "")] * len(left)


@pytest.mark.parametrize("nodes", ["ab", "abab"])
def test_a_rank_that_cannot_connect_ends_the_wait(nodes):
    found = helpers.run_ranks(len(nodes), make, nodes, 1, refuse)
    assert [seen[1:] for seen in found] == [(1, True)] * len(nodes)
    # A rank of its node may first see that it has given up.
    assert {kind for kind, *_ in found} <= {pycomm.CollectiveError, pycomm.Aborted}


def connect_behind(rank, size, store, nodes, victim):
    """One rank has not told the others where it is before the timeout."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    over = threading.Event()
    if rank == victim:
        fail_with(lambda: over.wait() and refuse())
    with pytest.raises(pycomm.CollectiveError) as raised:
        pycomm.init(transport="process_group", timeout=3)
    over.set()
    helpers.wait_until(lambda: "pycomm-carriers" not in [t.name for t in threading.enumerate()])
    dist.destroy_process_group()
    return raised.value.rank, str(raised.value)


@pytest.mark.parametrize("nodes", ["ab", "abc", "abab"])
def test_the_rank_that_is_behind_is_blamed(nodes):
    """Not those that wait for it."""
    victim = len(nodes) - 1
    found = helpers.run_ranks(len(nodes), connect_behind, nodes, victim)
    assert [rank for rank, _ in found] == [victim] * len(nodes)
    assert all(f"(rank {victim}: not connected within 3 s)" in text for _, text in found)


def come_late(rank, size, store):
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    came, seen = Path(f"{store}.came"), []
    connect, deadline = _init.connect_nodes, _connecting.Deadline

    def connect_late(*given):
        if rank == 1:
            time.sleep(0.5)
            came.touch()
        return connect(*given)

    def begin(seconds):
        seen.append(came.exists())
        return deadline(seconds)

    _init.connect_nodes, _connecting.Deadline = connect_late, begin
    with pycomm.init(transport="process_group", timeout=SECONDS):
        dist.destroy_process_group()
    return seen


def test_the_deadline_begins_when_all_have_come():
    assert helpers.run_ranks(2, come_late) == [[True]] * 2


def operate(group):
    while True:
        pycomm.barrier(group=group)


def shrink(group):
    """Rank 3 dies, and rank 1 when the smaller group connects."""
    if group.rank == 1:
        fail_with(die)  # the group has connected already
    pycomm.barrier(group=group)
    time.sleep(0.3)
    if group.rank == 3:
        die()
    with pytest.raises(pycomm.CollectiveError):
        operate(group)
    began = time.monotonic()
    smaller = group.shrink()
    total = pycomm.all_reduce(torch.ones(5), group=smaller)
    return smaller.ranks, time.monotonic() - began < SOON, total.tolist()


@pytest.mark.parametrize("nodes", ["abcd", "abab", "abca"])
def test_a_death_while_the_smaller_group_connects(nodes):
    options = {"transport": "process_group", "timeout": SECONDS}
    with spanning.ranks(nodes, shrink, **options) as ranks:
        found = [(outcome.value, outcome.trace) for outcome in ranks.wait_for([0, 2])]
    assert found == [(((0, 2), True, [2.0] * 5), "")] * 2
