"""torch.distributed.checkpoint saves every state as it is, and loads it into a new one."""

import ddp
import golden
import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

STEPS, AT = 6, 4
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
STATES = {
    "dense": (hooks.AllReduceState, {}),
    "int8": (hooks.Int8State, {}),
    "cast": (hooks.CommState, {"compression": pycomm.Cast()}),
    "topk": (hooks.TopKState, {"momentum": 0.5}),
    "local": (hooks.LocalSGDState, {"period": 2}),
    "int8 parameters": (hooks.LocalSGDState, {"period": 2, "compression": pycomm.Int8()}),
    "outer": (hooks.LocalSGDState, {"period": 2, **OUTER}),
    "warm-up": (hooks.LocalSGDState, {"period": 2, "gradient_steps": 5, **OUTER}),
}


class Run:
    """A model under DistributedDataParallel with a new state."""

    def __init__(self, kind, options):
        self.module = ddp.network()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        given = {} if kind is hooks.AllReduceState else {"params": self.module.named_parameters()}
        if kind is hooks.LocalSGDState:
            given["optimizer"] = self.optimizer
        self.state = kind(**given, **options)
        self.model = DistributedDataParallel(self.module, broadcast_buffers=False)
        self.state.register(self.model)

    def train(self, rank, steps):
        for step in steps:
            self.optimizer.zero_grad()
            self.model(ddp.batch(rank, step)).square().mean().backward()
            self.optimizer.step()
            if self.state.averages_parameters:
                self.state.step()

    def save(self, folder):
        dcp.save({"model": self.module.state_dict(), "comm": self.state}, checkpoint_id=folder)

    def load(self, folder):
        found = {"model": self.module.state_dict(), "comm": self.state}
        dcp.load(found, checkpoint_id=folder)
        self.module.load_state_dict(found["model"])

    def weights(self):
        return [parameter.detach().clone() for parameter in self.module.parameters()]


def resume(rank, size, store, name):
    """The weights of a run that never stopped, and of one that was saved and loaded."""
    helpers.join_world(rank, size, store)
    with pycomm.init():
        whole, folder = Run(*STATES[name]), f"{store}.checkpoint"
        whole.train(rank, range(AT))
        whole.save(folder)
        whole.train(rank, range(AT, STEPS))
        resumed = Run(*STATES[name])
        resumed.load(folder)
        resumed.train(rank, range(AT, STEPS))
        return whole.weights(), resumed.weights()


@pytest.mark.parametrize("name", STATES)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name):
    for whole, resumed in helpers.run_ranks(2, resume, name):
        assert all(golden.same_bits(a, b) for a, b in zip(whole, resumed, strict=True))
