"""Groups that grow over several nodes, which processes of one node play."""

import os
import signal
import time
from pathlib import Path

import growing
import helpers
import pytest
import spanning
import torch

import pycomm
from pycomm import _init
from pycomm._runtime import grow


@pytest.mark.parametrize(
    ("members", "newcomers", "nodes"),
    [
        ("aa", "b", ((0, 1), (2,))),  # the group begins to span nodes
        ("ab", "b", ((0,), (1, 2))),
        ("ab", "c", ((0,), (1,), (2,))),
        ("ab", "ab", None),
    ],
)
def test_newcomers_find_their_nodes(members, newcomers, nodes, tmp_path):
    path, wanted = str(tmp_path / "door"), len(members) + len(newcomers)
    with (
        helpers.Ranks(len(members), growing.member, path, members, wanted) as first,
        helpers.Ranks(len(newcomers), come, len(members), path, newcomers, wanted) as second,
    ):
        for outcome in (*first.wait_for(range(len(members))), *second.wait_for(range(1))):
            assert sorted(outcome.value["seen"][-1]) == list(range(wanted)), outcome
            assert outcome.value["nodes"] == (nodes or outcome.value["nodes"])
            assert len(outcome.value["nodes"]) == len(set(members + newcomers))


def come(rank, size, store, first, path, nodes, wanted):
    return growing.newcomer(rank, size, store, first + rank, path, nodes[rank], wanted)


@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_harm_nobody(seed):
    assert growing.run_world(seed, spans=True) == []


def grow_once(rank, size, store, path, nodes, victim):
    """Grows until a process dies; returns what is left, or who has died, and if it was fast."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=60)
    growing.publish(group, path)
    helpers.wait_until(Path(f"{path}.2").exists)
    if rank == victim:
        grow.set_up = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    began, over = time.monotonic(), torch.zeros(1)
    try:
        while not over:
            group = group.grow()
            over.fill_(Path(f"{path}.dead").exists())
            pycomm.broadcast(over, 0, group=group)
    except pycomm.PeerDied as error:
        return f"rank {error.rank} died", time.monotonic() - began < 20
    return group.size, time.monotonic() - began < 20


def die_in_join(_rank, _size, _store, path, node, step):
    spanning.pretend(node)
    helpers.wait_until(Path(path).exists)

    def die(*_, **__):
        Path(f"{path}.dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if step:
        setattr(grow, step, die)
    Path(f"{path}.2").touch()
    pycomm.join(Path(path), 10)


@pytest.mark.parametrize("step", ["set_up", "_barrier"])
@pytest.mark.parametrize("nodes", ["aaa", "aab", "abc"])
def test_a_newcomer_that_dies_is_left_out_at_once(nodes, step, tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, grow_once, path, nodes, None) as members,
        helpers.Ranks(1, die_in_join, path, nodes[2], step),
    ):
        assert [outcome.value for outcome in members.wait_for([0, 1])] == [(2, True)] * 2


def wait_in_vain(rank, size, store, path):
    """A newcomer has died in the larger group, and its other ranks seem to be late."""
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    shrink = pycomm.Group.shrink

    def time_out(*_):
        pycomm.Group.shrink = shrink
        raise pycomm.Timeout("another rank is late")

    pycomm.Group.shrink = time_out
    growing.publish(group, path)
    helpers.wait_until(Path(f"{path}.2").exists)
    while group.size == size:
        group = group.grow()
    with pytest.raises(pycomm.PycommError):
        pycomm.barrier(group=group)
    return spanning.shrink(group)


def test_a_larger_group_that_cannot_shrink_at_once_is_returned(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, wait_in_vain, path) as members,
        helpers.Ranks(1, die_in_join, path, "b", "_barrier"),
    ):
        assert [outcome.value for outcome in members.join()] == [(0, 1)] * 2


def fail_in_join(_rank, _size, _store, path, node):
    """A newcomer has everything for the larger group, but fails to make it, and lives on."""
    spanning.pretend(node)
    helpers.wait_until(Path(path).exists)

    def fail(*_):
        Path(f"{path}.dead").touch()
        raise MemoryError("on purpose")

    _init.make_group = fail
    Path(f"{path}.2").touch()
    with pytest.raises(MemoryError, match="on purpose"):
        pycomm.join(Path(path), 10)
    helpers.wait_until(Path(f"{path}.over").exists)


@pytest.mark.parametrize("nodes", ["aaa", "abc"])
def test_a_newcomer_that_cannot_make_its_group_is_left_out_at_once(nodes, tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, grow_once, path, nodes, None) as members,
        helpers.Ranks(1, fail_in_join, path, nodes[2]) as newcomer,
    ):
        assert [outcome.value for outcome in members.wait_for([0, 1])] == [(2, True)] * 2
        Path(f"{path}.over").touch()
        assert newcomer.wait_for([0])[0].error is None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_dies_on_another_node_is_noticed_at_once(victim, tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, grow_once, path, "ab", victim) as members,
        helpers.Ranks(1, die_in_join, path, "a", ""),
    ):
        (outcome,) = members.wait_for([1 - victim])
        assert outcome.value == (f"rank {victim} died", True), outcome


def lose_the_door(rank, _size, store, path):
    """The first rank, alone on its node, dies after the group has grown; the others let one in."""
    if rank < 2:
        spanning.pretend("ab"[rank])
        helpers.join_world(rank, 2, store)
        group = pycomm.init(timeout=20)
        while group.size < 3:
            growing.publish(group, path)
            group = group.grow()
    else:
        spanning.pretend("b" if rank == 2 else "c")
        if rank == 3:
            helpers.wait_until(Path(f"{path}.lost").exists)
        group = pycomm.join(Path(path), 30)
    if rank == 0:
        growing.numbers(group, rank)
        time.sleep(0.3)
        Path(f"{path}.lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return growing.live(group, rank, path)


def test_other_ranks_open_the_next_door(tmp_path):
    path = str(tmp_path / "door")
    with helpers.Ranks(4, lose_the_door, path) as ranks:
        helpers.wait_until(Path(f"{path}.lost").exists)
        time.sleep(2)
        Path(f"{path}.stop").touch()
        for outcome in ranks.wait_for([1, 2, 3]):
            assert outcome.value["seen"][-1] == [1, 2, 3], outcome


def lack_descriptors(rank, size, store, path):
    """The first rank cannot watch the other one's node at first."""
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    listener, connect = group._listener, group._listener.connect

    def fail(_number):
        listener.connect = connect
        raise OSError("too many open files")

    if rank == 0:
        listener.connect = fail
    seen = growing.live(group, rank, path, 3)["seen"]
    return seen[-1], listener.connect == connect


def test_a_failure_of_the_first_rank_is_none_of_the_group(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, lack_descriptors, path) as members,
        helpers.Ranks(1, growing.newcomer, 2, path, "a", 3) as newcomer,
    ):
        for outcome in members.wait_for([0, 1]):
            assert outcome.value == ([0, 1, 2], True), outcome
        assert newcomer.wait_for([0])[0].error is None
