"""Groups that shrink after a failure: kill -9 at random moments, and every way to be left out."""

import contextlib
import itertools
import signal
import threading
import time
from pathlib import Path

import helpers
import pytest
import shrinking
import torch

import pycomm


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))]
)
def test_survivors_go_on_after_random_kills(seed):
    world = shrinking.run_world(seed)
    assert shrinking.complaints(world) == [], world


def leave(group, victims):
    """Ranks `victims` close the group; the others fail, and shrink it."""
    if group.rank in victims:
        group.close()
        return None
    for count in itertools.count(1000):
        try:
            pycomm.all_reduce(torch.ones(count), group=group)
        except pycomm.PeerDied:
            return group.shrink()
    return None


def total(group):
    return pycomm.all_reduce(torch.tensor([1.0]), group=group).item()


@pytest.mark.parametrize("victims", [{0}, {1}, {3}, {0, 3}, {0, 1, 2}])
def test_ranks_keep_their_order_and_their_numbers(victims):
    def body(group):
        smaller = leave(group, victims)
        if smaller is None:
            return None
        assert total(smaller) == smaller.size == 4 - len(victims)
        with pytest.raises(pycomm.GroupUnusable, match="closed"):
            total(group)
        return smaller.rank, smaller.ranks

    with pycomm.LocalWorld(4) as world:
        seen = world.run(body)
        left = tuple(sorted(set(range(4)) - victims))
        assert [pair for pair in seen if pair] == [(i, left) for i in range(len(left))]
        assert [world.groups[rank].ranks for rank in left] == [left] * len(left)


def test_excluded_ranks_are_left_out_although_they_live():
    out = threading.Event()

    def body(group):
        if group.rank == 1:
            assert out.wait(60)
            with pytest.raises(pycomm.PycommError):
                total(group)
            with pytest.raises(pycomm.GroupUnusable, match="without this rank"):
                group.shrink()
            return None
        smaller = group.shrink(exclude=[1])
        out.set()
        return smaller.ranks, total(smaller)

    with pycomm.LocalWorld(3) as world:
        assert world.run(body) == [((0, 2), 2.0), None, ((0, 2), 2.0)]
        for wrong in ([0], [2], [-1]):
            with pytest.raises(ValueError, match="exclude must be other ranks, 0 to 1, got"):
                world.groups[0].shrink(exclude=wrong)


def test_a_smaller_group_shrinks_in_turn():
    def body(group):
        while group.size > 1:
            if group.rank == 1:
                return group.ranks
            group = leave(group, {1})
        return group.ranks

    with pycomm.LocalWorld(4) as world:
        assert world.run(body) == [(0,), (0, 1, 2, 3), (0, 2, 3), (0, 3)]


def test_a_rank_that_raises_or_returns_is_not_waited_for():
    def body(group):
        if group.rank == 1:
            return "returned"
        with pytest.raises(pycomm.PeerDied):
            total(group)
        smaller = group.shrink()
        assert smaller.ranks == (0, 2)
        if smaller.rank == 1:
            raise KeyError("on purpose")
        with pytest.raises(pycomm.PeerDied):
            total(smaller)
        return smaller.shrink().ranks

    seen = []
    with pycomm.LocalWorld(3) as world, pytest.raises(KeyError, match="on purpose"):
        world.run(lambda group: seen.append(body(group)))
    assert set(seen) == {"returned", (0,)}


def test_a_live_group_shrinks_without_losing_a_rank():
    def body(group):
        smaller = group.shrink()
        return smaller.ranks, total(smaller)

    with pycomm.LocalWorld(3) as world:
        assert world.run(body) == [((0, 1, 2), 3.0)] * 3


def test_a_rank_that_comes_too_late_is_left_out():
    def body(group):
        if group.rank == 2:
            while world.groups[0].size == 3 or world.groups[1].size == 3:
                time.sleep(0.001)
            with pytest.raises(pycomm.GroupUnusable, match="without this rank"):
                group.shrink()
            return None
        return group.shrink(timeout=0.2).ranks

    with pycomm.LocalWorld(3) as world:
        assert world.run(body) == [(0, 1), (0, 1), None]


def test_a_rank_that_has_caught_the_error_and_returned_is_not_waited_for():
    def body(group):
        if group.rank == 0:
            raise KeyError("on purpose")
        with pytest.raises(pycomm.PeerDied):
            total(group)
        return None if group.rank == 1 else group.shrink().ranks

    seen = []
    began = time.monotonic()
    with pycomm.LocalWorld(3, timeout=30) as world, pytest.raises(KeyError, match="on purpose"):
        world.run(lambda group: seen.append(body(group)))
    assert sorted(seen, key=str) == [(2,), None]
    assert time.monotonic() - began < 15


def test_an_abort_ends_it():
    with pycomm.LocalWorld(2) as world:
        abort = threading.Timer(0.1, world.groups[0].abort)
        abort.start()
        with pytest.raises(pycomm.GroupUnusable, match="aborted or closed while it shrank"):
            world.groups[0].shrink()
        abort.join()


