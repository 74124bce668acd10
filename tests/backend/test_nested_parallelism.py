"""Replicas that are tensor-parallel or pipelines themselves: a mesh of 2 x 2 ranks."""

import backends
import pytest
import torch
from composing import alone, batch, close, loss_of, make_net, mean_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

import pycomm

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def make_mesh(inner):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", inner))
    return mesh["replicate"], mesh[inner]


def tensor_parallel_replicas(_rank, _size):
    replicas, inner = make_mesh("tensor")
    net = make_net()
    for block in net:
        parallelize_module(block, inner, PLAN)
    group = pycomm.init(replicas)
    with pytest.raises(TypeError, match="must be an ordinary tensor, got a DTensor"):
        pycomm.DataParallel(net, group=group)
    _pre_dp_module_transform(net)  # parameters become the DTensors' local tensors
    model = pycomm.DataParallel(net, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, replicas.get_local_rank()))
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss, replicas.get_group()))
    return losses


def test_tensor_parallel_replicas():
    losses, _ = alone(parts=2)
    for ours in backends.run(4, tensor_parallel_replicas):
        close(ours, losses)


def in_wrapper(module, replicas):
    return pycomm.DataParallel(module, group=pycomm.init(replicas))


def in_ddp_with_hook(module, replicas):
    # Without the option, torch's pipelines fail when DDP rebuilds its buckets, also on Gloo.
    model = nn.parallel.DistributedDataParallel(
        module, process_group=replicas.get_group(), find_unused_parameters=True
    )
    pycomm.hooks.AllReduceState(group=pycomm.init(replicas)).register(model)
    return model


def pipelined_replicas(_rank, _size, kind, replicate):
    replicas, inner = make_mesh("pipeline")
    index, replica = inner.get_local_rank(), replicas.get_local_rank()
    layers = nn.Sequential(*make_net()[2 * index : 2 * index + 2])
    model = replicate(layers, replicas)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=inner.get_group())
    schedule = kind(stage, n_microbatches=2, loss_fn=lambda y, _: y.square().mean())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.cat([batch(step, 2 * replica + half) for half in range(2)])
        parts = []
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros_like(x), losses=parts)
            losses.append(mean_loss(torch.stack(parts).mean(), replicas.get_group()))
        optimizer.step()
    return losses


@pytest.mark.parametrize("replicate", [in_wrapper, in_ddp_with_hook])
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_pipelined_replicas(kind, replicate):
    losses, _ = alone()
    first, last, first_again, last_again = backends.run(4, pipelined_replicas, kind, replicate)
    assert first == first_again == []
    for ours in (last, last_again):
        close(ours, losses)
