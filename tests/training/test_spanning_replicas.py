"""Sharded training between nodes goes on when ranks or nodes are lost, without a checkpoint."""

import copy
import random

import pytest
import sharding
import spanning
import torch
from losing import MASTER, REMAINDER, after, check, survive
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import optim
from pycomm._training.replicas import Replicas


def long(*values):
    """A moment at which ranks die in other quick tests, too."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        ("backward", {"max_norm": 0.1}),
        ("copying", {"states": "8bit"}),
        long("publishing", {"bucket_cap_mb": 0.01}),
        long("publishing", {"bucket_cap_mb": 0.01, "shard": "gradients", **REMAINDER}),
        ("updated", {"states": "8bit", "max_norm": 0.1, "shard": "gradients"}),
        long("sending", REMAINDER),
        long("sent", MASTER),
        long("decided", {"shard": "gradients"}),
        long("decided", {"states": "8bit", **REMAINDER}),
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


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        long("copying", {"states": "8bit"}),
        long("publishing", {"bucket_cap_mb": 0.01, "shard": "gradients", **REMAINDER}),
        ("sent", {"shard": "gradients", **REMAINDER}),
        ("decided", MASTER),
    ],
)
def test_a_rank_and_its_buddy_are_killed(moment, options):
    """The other ranks of their nodes still reach their copies."""
    deaths = dict.fromkeys((1, 3), (2, moment))
    assert check([2, 2], deaths, **options) == [3 if moment == "decided" else 2]


def test_ranks_are_killed_one_after_the_other():
    """In the end one is left, and has everything."""
    deaths = {1: (1, "sent"), 0: (2, "decided"), 3: (5, "updated")}
    assert check([1, 1, 1, 1], deaths, states="8bit") == [1, 3, 5]


@pytest.mark.parametrize(
    ("nodes", "moment", "options"),
    [
        ([1, 1, 1, 1], "restoring", {"states": "8bit"}),
        long([1, 1, 1, 1], "moving", {"publish": pycomm.Cast(), **MASTER}),
        long([2, 2], "restoring", REMAINDER),
        ([2, 2], "moving", {"shard": "gradients", **REMAINDER}),
    ],
)
def test_another_rank_is_killed_while_the_others_regroup(nodes, moment, options):
    """Neither is the buddy of the other one."""
    assert check(nodes, {0: (2, "sent"), nodes[0] + 1: (2, moment)}, **options) == [2]


@pytest.mark.parametrize(
    ("publish", "options"),
    [(pycomm.Int8(), {}), (pycomm.Cast(), MASTER), (pycomm.Int8(), REMAINDER)],
)
@pytest.mark.parametrize("moment", ["publishing", long("decided")])
def test_what_published_changes_have_lost_is_dropped(moment, publish, options):
    """As when ranks load a checkpoint."""
    options = {"publish": publish, "bucket_cap_mb": 0.01, **options}
    assert check([1, 1, 1], {1: (2, moment)}, **options) == [3 if moment == "decided" else 2]


def train_with_two_optimizers(group, dies):
    """The second one's second step fails, or is not taken."""
    net, rng = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70)), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) / 8)
    options = {"bucket_cap_mb": 0.01, "replicas": 2 if dies else 1}
    model = data_parallel(net, group=group, shard="optimizer", **options)
    counts, fails = (optim.FusedAdamW(layer.parameters(), lr=0.1) for layer in net)
    for number in range(2):
        model.zero_grad()
        model(torch.full((1, 70), 1.0 + group.rank + number)).square().sum().backward()
        counts.step()
        if number == 0:
            fails.step()
    if dies:
        if group.rank == 1:
            after(Replicas, "_send")
        with pytest.raises(pycomm.CollectiveError):
            fails.step()
        model.regroup(group.shrink())
    return copy.deepcopy((model.state_dict(), counts.state_dict(), fails.state_dict()))


def test_only_the_step_that_failed_is_undone():
    with spanning.ranks([1, 1, 1], train_with_two_optimizers, True, timeout=30) as ranks:
        left = ranks.wait_for([0, 2])
    with pycomm.LocalWorld(3, nodes=[1, 1, 1]) as world:
        expected = world.run(train_with_two_optimizers, False)[0]
    for outcome in left:
        assert outcome.error is None, outcome.trace
        assert sharding.difference(expected, outcome.value) is None


def test_compressed_training_goes_on_alike():
    options = {"compression": pycomm.Int8(), "publish": pycomm.Int8()}
    deaths = {1: (2, "sent")}
    with spanning.ranks([1, 1, 1], survive, deaths, options, timeout=30) as ranks:
        left = ranks.wait_for([0, 2])
    for outcome in left:
        assert outcome.error is None, outcome.trace
        assert outcome.value[0][1:] == [(2, (0, 2), [1, 1])]
        assert sharding.difference(left[0].value, outcome.value) is None


def killed_at_random(seed):
    """Kills a rank or a node before the step, in it, or after it."""
    rng = random.Random(seed)
    nodes = rng.choice([[1, 1, 1], [2, 2], [1, 2, 1]])
    names, when = spanning.names(nodes), 10 ** rng.uniform(-4, -0.5)
    victim = rng.randrange(len(names))
    node = [rank for rank, name in enumerate(names) if name == names[victim]]
    deaths = dict.fromkeys(rng.choice([node, [victim]]), (3, when))
    shard = rng.choice(["optimizer", "gradients"])
    options = {"elements": 100_000, "states": "8bit", "shard": shard}
    check(nodes, deaths, **options)


@pytest.mark.slow
def test_ranks_are_killed_at_random():
    for seed in range(2):
        killed_at_random(seed)


@pytest.mark.slow
def test_many_ranks_are_killed_at_random():
    for seed in range(20):
        killed_at_random(100 + seed)
