"""Training goes on with ranks that have joined it: they have what the others have, bit for bit."""

import collections
import copy
import time
from pathlib import Path

import growing
import helpers
import pytest
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import hooks

STEPS = 3
MEMBERS, SIZE = 2, 4


def make_net(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.BatchNorm1d(96), nn.Linear(96, 8))
    return net.to(dtype)


def train(model, optimizer, rank, steps):
    for step in steps:
        data = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(16, 64, generator=data).to(next(model.parameters()).dtype)
        model(inputs).square().mean().backward()
        assert model.should_commit()
        optimizer.step()
        optimizer.zero_grad()


ADAMS = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "fused": lambda net: pycomm.optim.FusedAdamW(net.parameters(), lr=0.01),
    "bf16": lambda net: pycomm.optim.FusedAdamW(net.parameters(), lr=0.01),
}


def everything(model, optimizer):
    """Copies of all that ranks must have in common."""
    return copy.deepcopy([model.module.state_dict(), optimizer.state_dict()])


def parameters(states):
    """Those of the net. After a forward, ranks have buffers of their own until the next one."""
    return {name: value for name, value in states[0].items() if "running" not in name}


def same(mine, other):
    """True if two nested states have the same bits."""
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, other) and mine.dtype == other.dtype
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(mine[key], other[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(other) and all(map(same, mine, other))
    return mine == other


def grow_in_training(rank, size, store, path, kind, compression):
    """Members train, and others join them; returns the states before, with them, and at the end."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    options = {"compression": compression, "feedback": False}
    progress, is_new = {"step": 0}, rank >= MEMBERS
    net = make_net(rank, dtype)
    before = None
    if is_new:
        group = pycomm.join(Path(path), 60)
        while group.size < size:
            group = group.grow()
        model = data_parallel(net, group=group, **options)
        optimizer = ADAMS[kind](net)
    else:
        helpers.join_world(rank, MEMBERS, store)
        group = pycomm.init(timeout=60)
        model = data_parallel(net, **options)
        optimizer = ADAMS[kind](net)
        train(model, optimizer, rank, range(STEPS))
        progress["step"] = STEPS
        before = everything(model, optimizer)
        while group.size < size:
            growing.publish(group, path)
            group = group.grow()
        model.regroup(group)
    pycomm.share_state(optimizer, progress, receive=is_new)
    shared = everything(model, optimizer)
    step = progress["step"]
    train(model, optimizer, group.rank, range(step, step + STEPS))
    pycomm.barrier()
    time.sleep(0.2)
    return group.rank, before, shared, everything(model, optimizer), model.comm_state.step


@pytest.mark.parametrize(
    ("kind", "compression"),
    [("torch", None), ("torch", pycomm.Int8()), ("fused", pycomm.Int8()), ("bf16", None)],
    ids=["torch", "torch, int8", "fused, int8", "fused, bf16"],
)
def test_newcomers_have_all_that_the_members_have(kind, compression, tmp_path):
    found = helpers.run_ranks(SIZE, grow_in_training, str(tmp_path / "door"), kind, compression)
    assert sorted(rank for rank, *_ in found) == list(range(SIZE))
    for rank, before, shared, end, steps in found:
        assert rank >= MEMBERS or same(before, found[rank][2])  # members keep theirs
        if rank >= MEMBERS:
            assert same(shared[0], found[0][1][0])
        for mine, other in ((shared, found[0][1]), (end, found[0][3])):
            assert same(mine[1], other[1])
            assert same(parameters(mine), parameters(other))
        assert steps == 2 * STEPS

    def alone(group):
        net = make_net(0, next(iter(end[0].values())).dtype)
        net.load_state_dict(found[0][1][0])
        model = data_parallel(net, group=group, compression=compression, feedback=False)
        optimizer = ADAMS[kind](net)
        optimizer.load_state_dict(copy.deepcopy(found[0][1][1]))  # ranks are threads here
        model.comm_state.step = STEPS
        train(model, optimizer, group.rank, range(STEPS, 2 * STEPS))
        return everything(model, optimizer)

    with pycomm.LocalWorld(SIZE) as world:
        expected = world.run(alone)
    assert same(expected[0], found[0][3])


def regroup_badly(rank, size, store, path):
    """Members whose parameters differ; and the state of a hook."""
    net = make_net(rank)
    if rank < MEMBERS:
        helpers.join_world(rank, MEMBERS, store)
        group = pycomm.init(timeout=20)
        model = pycomm.DataParallel(net)
        hooked = hooks.Int8State(net.named_parameters())
        hooked.step = 7
        if rank == 1:
            with torch.no_grad():
                net[0].weight += 1
        while group.size < size:
            growing.publish(group, path)
            group = group.grow()
        with pytest.raises(RuntimeError, match="only some of them took a step"):
            model.regroup(group)
    else:
        group = pycomm.join(Path(path), 30)
        with pytest.raises(RuntimeError, match="only some of them took a step"):
            pycomm.DataParallel(net)
        hooked = hooks.Int8State(net.named_parameters())
    hooked.regroup(group)
    pycomm.barrier()
    time.sleep(0.2)
    return hooked.step


def test_what_cannot_go_on_says_so_on_all_ranks(tmp_path):
    assert helpers.run_ranks(3, regroup_badly, str(tmp_path / "door")) == [7, 7, 7]


def test_states_are_sent_to_those_that_ask_for_them():
    class Unsendable:
        def __init__(self, state):
            self.state_dict = lambda: {"state": state}

        def load_state_dict(self, state):
            raise AssertionError(state)

    def live(group):
        progress = {"step": group.rank, "list": [torch.full((3,), float(group.rank))]}
        pycomm.share_state(progress, group=group)
        assert progress["step"] == group.rank
        pycomm.share_state(progress, receive=group.rank != 1, group=group)
        everyone = progress["step"], progress["list"][0].tolist()
        big = {"data": torch.full((5 << 20,), float(group.rank)), "own": group.rank}
        pycomm.share_state(big, receive=group.rank == 2, group=group)
        with pytest.raises(ValueError, match="on a rank that has the states, got True on all"):
            pycomm.share_state(progress, receive=True, group=group)
        for state in (lambda: None, collections.defaultdict(list)):  # not written, not read
            with pytest.raises(ValueError, match=r"states of tensors, numbers, .* on rank 0"):
                pycomm.share_state(Unsendable(state), receive=group.rank == 2, group=group)
        with pytest.raises(TypeError, match=r"objects\[1\] must be a dict, or have state_dict"):
            pycomm.share_state(progress, 3, group=group)
        return everyone, big["own"], big["data"].unique().tolist()

    with pycomm.LocalWorld(3) as world:
        assert world.run(live) == [
            ((1, [1.0] * 3), 0, [0.0]),
            ((1, [1.0] * 3), 1, [1.0]),
            ((1, [1.0] * 3), 0, [0.0]),
        ]


def two_layers(width=4):
    shapes = [(width, 32 // width), (32 // width, width)]
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))


def transposed():
    return two_layers(8)


def frozen():
    net = two_layers()
    net[0].requires_grad_(False)
    return net


def with_a_buffer():
    net = two_layers()
    net.register_buffer("more", torch.zeros(0))
    return net


def bring_another_model(rank, size, store, path, make):
    """The newcomer's tensors have as many bytes as the members', but are others."""
    if rank == MEMBERS:
        group = pycomm.join(Path(path), 30)
        with pytest.raises(
            ValueError, match=r"the same on all ranks: rank 2 has .*, but rank 0 has"
        ):
            pycomm.DataParallel(make(), group=group)
        time.sleep(0.3)  # slower ranks are still in there
        group.close()
        return None
    helpers.join_world(rank, MEMBERS, store)
    group = pycomm.init(timeout=20)
    model = pycomm.DataParallel(two_layers())
    while group.size < size:
        growing.publish(group, path)
        group = group.grow()
    with pytest.raises(pycomm.CollectiveError, match=r"rank 2 has .*, but rank 0 has") as raised:
        model.regroup(group)
    time.sleep(0.2)
    model.regroup(group.shrink())
    return raised.value.rank, model.comm_state.group.ranks


@pytest.mark.parametrize("make", [transposed, frozen, with_a_buffer])
def test_a_newcomer_with_another_model_is_left_out(make, tmp_path):
    found = helpers.run_ranks(3, bring_another_model, str(tmp_path / "door"), make)
    assert found == [(2, (0, 1))] * 2 + [None]
