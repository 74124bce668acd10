"""A wait watches all ranks, counts only running time, and reports which rank waited for which."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import helpers
import pytest
import spanning
import torch
from usage import descriptors

import pycomm


def attempt(group: pycomm.Group, folder: Path, busy: int = -1, seconds: float = 0) -> tuple:
    """An all-reduce, in which one rank is late; its result or its error, and when."""
    pycomm.barrier(group=group)
    (folder / f"ready-{group.rank}").touch()
    if group.rank == busy:
        helpers.wait_until(lambda: (folder / "go").exists())
        time.sleep(seconds)
    x = torch.ones(1000)
    try:
        pycomm.all_reduce(x, group=group)
    except pycomm.CollectiveError as error:
        return error, time.monotonic()
    return x[0].item(), time.monotonic()


def wait_for_all(folder: Path, size: int) -> None:
    helpers.wait_until(lambda: len(list(folder.glob("ready-*"))) == size)
    time.sleep(0.2)  # until they wait


@pytest.mark.parametrize("nodes", [[3], [4], [1, 1, 1], [2, 1, 1]], ids=str)
def test_a_death_is_noticed_while_another_rank_is_busy(tmp_path, nodes):
    """The ranks wait for rank 1, and do not wait for the last one yet."""
    size = sum(nodes)
    with spanning.ranks(nodes, attempt, tmp_path, 1, 0.1, timeout=30.0) as ranks:
        wait_for_all(tmp_path, size)
        killed = ranks.signal(size - 1, signal.SIGKILL)
        others = [rank for rank in range(size - 1) if rank != 1]
        outcomes = ranks.wait_for(others, 10)  # before the busy one has come
        (tmp_path / "go").touch()
        outcomes += ranks.wait_for([1])
    for outcome in outcomes:
        error, _ = outcome.value
        assert (type(error), error.rank) == (pycomm.PeerDied, size - 1), outcome
    assert all(outcome.value[1] - killed < 3 for outcome in outcomes[:-1])


@pytest.mark.parametrize("nodes", [[2, 1], [2, 1, 1]], ids=str)
def test_a_death_elsewhere_is_noticed_while_the_carrier_is_busy(tmp_path, nodes):
    """Rank 0 alone is linked to other nodes; rank 1 waits for it."""
    last = sum(nodes) - 1
    with spanning.ranks(nodes, attempt, tmp_path, 0, 0.1, timeout=30.0) as ranks:
        wait_for_all(tmp_path, last + 1)
        killed = ranks.signal(last, signal.SIGKILL)
        outcomes = ranks.wait_for(range(1, last), 10)  # before the busy one has come
        (tmp_path / "go").touch()
        outcomes += ranks.wait_for([0])
    for outcome in outcomes:
        error, _ = outcome.value
        assert (type(error), error.rank) == (pycomm.PeerDied, last), outcome
    assert all(outcome.value[1] - killed < 3 for outcome in outcomes[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [[3], [1, 1], [2, 1]], ids=str)
def test_time_in_which_all_are_stopped_does_not_count(tmp_path, nodes):
    size = sum(nodes)
    with spanning.ranks(nodes, attempt, tmp_path, size - 1, 0.3, timeout=1.5) as ranks:
        wait_for_all(tmp_path, size)
        for rank in range(size):
            ranks.signal(rank, signal.SIGSTOP)
        time.sleep(3)
        (tmp_path / "go").touch()
        for rank in range(size):
            ranks.signal(rank, signal.SIGCONT)
        outcomes = ranks.join()
    assert [outcome.value[0] for outcome in outcomes] == [float(size)] * size, outcomes


def come_late(group: pycomm.Group) -> str:
    if group.rank == 1:
        time.sleep(1.5)
    with pytest.raises(pycomm.Timeout) as caught:
        pycomm.all_reduce(torch.ones(4), group=group)
    assert caught.value.rank == 1
    return str(caught.value)


@pytest.mark.parametrize("nodes", [None, [1, 1]], ids=str)
def test_who_waited_for_whom_and_for_how_long(world, nodes):
    waiter, late = world(2, timeout=0.5, nodes=nodes).run(come_late)
    seconds = "0.5" if nodes is None else r"1\.\d"  # with the grace that other nodes have
    during = r" during all_reduce\(float32, 4 elements"
    silent = rf"rank 1 \(pid \d+\) did not answer within .*: rank 0 waited {seconds} s for it"
    busy = (
        rf"rank 0 waited {seconds} s for this rank, rank 1 \(pid \d+\), and gave up before it came"
    )
    assert re.match(silent + during, waiter), waiter
    assert re.match(busy + during, late), late


def become_another_program(group: pycomm.Group, folder: Path) -> tuple:
    """Rank 1 executes another program, while the others wait for rank 0 or for rank 1."""
    pycomm.barrier(group=group)
    (folder / f"ready-{group.rank}").touch()
    if group.rank == 1:
        os.execv("/bin/sleep", ["sleep", "60"])
    if group.rank == 0:
        helpers.wait_until(lambda: (folder / "go").exists())
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(1000), group=group)
    return caught.value.rank, caught.value.pid


def become_another_program_alone(group: pycomm.Group, folder: Path) -> tuple:
    (folder / f"ready-{group.rank}").touch()
    pycomm.barrier(group=group)
    if group.rank == 1:
        helpers.wait_until(lambda: (folder / "go").exists())
        os.execv("/bin/sleep", ["sleep", "60"])
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(1000), group=group)
    return caught.value.rank, caught.value.pid


def test_a_rank_that_becomes_another_program_on_a_node_of_its_own(tmp_path):
    with spanning.ranks([1, 1], become_another_program_alone, tmp_path, timeout=30.0) as ranks:
        wait_for_all(tmp_path, 2)
        (tmp_path / "go").touch()
        (outcome,) = ranks.wait_for([0], 10)
        assert outcome.value == (1, ranks.pids[1])


@pytest.mark.parametrize("nodes", [[3], [2, 1]], ids=str)
def test_a_rank_that_becomes_another_program_has_died(tmp_path, nodes):
    with spanning.ranks(nodes, become_another_program, tmp_path, timeout=30.0) as ranks:
        if len(nodes) > 1:  # another node learns of it once rank 0 has
            (tmp_path / "go").touch()
        outcomes = ranks.wait_for([2], 10)
        (tmp_path / "go").touch()
        outcomes += ranks.wait_for([0], 10)
        pid = ranks.pids[1]
    assert [outcome.value for outcome in outcomes] == [(1, pid)] * 2


def test_a_long_wait_sleeps(world):
    """Waiting ranks leave the cores to working ranks, and are woken when these are done."""

    def body(group):
        if group.rank == 0:
            time.sleep(1)
        before = resource.getrusage(resource.RUSAGE_THREAD)
        pycomm.barrier(group=group)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        return after.ru_nvcsw - before.ru_nvcsw

    for group_size in (3, 9):  # with a core for each, or without
        _, *naps = world(group_size).run(body)
        assert all(1 <= count < 1000 for count in naps)


def many_groups(rank: int, size: int, store: str, count: int) -> list[float]:
    """All open at once, with few descriptors left."""
    helpers.join_world(rank, size, store)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * count, used + 2 * count))
    groups = [pycomm.init(timeout=30, staging_bytes=1 << 20) for _ in range(count)]
    sums = [pycomm.all_reduce(torch.ones(1), group=group).item() for group in groups]
    torch.distributed.barrier()  # who ends while another still works has died
    return sums


def test_groups_share_what_watches_a_process():
    assert helpers.run_ranks(5, many_groups, 25) == [[5.0] * 25] * 5


def test_a_watched_process():
    """One descriptor for all; none for another process with the same pid."""
    before = descriptors()
    with subprocess.Popen(["sleep", "60"]) as child:
        first = pycomm._C.Process.find(child.pid)
        held = descriptors()
        assert pycomm._C.Process.find(child.pid) is first
        assert descriptors() == held == before + 1
        if (fork := os.fork()) == 0:  # which may have closed what it has inherited
            own = pycomm._C.Process.find(child.pid)
            os._exit(0 if own is not first and not own.ended else 1)
        assert os.waitpid(fork, 0)[1] == 0
        assert not first.ended
        child.kill()
        helpers.wait_until(lambda process=first: process.ended)
        assert pycomm._C.Process.find(child.pid) is not first  # a zombie has its pid
        child.wait()
        assert pycomm._C.Process.find(child.pid) is None
    del first
    assert descriptors() == before
