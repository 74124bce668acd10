"""The little language model learns as well where ranks exchange parameters every eighth step.

Judged as in :mod:`convergence`: the final loss on training batches of all ranks, relative to that
of synchronous training with the same seed, model, batches and learning rates.
"""

import pytest
import torch
from averaging import DILOCO
from convergence.tasks import Characters

import pycomm
from pycomm import hooks

RANKS, STEPS, PERIOD = 2, 160, 8
RISING = 0.1  # of the steps, in which the learning rate grows
BAND = 0.03
WORKING = {
    "averages": {"warmup_steps": STEPS // 10},
    "int8 averages": {"compression": pycomm.Int8()},
    "int8 DiLoCo": {"compression": pycomm.Int8(), **DILOCO},
}
BROKEN = {"steps too short": {"outer_lr": 0.25}}


def learn(group, tasks, options):
    """One rank's part; the loss of the model that all ranks have in the end."""
    task = tasks[group.rank]
    optimizer = task.make_optimizer(task.model.parameters())
    local = None
    if options is not None:
        named = task.model.named_parameters()
        local = hooks.LocalSGDState(named, optimizer, period=PERIOD, group=group, **options)
    model = pycomm.DataParallel(
        task.model, **({"group": group} if local is None else {"local_sgd": local})
    )
    for step in range(STEPS):
        done = step / STEPS
        optimizer.param_groups[0]["lr"] = task.rate * min(done / RISING, 1 - done)
        optimizer.zero_grad()
        task.loss(model, task.draw()).backward()
        optimizer.step()
        if local is not None:
            local.step()
    assert local is None or not local.exchange()  # the last step was an exchange
    return task.final_loss()


def final_loss(world, options):
    tasks = [Characters(rank, RANKS, seed=0) for rank in range(RANKS)]
    one, other = world(RANKS).run(learn, tasks, options)
    assert one == other
    return one


@pytest.mark.timeout(600)
def test_working_versions_end_in_the_band_and_a_broken_one_outside(world):
    with torch.random.fork_rng():
        synchronous = final_loss(world, None)
        difference = {
            name: final_loss(world, options) / synchronous - 1
            for name, options in {**WORKING, **BROKEN}.items()
        }
    print(synchronous, difference)
    for name in WORKING:
        assert abs(difference[name]) <= BAND, difference
    for name in BROKEN:
        assert abs(difference[name]) > BAND, difference
