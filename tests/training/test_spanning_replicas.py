"""Sharded training between nodes goes on when ranks or nodes are lost, without a checkpoint."""

import os
import random
import signal
import threading
from pathlib import Path

import growing
import helpers
import pytest
import sharding
import spanning
import torch
from surviving import STEPS, Training, expect
from torch import nn

import pycomm
from pycomm._training import publication, replicas, spanning_replicas
from pycomm._training.spanning_replicas import SpanningReplicas, buddies
from pycomm._training.survival import ShardSurvival
from pycomm.optim._shard_executors import OnSpanningShards

REMAINDER = {"dtype": torch.bfloat16, "master_weights": "remainder"}
MASTER = {"dtype": torch.bfloat16, "master_weights": "fp32", "states": "8bit"}


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner, name):
    """Dies after the next call of a function."""
    function = getattr(owner, name)

    def run(*args, **kwargs):
        function(*args, **kwargs)
        kill()

    setattr(owner, name, run)


def before_second_call(owner, name):
    """Dies before this call of a function."""
    function, calls = getattr(owner, name), []

    def run(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            kill()
        return function(*args, **kwargs)

    setattr(owner, name, run)


def die_at(moment, training):
    """Makes this rank die in its next step."""
    if moment == "backward":
        training.model.module.parts[2].register_hook(kill)
    elif moment == "replicating":  # in the first step
        before_second_call(spanning_replicas, "launch")
    elif moment == "copying":
        SpanningReplicas.begin_step = kill
    elif moment == "publishing":  # others may have some of its new parameters
        before_second_call(publication, "launch")
    elif moment == "updated":
        after(OnSpanningShards, "run")
    elif moment == "sending":
        before_second_call(spanning_replicas, "launch")
    elif moment == "sent":
        after(SpanningReplicas, "_send")
    elif moment == "decided":
        after(SpanningReplicas, "end_step")
    elif isinstance(moment, float):
        threading.Timer(moment, kill).start()


def die_in_regroup(moment):
    if moment == "restoring":
        ShardSurvival._restore = kill
    elif moment == "moving":  # its new states are whole, and others wait for it
        after(SpanningReplicas, "_send")
        replicas._open_file = kill


def survive(group, deaths, options):
    """Trains until this rank is killed, or to the end.

    Args:
        group: the ranks.
        deaths: for each victim, the step and the moment of its death.
        options: those of :class:`Training`.

    Returns:
        For each loss the number of steps that count, the ranks that are left and the sizes of their
        nodes; the state.
    """
    spanning_replicas._PIECES_BYTES = spanning_replicas._SMALLEST_PIECE = 1000  # several pieces
    training, number, step = Training(group, replicas=2, **options), group.rank, 0
    when, moment = deaths.get(number, (None, None))
    losses = [(0, group.ranks, list(map(len, group.nodes)))]
    while step < STEPS or training.model.comm_state.group is not group:
        try:
            if training.model.comm_state.group is not group:
                if when == step:
                    die_in_regroup(moment)
                training.model.regroup(group)
                losses.append((step, group.ranks, list(map(len, group.nodes))))
                continue
            if when == step:
                die_at(moment, training)
            training.backward(number, step)
            training.optimizer.step()
            step += 1
        except pycomm.CollectiveError:
            with pytest.raises((pycomm.PycommError, RuntimeError)):
                training.optimizer.step()  # must leave the copies alone
            group = group.shrink()
    return losses, training.state()


def check(nodes, deaths, **options):
    """Kills ranks, and compares the survivors with training from checkpoints."""
    size = len(spanning.names(nodes))
    with spanning.ranks(nodes, survive, deaths, options, timeout=30) as ranks:
        outcomes = ranks.wait_for([rank for rank in range(size) if rank not in deaths])
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    losses, state = outcomes[0].value
    for outcome in outcomes:
        assert outcome.value[0] == losses
        assert sharding.difference(outcome.value[1], state) is None
    steps = [(count, left) for count, left, _ in losses]
    expected = expect(steps, nodes=[counts for _, _, counts in losses], **options)
    assert sharding.difference(expected, state) is None
    return [count for count, _ in steps[1:]]


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        ("backward", {"max_norm": 0.1}),
        ("copying", {"states": "8bit"}),
        ("publishing", {"bucket_cap_mb": 0.01}),
        ("publishing", {"bucket_cap_mb": 0.01, "shard": "gradients", **REMAINDER}),
        ("updated", {"states": "8bit", "max_norm": 0.1, "shard": "gradients"}),
        ("sending", REMAINDER),
        ("sent", MASTER),
        ("decided", {"shard": "gradients"}),
        ("decided", {"states": "8bit", **REMAINDER}),
    ],
)
def test_a_rank_is_killed(moment, options):
    assert check([1, 1, 1], {1: (2, moment)}, **options) == [3 if moment == "decided" else 2]