def test_the_smaller_group_becomes_the_default_group():
    with pycomm.LocalWorld(2) as world:
        try:
            pycomm.set_default_group(world.groups[0])

            def body(group):
                smaller = group.shrink()
                return pycomm.all_reduce(torch.ones(1), group=smaller if smaller.rank else None)

            assert world.run(body) == [2.0, 2.0]
            assert pycomm.default_group() is world.groups[0]
        finally:
            pycomm.set_default_group(None)


def test_what_cannot_shrink_says_so():
    with pycomm.LocalWorld(4, nodes=[2, 2]) as world:
        for call in (world.groups[0].shrink, world.groups[0].should_commit):
            with pytest.raises(ValueError, match="must not consist of threads"):
                call()
    with pycomm.LocalWorld(1) as world:
        for timeout in (0, -1, "soon", True):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                world.groups[0].shrink(timeout)
        with pytest.raises(TypeError, match="ready must be True or False, got 'no'"):
            world.groups[0].should_commit("no")
        assert total(world.groups[0]) == 1  # nothing has happened
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        world.groups[0].shrink()


def be_stopped(rank, size, store):
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=3)  # a busy machine may delay a rank's first call by a second
    pycomm.all_reduce(torch.ones(10))
    Path(f"{store}.{rank}").touch()
    try:
        while True:
            pycomm.all_reduce(torch.ones(10))
    except pycomm.CollectiveError as error:
        blamed = type(error).__name__, error.rank
    try:
        smaller = group.shrink()
    except pycomm.GroupUnusable as error:
        return blamed, str(error)
    # The smaller group has become the default group.
    return blamed, smaller.ranks, pycomm.all_reduce(torch.ones(1)).item(), smaller.timeout


def test_a_stopped_process_is_left_out_and_finds_out():
    with helpers.Ranks(3, be_stopped) as ranks:
        for rank in range(3):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        ranks.signal(1, signal.SIGSTOP)
        for outcome in ranks.wait_for([0, 2]):
            assert outcome.value == (("Timeout", 1), (0, 2), 2.0, 3.0), outcome
        ranks.signal(1, signal.SIGCONT)
        ((blamed, message),) = (outcome.value for outcome in ranks.wait_for([1]))
    assert blamed == ("Timeout", 1)
    assert "without this rank" in message


def interrupt_one(rank, size, store):
    with helpers.member(rank, size, store, timeout=30) as group:
        if rank == 1:
            Path(f"{store}.shrinking").touch()
            try:
                group.shrink()
            except KeyboardInterrupt:
                return "interrupted"
        helpers.wait_until(Path(f"{store}.interrupted").exists)
        return group.shrink().ranks


def test_a_rank_that_is_interrupted_is_left_out():
    with helpers.Ranks(2, interrupt_one) as ranks:
        helpers.wait_until(Path(f"{ranks.store}.shrinking").exists)
        time.sleep(0.2)
        ranks.signal(1, signal.SIGINT)
        (outcome,) = ranks.wait_for([1])
        assert outcome.value == "interrupted"
        Path(f"{ranks.store}.interrupted").touch()
        (outcome,) = ranks.wait_for([0])
        assert outcome.value == (0,)


def test_decisions_are_the_same_on_all_ranks():
    def body(group):
        everyone = [group.should_commit() for _ in range(3)]
        not_me = group.should_commit(group.rank != 1)
        return [*everyone, not_me, group.should_commit()]

    with pycomm.LocalWorld(3) as world:
        assert world.run(body) == [[True, True, True, False, True]] * 3


def decide(rank, size, store):
    """Decides until a rank is killed; then tells how often this rank has gone on."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    Path(f"{store}.{rank}").touch()
    gone_on = 0
    while True:
        try:
            pycomm.all_reduce(torch.ones(100))
            if group.should_commit():
                gone_on += 1
        except pycomm.CollectiveError:
            smaller = group.shrink()
            counts = torch.tensor([gone_on, -gone_on])
            return gone_on, pycomm.all_reduce(counts, "max", group=smaller).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_taken_on_some_ranks_only(seed):
    with helpers.Ranks(3, decide) as ranks:
        for rank in range(3):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        time.sleep(0.01 + 0.003 * seed)
        ranks.signal(seed % 3, signal.SIGKILL)
        survivors = [rank for rank in range(3) if rank != seed % 3]
        for outcome in ranks.wait_for(survivors):
            gone_on, bounds = outcome.value
            assert bounds == [gone_on, -gone_on]
            assert gone_on > 0


def leaks(rank, size, store):
    """Descriptors and shared memory of a process, after groups that have shrunk."""
    with helpers.member(rank, size, store, timeout=30) as group:

        def seen():
            maps = Path("/proc/self/maps").read_text().count("memfd")
            return len(list(Path("/proc/self/fd").iterdir())), maps

        group = group.shrink()
        before = seen()
        for _ in range(20):
            group = group.shrink()
            with contextlib.suppress(pycomm.Aborted):  # the other rank may shrink the group already
                total(group)
        group = group.shrink()
        return before, seen()


def test_nothing_leaks():
    for before, after in helpers.run_ranks(2, leaks):
        assert after[0] <= before[0]
        assert after[1] <= before[1] + 2
