"""States of DistributedDataParallel's hooks go on with ranks that have joined the group."""

import copy
import time
from pathlib import Path

import ddp
import growing
import helpers
import pytest
import torch
import torch.distributed as dist
import wrapped
from torch.nn.parallel import DistributedDataParallel
from wrapping import data_parallel

import pycomm
from pycomm import hooks

STEPS, MEMBERS, SIZE = 3, 2, 3
STATES = {
    "int8": lambda named, **options: hooks.Int8State(named, **options),
    "top-k": lambda named, **options: hooks.TopKState(named, density=0.05, **options),
}


def connect(group):
    """Makes torch.distributed anew with the ranks of the group, as docs/how-to/recovery.md says."""
    if dist.is_initialized():
        dist.destroy_process_group()
    host, port = group.address.rpartition(":")[0], torch.zeros(1, dtype=torch.int64)
    if group.rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    pycomm.broadcast(port, 0, group=group)
    if group.rank > 0:
        store = dist.TCPStore(host, int(port))
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)


def make(kind, seed, group):
    net = ddp.network()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(seed)
    state = STATES[kind](net.named_parameters(), group=group)
    return net, state, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        wrapped.batch_loss(model, rank, step).backward()
        optimizer.step()


def grow_in_training(rank, size, store, path, kind):
    is_new, progress = rank >= MEMBERS, {"step": 0}
    before = {}
    if is_new:
        group = pycomm.join(Path(path), 60)
        net, state, optimizer = make(kind, rank, group)
    else:
        helpers.join_world(rank, MEMBERS, store)
        group = pycomm.init(timeout=60)
        net, state, optimizer = make(kind, 0, group)
        model = DistributedDataParallel(net)
        state.register(model)
        train(model, optimizer, rank, range(STEPS))
        progress["step"] = STEPS
        before = {name: state.residual(name).clone() for name in weights(net)}
        while group.size < size:
            growing.publish(group, path)
            group = group.grow()
    state.regroup(group)
    connect(group)
    model = DistributedDataParallel(net)
    state.register(model)
    pycomm.share_state(optimizer, progress, receive=is_new)
    after = {name: state.residual(name).clone() for name in weights(net)}
    begun = copy.deepcopy([net.state_dict(), optimizer.state_dict(), state.state_dict()])
    train(model, optimizer, group.rank, range(progress["step"], 2 * STEPS))
    pycomm.barrier()
    time.sleep(0.2)
    return before, after, begun, net.state_dict(), state.step


def weights(net):
    return [name for name, p in net.named_parameters() if not ddp.sent_dense(name, p)]


@pytest.mark.parametrize("kind", STATES)
def test_a_hook_goes_on_in_a_larger_group(kind, tmp_path):
    """With the bits of a wrapper whose group began at this size, with the same residuals."""
    found = helpers.run_ranks(SIZE, grow_in_training, str(tmp_path / "door"), kind)
    for before, after, *_ in found[:MEMBERS]:
        assert wrapped.same(before, after)
        assert any(residual.any() for residual in after.values())
    assert not any(residual.any() for residual in found[2][1].values())

    def alone(group):
        net, state, optimizer = make(kind, 9, group)
        options = {"compression": state.compression, "group": group}
        model = data_parallel(net, **options)
        for each, one in zip((net, optimizer, model.comm_state), found[group.rank][2], strict=True):
            each.load_state_dict(copy.deepcopy(one))
        train(model, optimizer, group.rank, range(STEPS, 2 * STEPS))
        return net.state_dict()

    with pycomm.LocalWorld(SIZE) as world:
        expected = world.run(alone)
    for mine, (*_, end, steps) in zip(expected, found, strict=True):
        assert wrapped.same(mine, end)
        assert steps == 2 * STEPS