@pytest.mark.parametrize("moment", ["replicating", "sent"])
def test_a_rank_is_killed_in_the_first_step(moment):
    assert check([1, 1, 1], {2: (0, moment)}, states="8bit") == [0]


@pytest.mark.parametrize(
    ("nodes", "moment", "options"),
    [
        ([2, 2], "publishing", {"bucket_cap_mb": 0.01}),
        ([2, 2], "decided", {"shard": "gradients", **REMAINDER}),
        ([2, 1, 2], "sent", MASTER),
        ([2, 2, 2], "sending", {"states": "8bit"}),
    ],
)
def test_a_node_is_killed(nodes, moment, options):
    """All of its ranks at the same moment; two nodes are left, or one."""
    names = spanning.names(nodes)
    deaths = {rank: (3, moment) for rank, node in enumerate(names) if node == names[-1]}
    assert check(nodes, deaths, **options) == [4 if moment == "decided" else 3]


def test_ranks_are_killed_one_after_the_other():
    """In the end one is left, and has everything."""
    deaths = {1: (1, "sent"), 0: (2, "decided"), 3: (5, "updated")}
    assert check([1, 1, 1, 1], deaths, states="8bit") == [1, 3, 5]


@pytest.mark.parametrize("moment", ["restoring", "moving"])
@pytest.mark.parametrize("nodes", [[1, 1, 1, 1], "aabb"])
def test_another_rank_is_killed_while_the_others_regroup(nodes, moment):
    deaths = {1: (2, "sent"), 2 if nodes == "aabb" else 3: (2, moment)}
    assert check(nodes, deaths, states="8bit") == [2]


@pytest.mark.parametrize(
    ("publish", "options"),
    [(pycomm.Int8(), {}), (pycomm.Cast(), MASTER), (pycomm.Int8(), REMAINDER)],
)
@pytest.mark.parametrize("moment", ["publishing", "decided"])
def test_what_published_changes_have_lost_is_dropped(moment, publish, options):
    """As it is by those who load a checkpoint."""
    options = {"publish": publish, "bucket_cap_mb": 0.01, **options}
    assert check([1, 1, 1], {1: (2, moment)}, **options) == [3 if moment == "decided" else 2]


def killed_at_random(seed):
    """Kills a rank or a node around the step."""
    rng = random.Random(seed)
    nodes = rng.choice([[1, 1, 1], [2, 2], [1, 2, 1]])
    names, when = spanning.names(nodes), 10 ** rng.uniform(-4, -0.5)
    victim = rng.randrange(len(names))
    node = [rank for rank, name in enumerate(names) if name == names[victim]]
    deaths = dict.fromkeys(rng.choice([node, [victim]]), (3, when))
    shard = rng.choice(["optimizer", "gradients"])
    return check(nodes, deaths, elements=100_000, states="8bit", shard=shard)


def test_ranks_are_killed_at_random():
    for seed in range(2):
        killed_at_random(seed)


@pytest.mark.slow
def test_many_ranks_are_killed_at_random():
    """Some before the step, some after it, and some in the middle."""
    assert {steps for seed in range(30) for steps in killed_at_random(100 + seed)} >= {3, 4}


# What is not covered.


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
            "ranks [1, 2] are lost with their parts of the optimizer's states, both copies of "
            "those of ranks [1]: load the checkpoint in a new wrapper"
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


def refuse(group):
    with pytest.raises(ValueError, match="replicas=2 needs overlap_params=False between nodes"):
        pycomm.DataParallel(
            nn.Linear(2, 2), group=group, shard="optimizer", replicas=2, overlap_params=True
        )
    return True


def test_what_is_refused():
    assert all(spanning.run([1, 1], refuse, timeout=30))


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
    # States and parameters of two ranks in two versions, and room for what all ranks send at once.
    copies = (4 * 2 * parameters + 2 * parameters) / group.size
    return report.bytes["states"] / copies


def test_memory_of_the_copies_is_counted():
    for share in spanning.run([1, 1, 1, 1], count_memory, timeout=30):
        rooms = 2 * (8 << 20) / (10 * 4 * 899_700 / 4)
        assert 1 < share < 1 + rooms + 0.1
