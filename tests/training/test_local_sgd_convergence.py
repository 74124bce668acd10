"""The small language model learns as well if ranks exchange parameters every eighth step.

Judged as in :mod:`convergence`: the final loss on training batches of all ranks, relative to that
of synchronous training with the same seed, model, batches and learning rates. Averages must end
where it ends. DiLoCo's outer momentum, beside an optimizer without, makes training faster: it must
not end above.
"""

import pytest
import torch
from averaging import DILOCO
from convergence.tasks import Characters

import pycomm
from pycomm import hooks

RANKS, STEPS, PERIOD = 2, 128, 8
RISING = 0.1  # of the steps, in which the learning rate grows
BAND = 0.01
AVERAGES = {"gradient_steps": STEPS // 8, "compression": pycomm.Int8()}
OUTER = {"compression": pycomm.Int8(), **DILOCO}
TOO_SHORT = {"outer_lr": 0.25}  # the control


def learn(group, tasks, options):
    """One rank's part; the loss of the model that all ranks have in the end."""
    task = tasks[group.rank]
    optimizer = task.make_optimizer(task.model.parameters())
    local = None
    if options is not None:
        named = task.model.named_parameters()
        local = hooks.LocalSGDState(named, optimizer, period=PERIOD, group=group, **options)
    model = pycomm.DataParallel(
        task.model, **({"group": group} if local is None else {"state": local})
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_end_where_those_of_synchronous_training_do(world):
    with torch.random.fork_rng():
        synchronous, averages, outer, too_short = (
            final_loss(world, options) for options in (None, AVERAGES, OUTER, TOO_SHORT)
        )
    assert averages == pytest.approx(synchronous, rel=BAND)
    assert outer < (1 + BAND) * synchronous
    assert too_short > (1 + BAND) * synchronous
