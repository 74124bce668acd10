"""Nothing stays behind: no names, no descriptors, no threads, no memory, not even after kill -9."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import helpers
import pytest
import torch
from usage import descriptors, mappings, threads

import pycomm
from pycomm._runtime import rendezvous


def names():
    """Files in the folders where pycomm's or torch's shared memory could have names."""
    places = (Path("/dev/shm"), Path("/tmp"))
    found = {path for place in places if place.is_dir() for path in place.iterdir()}
    return {p for p in found if "pycomm" in p.name and "pycomm-test-" not in p.name} | {
        p for p in found if p.parent == Path("/dev/shm")
    }


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def use(group):
    x = group.empty(10_000).fill_(1)
    pycomm.all_reduce(x, algorithm="ring", group=group)
    pycomm.all_reduce(torch.ones(100), group=group, async_op=True).wait()


def one_cycle():
    with pycomm.LocalWorld(3) as world:
        world.run(use)


@pytest.mark.slow
def test_two_hundred_worlds_of_threads():
    for _ in range(20):
        one_cycle()
    gc.collect()
    before = descriptors(), threads(), mappings()
    memory = resident_bytes()
    for _ in range(200):
        one_cycle()
    gc.collect()
    assert (descriptors(), threads(), mappings()) == before
    assert resident_bytes() - memory < 2 << 20


def test_a_window_goes_with_its_last_reference():
    """The memory is freed at once, not when the garbage collector runs."""
    gc.collect()
    before = descriptors(), mappings()
    gc.disable()
    try:
        one_cycle()
        assert (descriptors(), mappings()) == before
    finally:
        gc.enable()


def cycles(rank, size, store, count):
    helpers.join_world(rank, size, store)
    seen = []
    for turn in range(count):
        with pycomm.init(staging_bytes=1 << 20) as group:
            use(group)
        pycomm.set_default_group(None)
        del group
        if turn in (19, count - 1):
            gc.collect()
            seen.append((descriptors(), threads(), mappings(), resident_bytes(), len(names())))
    return seen


def test_two_hundred_groups_of_processes():
    before_any = names()
    for before, after in helpers.run_ranks(2, cycles, 220):
        assert all(b <= a for a, b in zip(before[:3], after[:3], strict=True)), (before, after)
        assert after[3] - before[3] < 4 << 20
    assert names() <= before_any


def failing_cycles(rank, size, store, count):
    """Groups that end by an error, one after the other."""
    helpers.join_world(rank, size, store)
    seen = []
    for turn in range(count):
        group = pycomm.init(staging_bytes=1 << 20)
        x = group.empty(1000 + rank)
        with pytest.raises(pycomm.Mismatch):
            pycomm.all_reduce(x, group=group)
        pycomm.set_default_group(None)
        del group, x
        if turn in (9, count - 1):
            gc.collect()
            seen.append((descriptors(), threads(), mappings()))
    return seen


def test_failed_groups_leave_nothing_either():
    for before, after in helpers.run_ranks(2, failing_cycles, 60):
        assert all(b <= a for a, b in zip(before, after, strict=True)), (before, after)


def barrier_by_the_worker(group):
    pycomm.barrier(group=group, async_op=True).wait()


def interrupted_cycle(barrier):
    """The other rank never comes."""
    group = pycomm.LocalWorld(2).groups[0]
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        barrier(group=group)
    timer.join()


def test_interrupted_groups_leave_nothing_either():
    gc.collect()
    before = descriptors(), mappings()
    for turn in range(6):
        interrupted_cycle(barrier_by_the_worker if turn % 2 else pycomm.barrier)
    gc.collect()
    assert (descriptors(), mappings()) == before


def failed_rendezvous(rank, size, store, step):
    """Rank 1 fails at a step of it; rank 0 waits in vain."""
    helpers.join_world(rank, size, store)

    def fail(*_):
        raise pycomm.Timeout("as if")

    if rank == 1:
        setattr(rendezvous, step, fail)
    seen = []
    for turn in range(5):
        torch.distributed.barrier()  # the other one is there
        with pytest.raises(pycomm.Timeout):
            pycomm.init(timeout=0.05 if rank == 0 else 2)
        if turn in (1, 4):
            gc.collect()
            seen.append((descriptors(), threads(), mappings()))
    torch.distributed.barrier()  # who ends while another still tries has died
    return seen


@pytest.mark.parametrize("step", ["store_all_gather", "_take"])
def test_a_failed_rendezvous_leaves_nothing_either(step):
    for before, after in helpers.run_ranks(2, failed_rendezvous, step):
        assert all(b <= a for a, b in zip(before, after, strict=True)), (before, after)


def work_until_killed(group, ready):
    x = group.empty(1 << 20)
    (ready / str(group.rank)).touch()
    while True:
        pycomm.all_reduce(x, "max", group=group)


def test_no_names_before_during_or_after_a_kill(tmp_path):
    before = names()
    with helpers.Ranks(3, helpers.in_group, work_until_killed, {}, tmp_path) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        assert names() <= before
        window = window_of(ranks.pids[1])
        assert oct(window.stat().st_mode & 0o777) == "0o600"
        assert window.stat().st_nlink == 0
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)
        outcomes = ranks.join()
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 3
    assert names() <= before


def window_of(pid):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:pycomm" in os.readlink(fd):  # noqa: PTH115 - it is no real path
            return fd
    raise AssertionError("no window")


def test_a_thread_per_group_at_most_and_only_for_async(world):
    before = threads()
    groups = world(2).groups
    assert threads() == before
    works = [pycomm.all_reduce(torch.ones(1), group=g, async_op=True) for g in groups]
    assert threads() == before + 2
    for work in works:
        work.wait()
    for group in groups:
        group.close()
    end = time.monotonic() + 5
    while threads() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before
