"""Copies of sharded states on other nodes: where they are, what they do not cover, newcomers."""

import random
from pathlib import Path

import growing
import helpers
import pytest
import sharding
import spanning
from losing import MASTER, REMAINDER, die_at, kill
from surviving import STEPS, Training, expect

import pycomm
from pycomm._training.replicas import buddies

# Losses that no copy covers.


def lose_both(group, victims):
    training = Training(group, replicas=2)
    training.train(group.rank, range(2))
    pycomm.barrier(group=group)
    if group.rank in victims:
        kill()
    spanning.operate_until_failure(group)
    while True:
        group = group.shrink()
        try:
            training.model.regroup(group)
        except pycomm.CollectiveError:  # the other victim has ended since
            continue
        except RuntimeError as error:
            return str(error)


def test_a_rank_and_its_buddy_are_lost_together():
    assert buddies([[0], [1], [2], [3]]) == [1, 2, 3, 0]
    with spanning.ranks([1, 1, 1, 1], lose_both, [1, 2], timeout=30) as ranks:
        left = ranks.wait_for([0, 3])
    for outcome in left:
        assert outcome.value == (
            "ranks [1, 2] are lost with their parts of the optimizer's states, and so are the "
            "replicas of the states of ranks [1]: load a checkpoint in a new wrapper"
        )


def lose_what_was_loaded(group):
    training = Training(group, replicas=2)
    training.train(group.rank, range(2))
    training.load(training.state())
    assert group.should_commit()
    if group.rank == 1:
        kill()
    spanning.operate_until_failure(group)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] are lost .* no replicas yet, .* loaded"):
        training.model.regroup(group.shrink())
    return True


def test_states_that_were_loaded_have_no_replicas_before_the_next_step():
    with spanning.ranks([1, 1], lose_what_was_loaded, timeout=30) as ranks:
        assert ranks.wait_for([0])[0].value is True


# Newcomers.


def train_with_newcomer(rank, _size, store, path, regroups, options):
    """Rank 1 of three nodes is killed in the third step, and a process of a fourth one comes."""
    spanning.pretend("abcd"[rank])
    step = 2
    if rank == 3:
        group = pycomm.join(Path(path), 60)
        training = Training(group, seed=7, replicas=2, **options)
    else:
        helpers.join_world(rank, 3, store)
        group = pycomm.init(timeout=30)
        training = Training(group, replicas=2, **options)
        training.train(rank, range(2))
        if rank == 1:
            die_at("sent", training)
        with pytest.raises(pycomm.CollectiveError):
            training.train(rank, range(2, 3))
        group = group.shrink()
        if regroups:
            training.model.regroup(group)
            training.train(rank, range(2, 3))
            step = 3
        while group.size < 3:
            growing.publish(group, path)
            group = group.grow()
        training.model.regroup(group)
    progress = {"step": step}
    pycomm.share_state(training.optimizer, progress, receive=rank == 3)
    training.train(group.rank, range(progress["step"], STEPS))
    helpers.pass_barrier(group, f"{path}.end")
    return training.state()


@pytest.mark.parametrize("options", [{"states": "8bit", "shard": "gradients"}, REMAINDER, MASTER])
@pytest.mark.parametrize("regroups", [False, True])
def test_a_newcomer_takes_the_place_of_a_lost_rank(regroups, options, tmp_path):
    """At once, in the same regroup(), or later."""
    path = str(tmp_path / "door")
    with helpers.Ranks(4, train_with_newcomer, path, regroups, options) as ranks:
        outcomes = ranks.wait_for([0, 2, 3])
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    losses = [(0, (0, 1, 2)), (2, (0, 1, 2))]
    if regroups:
        losses[1:] = [(2, (0, 2)), (3, (0, 1, 2))]
    expected = expect(losses, nodes=[[1] * len(ranks) for _, ranks in losses], **options)
    for outcome in outcomes:
        assert sharding.difference(expected, outcome.value) is None


# Where the copies are.


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([[0], [1]], [1, 0]),
        ([[0, 1], [2, 3]], [2, 3, 0, 1]),
        ([[0, 2], [1, 3]], [1, 0, 3, 2]),
        ([[0, 1], [2], [3]], [2, 3, 0, 1]),
    ],
)
def test_buddies(nodes, wanted):
    assert buddies(nodes) == wanted


def test_buddies_are_on_other_nodes_where_that_can_be():
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(2, 6))]
        ranks = list(range(sum(sizes)))
        rng.shuffle(ranks)
        nodes = [[ranks.pop() for _ in range(size)] for size in sizes]
        found = buddies(nodes)
        assert sorted(found) == list(range(sum(sizes)))
        inside = [r for node in nodes for r in node if found[r] in node]
        assert len(inside) == max(2 * max(sizes) - sum(sizes), 0)
        assert all(found[rank] != rank for rank in range(len(found)))


def count_memory(group):
    training = Training(group, elements=300_000, replicas=2)
    training.train(group.rank, range(2))
    report = pycomm.memory_report(training.model, training.optimizer)
    parameters = sum(p.numel() * 4 for p in training.model.parameters())
    # States of two ranks in two versions, and parameters of both.
    copies = (4 * 2 * parameters + 2 * parameters) / group.size
    return report.bytes["states"] / copies


def test_memory_of_the_copies_is_counted():
    shares = spanning.run([1, 1, 1, 1], count_memory, timeout=30)
    assert max(shares) < 1.02
    assert 1 <= sum(shares) / len(shares) < 1.001  # the last rank's part is smaller
