"""Groups that grow over several nodes, which processes of one node play."""

import os
import signal
import time
from pathlib import Path

import growing
import helpers
import pytest
import spanning

import pycomm


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


def refuse(group):
    with pytest.raises(ValueError, match='transport must be "auto" or "gloo"'):
        group.grow()
    return True


def test_process_groups_do_not_grow():
    assert all(spanning.run([1, 1], refuse, timeout=20, transport="process_group"))
