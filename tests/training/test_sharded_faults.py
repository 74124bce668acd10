"""Ranks are killed in all phases of sharded training: no model goes on with half-new parameters.

Each survivor raises an error that names the dead rank. Its parameters then have the bits from
before or from after the step, or its model refuses to go on until it has loaded a checkpoint.
"""

import contextlib
import functools
import gc
import os
import random
import signal
import threading
import time

import helpers
import pytest
import torch
from torch import nn

import pycomm
from pycomm import optim

STEPS = 5  # before the victim is killed
ELEMENTS = 1 << 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList([torch.randn(ELEMENTS // 4, generator=rng) for _ in range(4)])

    def forward(self, x):
        return sum((part * x).sum() for part in self.parts)


def bits(net):
    return [part.detach().clone() for part in net.parts]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_step(model, optimizer, rank, number, before_step=None):
    """Returns the seconds of the optimizer's step."""
    optimizer.zero_grad()
    model(torch.full((1,), 1.0 + rank + number)).backward()
    if before_step is not None:
        before_step()
    began = time.monotonic()
    optimizer.step()
    return time.monotonic() - began


def refusals(model, optimizer):
    """The errors of everything that could use half-new parameters."""
    (alone,) = pycomm.LocalWorld(1).groups
    if model.module.parts[0].grad is not None:  # else a step does nothing
        with pytest.raises((RuntimeError, pycomm.PycommError)):
            optimizer.step()
    model.zero_grad()
    anew = functools.partial(pycomm.DataParallel, model.module, group=alone)
    found = []
    for use in (lambda: model(torch.ones(1)), model.state_dict, anew):
        try:
            use()
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def dying(group, stage, rule, max_norm, victim, in_step, moment):
    """Trains until a rank dies; a survivor returns what it saw."""
    net = Net()
    model = pycomm.DataParallel(net, group=group, shard=stage)
    optimizer = rule(model.parameters(), lr=0.1, max_norm=max_norm, states="8bit")  # slow
    seconds = [one_step(model, optimizer, group.rank, number) for number in range(STEPS)]
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    delay = moment * (sorted(seconds)[STEPS // 2] if in_step else 0.1)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    if group.rank == victim and not in_step:
        timer.start()
    at_step = timer.start if group.rank == victim and in_step else None
    began = time.monotonic()
    for number in range(STEPS, 100_000):
        before = bits(net)
        try:
            one_step(model, optimizer, group.rank, number, at_step)
            at_step = None
        except pycomm.PycommError as error:
            caught = error
            break
    took = time.monotonic() - began - delay
    changed = not same(before, bits(net))
    model.load_state_dict({"parts.0": net.parts[0].clone()}, strict=False)  # not enough
    found = refusals(model, optimizer)
    net.load_state_dict(checkpoint)
    return {
        "error": type(caught).__name__,
        "rank": getattr(caught, "rank", None),
        "took": took,
        "changed": changed,
        "refusals": found,
        "works again": torch.equal(model.state_dict()["parts.0"], checkpoint["parts.0"]),
    }


RULES = {"adamw": optim.FusedAdamW, "lamb": optim.FusedLAMB}


def check(seed):
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    victim = rng.randrange(size)
    stage = rng.choice(["optimizer", "gradients"])
    rule = RULES[rng.choice(sorted(RULES))]
    in_step = seed % 4 != 0
    arguments = (stage, rule, rng.choice([None, 1.0]), victim, in_step, rng.random())
    with helpers.Ranks(size, helpers.in_group, dying, {"timeout": 30}, *arguments) as ranks:
        survivors = ranks.wait_for([rank for rank in range(size) if rank != victim])
    halves = []
    for outcome in survivors:
        assert outcome.error is None, outcome.trace
        seen = outcome.value
        assert (seen["error"], seen["rank"]) == ("PeerDied", victim), seen
        assert seen["took"] < 1.5, seen
        assert seen["works again"]
        refused = [text.startswith("parameters are partly") for text in seen["refusals"]]
        if seen["changed"]:
            assert all(refused), seen
        else:
            assert all(refused) or not any(refused), seen
        halves.append(seen["changed"])
    return any(halves)


def test_a_killed_rank():
    for seed in range(6):
        check(seed)


@pytest.mark.slow
def test_thirty_killed_ranks():
    """Some of them in the middle of an update."""
    assert sum(check(100 + seed) for seed in range(30)) > 0


def drop_the_model_after_a_backward_that_raised(*_):
    """Rank 0's first bucket still waits for rank 1, which comes later."""

    def made(group):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        model = pycomm.DataParallel(net, group=group, shard="gradients", bucket_cap_mb=0.035)
        model(torch.ones(2, 64)).sum().backward()
        net.zero_grad()
        return model

    def fail(*_):
        raise ValueError("in the last layer of backward")

    world = pycomm.LocalWorld(2, timeout=30)
    models = world.run(made)
    models[0].module[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="in the last layer"):
        models[0](torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert not world.groups[0]._core.idle()
    models[0] = None
    gc.collect()
    junk = [bytearray(b"A" * nbytes) for nbytes in range(24, 256, 8) for _ in range(64)]

    def come():
        with contextlib.suppress(pycomm.Aborted):
            models[1](torch.ones(2, 64)).sum().backward()

    late = threading.Thread(target=come)
    late.start()
    helpers.wait_until(world.groups[0]._core.idle)
    world.groups[0].abort()
    late.join()
    world.close()
    return len(junk)


def test_an_average_outlives_the_model_that_began_it():
    assert helpers.run_ranks(1, drop_the_model_after_a_backward_that_raised)
