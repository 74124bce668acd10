"""Groups that span nodes shrink after failures; processes of one node play several."""

import contextlib
import functools
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import helpers
import pytest
import shrinking
import spanning
import torch
import torch.distributed as dist

import pycomm
from pycomm._runtime import internode, rendezvous


def meet(group):
    store = dist.distributed_c10d._get_default_store().underlying_store
    helpers.pass_barrier(group, f"{store.path}.{group.ranks}")


def total(group):
    mine = torch.tensor([float(10 ** group.ranks[group.rank])])
    return int(pycomm.all_reduce(mine, group=group))


def lose(group, victims):
    meet(group)
    if group.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    spanning.operate_until_failure(group)
    smaller = group.shrink()
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        total(group)
    assert pycomm.default_group() is smaller
    assert total(smaller) == sum(10**rank for rank in smaller.ranks)
    return smaller.rank, smaller.ranks, smaller.nodes


@pytest.mark.parametrize(
    ("nodes", "victims", "left"),
    [
        ([2, 2], [1], ((0,), (1, 2))),
        ([2, 2], [0], ((0,), (1, 2))),
        ([2, 2], [0, 1], ((0, 1),)),
        ([1, 1, 1], [0], ((0,), (1,))),
        ([1, 1], [0], ((0,),)),
        ("abab", [0], ((0, 2), (1,))),
        ([2, 1, 2], [0, 2], ((0,), (1, 2))),
    ],
    ids=str,
)
def test_ranks_keep_their_order_and_their_nodes(nodes, victims, left):
    with spanning.ranks(nodes, lose, victims, timeout=20) as ranks:
        seen = [outcome.value for outcome in ranks.join()]
    size = len(spanning.names(nodes))
    kept = tuple(rank for rank in range(size) if rank not in victims)
    for rank, value in enumerate(seen):
        assert value == (None if rank in victims else (kept.index(rank), kept, left))


@pytest.mark.parametrize(
    "seed", [100, 101, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (102, 103))]
)
def test_survivors_go_on_after_random_kills(seed):
    world = shrinking.run_world(seed, spans=True)
    assert shrinking.complaints(world) == [], world


