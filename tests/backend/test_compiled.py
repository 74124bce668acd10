"""torch.compile with Inductor around collectives on the backend."""

import shutil

import backends
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler"
)
# torch 2.13 has new names and warns about the old ones.
all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
reduce_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


def every_collective(x):
    group = dist.group.WORLD
    y = functional.all_reduce(x * 2, "sum", group)
    y = all_gather(y.sin(), 0, group)
    y = reduce_scatter(y + 1, "avg", 0, group)
    y = functional.all_to_all_single(y, None, None, group)
    return functional.broadcast(y * 3, 0, group).cos()


def compiled(rank, _size):
    x = torch.arange(40.0).view(4, 10) / 7 + rank
    function = torch.compile(every_collective, backend="inductor", fullgraph=True)
    for i in range(3):
        torch.testing.assert_close(function(x + i), every_collective(x + i))


@needs_compiler
def test_functional_collectives():
    backends.run(2, compiled)


def compiled_tensor_parallel(_rank, size):
    def gradients(model):
        net.zero_grad()
        model(x).square().mean().backward()
        return [
            (getattr(g, "to_local", lambda g=g: g))() for g in (p.grad for p in net.parameters())
        ]

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(8, 16)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    for ours, expected in zip(gradients(torch.compile(net)), gradients(net), strict=True):
        ours, expected = (g.to_local() if isinstance(g, DTensor) else g for g in (ours, expected))
        torch.testing.assert_close(ours, expected)


@pytest.mark.slow
@needs_compiler
def test_tensor_parallel_model():
    backends.run(2, compiled_tensor_parallel)
