"""Ranks that join and are lost leave no resources in the remaining ranks."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import hooks, optim

MODES = {
    "plain": {},
    "optimizer": {"shard": "optimizer", "replicas": 2},
    "gradients": {"shard": "gradients", "replicas": 2},
    "int8": {"compression": pycomm.Int8()},
    "local SGD": None,
}


def held():
    """Descriptors, mappings of shared memory, and threads of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("memfd:" in line for line in mappings)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return descriptors, shared, threading.active_count()


class Trainee:
    """One rank's model, in one group after the other."""

    def __init__(self, group, options):
        module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.local = None
        if options is None:
            self.optimizer = optim.FusedAdamW(module.parameters(), lr=0.01)
            self.local = hooks.LocalSGDState(
                module.named_parameters(), self.optimizer, period=2, group=group, outer_momentum=0.5
            )
            self.model = pycomm.DataParallel(module, state=self.local)
        else:
            self.model = data_parallel(module, group=group, **options)
            self.optimizer = optim.FusedAdamW(self.model.parameters(), lr=0.01)

    def train(self, steps):
        for _ in range(steps):
            self.model(torch.ones(4, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.local is not None:
                self.local.step()


def one_round(group, trainees, options):
    """A third rank joins, trains and leaves; the others go on without it."""
    is_new = group.rank == 2
    trainee = Trainee(group, options) if is_new else trainees[group.rank]
    if not is_new:
        trainee.model.regroup(group)
    pycomm.share_state(trainee.optimizer, receive=is_new, group=group)
    trainee.train(2)
    if is_new:
        return
    with pytest.raises(pycomm.CollectiveError):
        trainee.train(10)
    trainee.model.regroup(group.shrink())
    trainee.train(2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_rounds_of_joining_and_losing_a_rank(mode):
    options = MODES[mode]
    with pycomm.LocalWorld(2, timeout=60) as first:
        trainees = first.run(lambda group: Trainee(group, options))
        first.run(lambda group: trainees[group.rank].train(2))
        seen = []
        for _ in range(4):
            larger = pycomm.LocalWorld(3, timeout=60)
            larger.run(one_round, trainees, options)
            del larger
            seen.append(held())
    assert seen[3] == seen[2] == seen[1]
