"""pycomm's hooks on a DistributedDataParallel whose process group is on the backend."""

import averaging
import backends
import ddp
import pytest
import torch

import pycomm


def hooked(rank, _size, name):
    with pycomm.init():
        watched = ddp.Watched(ddp.network(), ddp.COMPRESSIONS[name], layout={"bucket_cap_mb": 0.02})
        optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            seen.append(watched.backward(watched.model(ddp.batch(rank, step)).square().mean()))
            optimizer.step()
    return seen


@pytest.mark.parametrize("name", ddp.COMPRESSIONS)
def test_gradients_are_those_of_the_golden_models(name):
    ddp.Reference(2, ddp.COMPRESSIONS[name]).check(backends.run(2, hooked, name))


LOCAL = {"period": 2, "compression": pycomm.Int8(), **averaging.DILOCO}


def trained_locally(_rank, _size):
    with pycomm.init() as group:
        return averaging.train(group, "hook", 4, **LOCAL)


def test_local_sgd_hook():
    averaging.check(backends.run(2, trained_locally), LOCAL)
