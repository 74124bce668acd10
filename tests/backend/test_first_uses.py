"""The first use of a group that fails halfway, is interrupted, or meets the group's end."""

import os
import signal
import threading
import time
from datetime import timedelta

import backends
import torch
import torch.distributed as dist
from backends import cost

import pycomm
from pycomm._runtime.subgroup import Subgroup

PAGE = 4096


def error_of(call):
    """The error of a call, which keeps the frames that it went through; None if it succeeds."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def reduce_on(group):
    """Reduces without torch's functions, which hide the errors of a group that is destroyed."""
    return error_of(lambda: group.allreduce([torch.ones(3)]).wait())


def described(error):
    return type(error).__name__, getattr(error, "rank", None)


class Broken:
    """Replaces a function, for as long as this rank calls it."""

    def __init__(self, owner, name, error):
        self._place, self._whole = (owner, name), getattr(owner, name)
        self._error = error

    def __enter__(self):
        setattr(*self._place, self._fail)

    def _fail(self, *_args, **_options):
        raise self._error

    def __exit__(self, *_details):
        setattr(*self._place, self._whole)


FAILURES = {
    "joining": (Subgroup, "_map", MemoryError("no room")),
    "interrupted": (Subgroup, "_replace", KeyboardInterrupt()),
    "after joining": (pycomm.backend, "make_group", MemoryError("no room")),
    "interrupted at the end": (pycomm.group.log, "group_made", KeyboardInterrupt()),
}


def fail_everywhere(rank, _size):
    """Rank 0 fails in its first use of each group, keeps the errors, and goes on."""
    dist.all_reduce(torch.ones(100))
    before = cost()
    results, kept = [], []
    for failure in FAILURES.values():
        for early in (True, False):  # rank 0 comes first, or last
            group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))
            dist.barrier()
            if rank == 0:
                if not early:
                    time.sleep(0.3)
                with Broken(*failure):
                    kept.append(reduce_on(group))
            elif early:
                time.sleep(0.3)
            start = time.monotonic()
            kept.append(reduce_on(group))
            took = time.monotonic() - start
            results.append(([described(error) for error in kept[-2:]], took < 10))
            dist.destroy_process_group(group)
            dist.barrier()
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    last = [error and type(error) for error in map(reduce_on, groups)]
    for group in groups:
        dist.destroy_process_group(group)
    return results, last, before, cost()


def test_a_first_use_that_fails_halfway():
    for rank, (results, last, before, after) in enumerate(backends.run(3, fail_everywhere)):
        errors = [type(error).__name__ for _, _, error in FAILURES.values() for _ in range(2)]
        for expected, (described_errors, soon) in zip(errors, results, strict=True):
            assert soon
            if rank == 0:
                assert [name for name, _ in described_errors] == [expected, "GroupUnusable"]
            else:
                assert described_errors[-1] == ("PeerDied", 0)
        assert last == [None, None]
        assert after[1:] == before[1:]
        # A page per group goes when the rank that has it leaves another group. A rank that is
        # interrupted while it tells the others of a place keeps that page for good.
        assert after[0] <= before[0] + (len(errors) + 2) * PAGE


def destroy_while(rank, _size):
    """Rank 0 destroys groups while another of its threads uses them for the first time."""
    dist.all_reduce(torch.ones(100))
    before = cost()
    results = []
    for place in ("_replace", "_map", "make_group"):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if rank == 0:
            results.append(destroy_during(place, group))
            dist.barrier()
        else:
            dist.barrier()
            results.append(described(reduce_on(group))[0])
            dist.destroy_process_group(group)
        dist.barrier()
    again = dist.new_group([0, 1])
    last = reduce_on(again)
    dist.destroy_process_group(again)
    return results, last, before, cost()


def destroy_during(name, group):
    """The error of a first use, if the group is destroyed when the use has come to a function."""
    owner = pycomm.backend if name == "make_group" else Subgroup
    whole, reached, go_on = getattr(owner, name), threading.Event(), threading.Event()

    def stop_here(*args, **options):
        reached.set()
        go_on.wait(30)
        return whole(*args, **options)

    errors = []
    setattr(owner, name, stop_here)
    user = threading.Thread(target=lambda: errors.append(reduce_on(group)))
    user.start()
    reached.wait(30)
    destroyer = threading.Thread(target=dist.destroy_process_group, args=(group,))
    destroyer.start()
    time.sleep(0.3)
    go_on.set()
    user.join()
    destroyer.join()
    setattr(owner, name, whole)
    return described(errors[0])[0]


def test_a_group_that_is_destroyed_during_its_first_use():
    outcomes = backends.run(2, destroy_while)
    for _, last, before, after in outcomes:
        assert last is None
        assert after[1:] == before[1:]
        assert after[0] <= before[0] + 4 * PAGE
    assert outcomes[0][0] == ["GroupUnusable"] * 3
    assert outcomes[1][0] == ["PeerDied"] * 3


def die_in_first_use(rank, _size, when):
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == 0:
        replace = Subgroup._replace

        def die(*args):
            if when == "after":
                replace(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        Subgroup._replace = die
    else:
        time.sleep(0.5)
    start = time.monotonic()
    error = reduce_on(group)
    took = time.monotonic() - start
    return type(error), error.rank, took


def test_a_rank_that_is_killed_while_it_makes_a_place():
    for when in ("before", "after"):
        with backends.ranks(3, die_in_first_use, when) as ranks:
            for outcome in ranks.join()[1:]:
                assert outcome.error is None, outcome.trace
                kind, culprit, took = outcome.value
                assert (kind, culprit) == (pycomm.PeerDied, 0)
                assert took < 10
