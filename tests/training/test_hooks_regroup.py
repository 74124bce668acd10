"""Local SGD by a hook: survivors make DistributedDataParallel anew."""

import copy
import os
import signal

import ddp
import helpers
import torch
import wrapped
from averaging import DILOCO
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

VICTIM = 1


def train_hooked(rank, size, store):
    """Trains under DistributedDataParallel, which survivors make anew."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    net = ddp.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = hooks.LocalSGDState(net.named_parameters(), optimizer, period=3, **DILOCO)
    process_group, model = None, None
    while state.steps < 9:
        try:
            if state.group is not group:
                state.regroup(group)
            if model is None:
                before = copy.deepcopy(net.state_dict())
                model = DistributedDataParallel(
                    net, process_group=process_group, broadcast_buffers=False, init_sync=False
                )
                assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
                state.register(model)
            if state.steps == 4 and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            wrapped.batch_loss(model, rank, state.steps).backward()
            if state.should_commit():
                optimizer.step()
            state.step()
        except pycomm.CollectiveError:
            group = group.shrink()
            process_group = torch.distributed.new_group(
                list(group.ranks), use_local_synchronization=True
            )
            model = None
    return group.ranks, state.agreements, state.stats()["changes_lost"], net.state_dict()


def test_hooks_go_on_in_a_new_distributed_data_parallel():
    with helpers.Ranks(3, train_hooked) as ranks:
        one, other = ranks.wait_for([0, 2])
    assert one.error is None, one.trace
    assert one.value[:3] == other.value[:3] == ((0, 2), 3, 1.0)
    assert all(torch.equal(v, other.value[3][n]) for n, v in one.value[3].items())