def count_commits(rank, size, store, nodes):
    """Commits steps until told to stop; returns how many."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    group, commits, agreed = pycomm.init(timeout=20), 0, True
    stop = torch.zeros(1)
    Path(f"{store}.{rank}").touch()
    while not stop:
        try:
            if not agreed:
                counts = torch.empty(group.size, dtype=torch.int64)
                pycomm.all_gather(counts, torch.tensor([commits]), group=group)
                assert len(set(counts.tolist())) == 1, counts
                agreed = True
            commits += group.should_commit()
            stop.fill_(Path(f"{store}.stop").exists())
            pycomm.broadcast(stop, 0, group=group)
        except pycomm.CollectiveError:
            group, agreed = group.shrink(), False
    group.close()
    return commits


@pytest.mark.parametrize(
    "nodes",
    [
        "ab",
        *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in ("abc", "aabb")),
        "abba",
        "abcc",
    ],
)
def test_a_step_is_committed_by_all_survivors_or_by_none(nodes):
    choice = random.Random(nodes)
    victims = choice.sample(range(len(nodes)), len(nodes) // 2)
    with helpers.Ranks(len(nodes), count_commits, nodes) as ranks:
        for rank in range(len(nodes)):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        for victim in victims:
            time.sleep(0.05 + choice.random() / 20)
            ranks.signal(victim, signal.SIGKILL)
        time.sleep(1)
        Path(f"{ranks.store}.stop").touch()
        left = ranks.wait_for(rank for rank in range(len(nodes)) if rank not in victims)
    assert all(outcome.error is None for outcome in left), left
    assert len({outcome.value for outcome in left}) == 1
    assert left[0].value > 2


class Deaf:
    """A core whose rank fails just when the others have decided."""

    def __init__(self, core, decides):
        self._core, self._decides = core, decides

    def run(self, *operation):
        if self._decides:
            self._core.run(*operation)
            time.sleep(0.5)  # the others must have their answer
        self._core.abort()
        raise pycomm.Aborted("on purpose", rank=1)

    def __getattr__(self, name):
        return getattr(self._core, name)


def decide_deaf(group, decides):
    if group.rank == 1:
        core, group._core = group._core, Deaf(group._core, decides)
        try:
            outcome = group.should_commit()
        except pycomm.Aborted:
            outcome = None
        group._core = core
        with pytest.raises(pycomm.PycommError):
            total(group)
    else:
        try:
            outcome = group.should_commit()
            spanning.operate_until_failure(group)
        except pycomm.Aborted:
            outcome = None
    smaller = group.shrink()
    return outcome, smaller.ranks, smaller.should_commit(), smaller.should_commit(smaller.rank > 0)


@pytest.mark.parametrize("decides", [True, False])
def test_a_rank_that_fails_late_learns_what_the_others_have_decided(decides):
    outcome = True if decides else None
    found = spanning.run([1, 1, 1], decide_deaf, decides, timeout=20)
    assert found == [(outcome, (0, 1, 2), True, False)] * 3


def not_come(group, way):
    """Rank 1 leaves, or comes late; the others shrink."""
    if group.rank == 1:
        group.abort()
        if way == "closes":
            group.close()
            return None
        time.sleep(3)
    else:
        spanning.operate_until_failure(group)
    told = []
    try:
        smaller = group.shrink(1.5 if way == "is late" else 20)
    except pycomm.Timeout as raised:
        told = [str(raised), raised.rank]
        smaller = group.shrink(20)
    meet(smaller)  # a rank whose peers have ended goes on alone
    return *told, smaller.ranks


def test_a_rank_that_has_closed_the_group_is_not_waited_for():
    found = spanning.run([1, 1, 1], not_come, "closes", timeout=20)
    assert found == [((0, 2),), None, ((0, 2),)]


def test_a_rank_that_lives_is_not_left_out():
    found = spanning.run([1, 1, 1], not_come, "is late", timeout=20)
    told = "shrinking: rank 1 did not take part before the timeout"
    assert found == [(told, 1, (0, 1, 2)), ((0, 1, 2),), (told, 1, (0, 1, 2))]


def leave_out(group):
    """Ranks 0 and 2 go on without rank 1, which comes after they have shrunk the group."""
    meet(group)
    if group.rank == 1:
        spanning.operate_until_failure(group)
        time.sleep(0.5)
        with pytest.raises(pycomm.GroupUnusable, match="without this rank"):
            group.shrink()
        return None
    group.abort()
    with group.shrink(exclude=[1]) as smaller:
        time.sleep(1)
        return smaller.ranks


def test_excluded_ranks_are_left_out_although_they_live():
    assert spanning.run([1, 1, 1], leave_out, timeout=20) == [(0, 2), None, (0, 2)]


def abort_in_shrink(group):
    if group.rank == 1:
        time.sleep(2)
        return None
    group.abort()
    threading.Timer(0.3, group.abort).start()
    began = time.monotonic()
    with pytest.raises(pycomm.GroupUnusable, match="aborted or closed while it shrank"):
        group.shrink()
    return time.monotonic() - began < 2


def test_another_thread_can_end_a_shrink():
    assert spanning.run([1, 1], abort_in_shrink, timeout=20)[0] is True


def die_with_a_child(group, victim, folder):
    """A rank dies; its child lives on until the test ends."""
    meet(group)
    if group.rank == victim:
        if os.fork() == 0:
            while Path(folder).exists():
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    error = spanning.operate_until_failure(group)
    return type(error), error.rank, spanning.shrink(group, 200)


def check_survivors(tmp_path, nodes, victim, function):
    """Neither the child nor the timeout holds up the others, on any node."""
    folder = tmp_path / "lives"
    folder.mkdir()
    left = tuple(rank for rank in range(len(nodes)) if rank != victim)
    try:
        with spanning.ranks(nodes, function, victim, str(folder), timeout=200) as ranks:
            found = [outcome.value for outcome in ranks.wait_for(left, limit=100)]
    finally:
        folder.rmdir()
    assert found == [(pycomm.PeerDied, victim, left)] * len(left)


@pytest.mark.parametrize("nodes", ["ab", "aab", "abb", "aabb"])
def test_a_forked_child_is_not_taken_for_the_rank(nodes, tmp_path):
    check_survivors(tmp_path, nodes, 0, die_with_a_child)


def die_connected(group, victim, folder):
    """As before, but the child keeps the victim's connections to other nodes."""
    with mock.patch.object(internode._C, "close_in_children"):
        with contextlib.suppress(pycomm.PycommError):
            group.abort()
            total(group)
        group = group.shrink()  # whose connections are new
    return die_with_a_child(group, victim, folder)


