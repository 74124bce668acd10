"""Groups that span nodes, when something goes wrong: an error on every rank, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import helpers
import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import internode

TIMEOUT = 1.5


def storm(
    group: pycomm.Group,
    folder: str,
    compression: pycomm.Compression | None = None,
    algorithm: str = "auto",
):
    """Runs operations until an error; returns it and its time."""
    x = torch.ones(500_000)
    for turn in range(100_000):
        if turn == 3:
            Path(folder, f"under-way-{group.rank}").touch()
        try:
            if compression is None:
                pycomm.all_reduce(x, "avg", algorithm=algorithm, group=group)
            else:
                pycomm.compressed_all_reduce(x, compression, algorithm=algorithm, group=group)
        except pycomm.CollectiveError as error:
            at = time.monotonic()
            with pytest.raises(pycomm.GroupUnusable):
                pycomm.barrier(group=group)
            group.close()
            return type(error), error.rank, at
    return None


def wait_for_start(folder: Path, size: int) -> None:
    end = time.monotonic() + 30
    while len(list(folder.glob("under-way-*"))) < size:
        assert time.monotonic() < end
        time.sleep(0.01)


def ends(
    ranks: helpers.Ranks, size: int, victim: int, kind: type, culprits: tuple[int, ...] = ()
) -> list[float]:
    """The times at which the other ranks' storms ended, all with this error about the victim.

    `culprits`: other ranks that all of them may name instead.
    """
    named = set()
    found = []
    for outcome in ranks.wait_for([rank for rank in range(size) if rank != victim], 30):
        assert outcome.error is None, outcome.trace
        *what, at = outcome.value
        assert what[0] is kind
        named.add(what[1])
        found.append(at)
    assert len(found) == size - 1
    assert len(named) == 1
    assert named <= {victim, *culprits}
    return found


@pytest.mark.parametrize("compression", [None, pycomm.Int8()], ids=str)
@pytest.mark.parametrize(("nodes", "victim"), [([1, 1], 1), ([2, 2], 0), ([2, 1], 1)], ids=str)
def test_a_killed_rank(tmp_path, nodes, victim, compression):
    """With or without a stripe: all survivors raise, and those on its node name it."""
    with spanning.ranks(nodes, storm, str(tmp_path), compression, timeout=20.0) as ranks:
        wait_for_start(tmp_path, sum(nodes))
        killed = ranks.signal(victim, signal.SIGKILL)
        for at in ends(ranks, sum(nodes), victim, pycomm.PeerDied):
            assert at - killed < 3  # seconds, where cores are shared; mostly 0.6


@pytest.mark.parametrize(("nodes", "victim"), [([1, 1], 0), ([2, 1], 1)], ids=str)
def test_a_stopped_rank(tmp_path, nodes, victim):
    with spanning.ranks(nodes, storm, str(tmp_path), timeout=TIMEOUT) as ranks:
        wait_for_start(tmp_path, sum(nodes))
        stopped = ranks.signal(victim, signal.SIGSTOP)
        for at in ends(ranks, sum(nodes), victim, pycomm.Timeout):
            assert TIMEOUT - 0.1 < at - stopped < TIMEOUT + 2
        ranks.signal(victim, signal.SIGCONT)
        (late,) = ranks.wait_for([victim], 30)
        assert issubclass(late.value[0], pycomm.CollectiveError)


def reporting(group: pycomm.Group, victim: int):
    """What a rank knows of the other nodes, before the victim dies and when that is noticed."""
    pycomm.barrier(group=group)
    before = group.report().nodes
    if group.rank == victim:
        time.sleep(0.3)  # so that the others wait
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(10), group=group)
    return before, caught.value.report.nodes, str(caught.value.report)


@pytest.mark.parametrize("victim", [1, 2])
def test_an_error_tells_of_other_nodes(victim):
    """Rank 1 carries nothing; node 1 has only rank 2."""
    with spanning.ranks([2, 1], reporting, victim, timeout=20.0) as ranks:
        pid = ranks.pids[victim]
        survivors = [rank for rank in range(3) if rank != victim]
        for rank, outcome in zip(survivors, ranks.wait_for(survivors), strict=True):
            assert outcome.error is None, outcome.trace
            (before,), (after,), text = outcome.value
            there = (2,) if rank < 2 else (0, 1)
            assert (before.node, before.ranks) == (int(rank < 2), there)
            assert (before.peer, before.lost, before.told) == ({0: 2, 2: 0}.get(rank), False, "")
            assert f"node {after.node} (" in text
            if (rank, victim) == (0, 2):
                assert after.awaited
                assert after.lost
            if (rank, victim) == (2, 1):
                assert after.told == f"rank 1 (pid {pid}) died or left"
            if rank == 1:
                assert "exchanges with none of them" in text


def aborting(group: pycomm.Group):
    """Rank 1, which carries nothing, stops all while they wait for it."""
    if group.rank == 1:
        time.sleep(0.3)
        group.abort()
        return "aborted"
    try:
        pycomm.barrier(group=group)
    except pycomm.Aborted as error:
        return error.rank
    return None


def test_abort_reaches_other_nodes():
    assert spanning.run([2, 1], aborting, timeout=20.0) == [1, "aborted", 1]


def disagreeing(group: pycomm.Group):
    try:
        pycomm.all_reduce(torch.ones(100), "max" if group.rank == 2 else "sum", group=group)
    except pycomm.Mismatch as error:
        return error.rank
    return None


def test_nodes_that_disagree():
    assert spanning.run([2, 1], disagreeing, timeout=20.0) == [2, 2, 2]


def leaving(group: pycomm.Group, early: bool):
    """Rank 0 leaves after the last operation, or before it."""
    x = torch.ones(300_000)
    pycomm.all_reduce(x, group=group)
    if group.rank == 0 and early:
        group.close()
        return "left"
    if group.rank > 0:
        time.sleep(0.3)
    try:
        pycomm.all_reduce(x, group=group)
    except pycomm.PeerDied as error:
        return error.rank
    return float(x[0])


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]], ids=str)
def test_leaving(nodes):
    size = sum(nodes)
    assert spanning.run(nodes, leaving, False, timeout=20.0) == [float(size**2)] * size
    assert spanning.run(nodes, leaving, True, timeout=20.0) == ["left"] + [0] * (size - 1)


def slow(group: pycomm.Group):
    """A link on which every round takes a while; the whole takes longer than the timeout."""
    original = internode.GlooTransport.complete

    def late(link):
        time.sleep(0.07)
        original(link)

    internode.GlooTransport.complete = late
    begin = time.monotonic()
    x = torch.ones(4_000_000)
    pycomm.all_reduce(x, group=group)
    assert time.monotonic() - begin > 1.5 * group.timeout
    return float(x[0])


def test_a_slow_link_raises_nothing():
    """A rank that waits for the rank that waits for the link raises nothing, either."""
    assert spanning.run([2, 1], slow, timeout=1.0) == [3.0] * 3


def raises_on(group: pycomm.Group, culprit: int):
    if group.rank == culprit:
        raise KeyError("my own")
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(1000), group=group)
    assert caught.value.rank == culprit
    raise caught.value


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_thread_that_raises(world, culprit):
    with pytest.raises(KeyError, match="my own"):
        world(3, nodes=[2, 1]).run(raises_on, culprit)


def test_abort_of_threads(world):
    groups = world(3, nodes=[2, 1])
    assert groups.run(aborting) == [1, "aborted", 1]


def missing(group: pycomm.Group):
    if group.rank == 2:
        time.sleep(2.5)
        return None
    begin = time.monotonic()
    with pytest.raises(pycomm.Timeout) as caught:
        pycomm.barrier(group=group)
    assert 0.9 < time.monotonic() - begin < 2.2
    return caught.value.rank


def test_threads_that_do_not_come(world):
    assert world(3, timeout=1.0, nodes=[2, 1]).run(missing) == [2, 2, None]


def test_a_world_ends_with_work_under_way(world):
    """Both ranks raise; one has submitted an operation that the other never joins."""

    def body(group):
        if group.rank == 0:
            pycomm.all_reduce(torch.ones(1000), group=group, async_op=True)
        raise KeyError(group.rank)

    groups = world(2, timeout=2.0, nodes=[1, 1])
    with pytest.raises(KeyError):
        groups.run(body)
    began = time.monotonic()
    groups.close()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("compression", [pycomm.TopK(0.1), pycomm.Int8()], ids=str)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_of_three_nodes(tmp_path, victim, compression):
    with spanning.ranks([1, 1, 1], storm, str(tmp_path), compression, timeout=20.0) as ranks:
        wait_for_start(tmp_path, 3)
        killed = ranks.signal(victim, signal.SIGKILL)
        for at in ends(ranks, 3, victim, pycomm.PeerDied):
            assert at - killed < 3


def test_all_ranks_of_the_first_node_are_killed(tmp_path):
    """The others have lost both stripes to that node, and name the same one of its ranks."""
    with spanning.ranks([2, 2, 2], storm, str(tmp_path), timeout=20.0) as ranks:
        wait_for_start(tmp_path, 6)
        killed = ranks.signal(0, signal.SIGKILL)
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.wait_for(range(2, 6), 30)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        kind, culprit, at = outcome.value
        assert (kind, culprit) == (pycomm.PeerDied, outcomes[0].value[1])
        assert culprit in (0, 1)
        assert at - killed < 3


def leave_while_aborting(group: pycomm.Group, way: str) -> None:
    """Another thread, or a signal's handler, aborts the group while it tells that it leaves."""
    leave = internode.GlooTransport.leave
    signal.signal(signal.SIGUSR1, lambda *_: group.abort())

    def leave_late(link: internode.GlooTransport, farewell: bytes) -> None:
        if way == "handler":
            signal.raise_signal(signal.SIGUSR1)
        else:
            thread = threading.Thread(target=group.abort)
            thread.start()
            thread.join()
        leave(link, farewell)

    internode.GlooTransport.leave = leave_late
    group.close()


@pytest.mark.parametrize("way", ["handler", "thread"])
def test_a_group_is_aborted_while_it_leaves(way):
    assert spanning.run([1, 1], leave_while_aborting, way) == [None, None]