@pytest.mark.parametrize(("nodes", "victim"), [("aab", 0), ("abb", 1), ("aabc", 0)])
def test_nodes_are_told_although_a_dead_rank_seems_to_live(nodes, victim, tmp_path):
    """The other ranks of its node tell them, when they shrink the group."""
    check_survivors(tmp_path, nodes, victim, die_connected)


def miss_the_end(group):
    """Rank 2 fails just when ranks 1 and 2 have made the smaller group."""
    meet(group)
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    await_all = rendezvous._await_all

    def fail_once(store, *others):
        rendezvous._await_all = await_all
        await_all(store, *others)
        raise pycomm.PeerDied("rank 0 died", rank=0)

    if group.rank == 2:
        rendezvous._await_all = fail_once
    began = time.monotonic()
    spanning.operate_until_failure(group)
    while True:
        group = group.shrink()
        with contextlib.suppress(pycomm.CollectiveError):
            assert total(group) == sum(10**rank for rank in group.ranks)
            return group.ranks, time.monotonic() - began < 30


@pytest.mark.parametrize("nodes", ["abb", "abc"])
def test_a_rank_that_misses_the_end_of_a_shrink_is_not_lost(nodes):
    with spanning.ranks(nodes, miss_the_end, timeout=60) as ranks:
        found = [outcome.value for outcome in ranks.wait_for([1, 2])]
    assert found == [((1, 2), True)] * 2


def stop_in_the_middle(group, folder):
    """The coordinator is stopped when the smaller group is all but complete."""
    meet(group)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        await_all = rendezvous._await_all

        def stop(*given):
            Path(f"{folder}/stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            await_all(*given)

        rendezvous._await_all = stop
    spanning.operate_until_failure(group)
    began = time.monotonic()
    try:
        return group.shrink(3).ranks
    except pycomm.Timeout:
        return "Timeout", time.monotonic() - began < 30


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_does_not_hold_the_others_for_ever(tmp_path):
    with spanning.ranks([1, 1, 1, 1], stop_in_the_middle, str(tmp_path), timeout=20) as ranks:
        found = [outcome.value for outcome in ranks.wait_for([1, 2], 90)]
    assert found == [("Timeout", True)] * 2


def reduce_preserved(group, waits):
    """A sum that the survivors complete."""
    x = torch.full((1000,), float(10**group.rank))
    meet(group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if waits is None:
        failed = functools.partial(pycomm.all_reduce, x, preserve=True)
    else:
        work = pycomm.all_reduce(x, preserve=True, async_op=True, group=group)
        failed = functools.partial(pycomm.recover, work)
        if waits:
            with pytest.raises(pycomm.CollectiveError) as raised:
                work.wait()
            failed = functools.partial(pycomm.recover, raised.value)
        group = group.shrink()
    while True:
        try:
            return group.ranks, failed(group=group)
        except pycomm.CollectiveError as error:
            group = group.shrink()
            failed = functools.partial(pycomm.recover, error)


@pytest.mark.parametrize("waits", [None, True, False], ids=["sync", "waits", "does not wait"])
def test_survivors_complete_an_operation(waits):
    with spanning.ranks([2, 1, 1], reduce_preserved, waits, timeout=20) as ranks:
        found = [outcome.value for outcome in ranks.wait_for([0, 2, 3])]
    for left, x in found:
        assert left == (0, 2, 3)
        assert x.tolist() == [1101.0] * 1000


def be_disturbed(group):
    """A stranger connects to the listeners and talks nonsense."""
    host, port, _ = group._survivors.listener.addresses[0]
    strangers = [socket.create_connection((host, port)) for _ in range(3)]
    if group.rank == 1:
        strangers[0].sendall(b"nonsense\n")
        strangers[1].sendall(b'{"token": "", "rank": 1, "settles": false}\n' + bytes(100_000))
    meet(group)
    group.abort()
    with contextlib.suppress(pycomm.PycommError):
        total(group)
    ranks = spanning.shrink(group)
    for stranger in strangers:
        stranger.close()
    return ranks


def test_strangers_are_not_heard():
    assert spanning.run([1, 1], be_disturbed, timeout=20) == [(0, 1)] * 2


def train(group):
    outcome = spanning.train(group, 1, pycomm.Group.close)
    return outcome and (outcome[0].ranks, outcome[1])


def test_training_goes_on_between_nodes():
    left = [value for value in spanning.run("abb", train, timeout=20) if value]
    assert [ranks for ranks, _ in left] == [(0, 2)] * 2
    for mine, other in zip(left[0][1], left[1][1], strict=True):
        assert torch.equal(mine, other)
