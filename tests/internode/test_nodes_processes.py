"""Groups that span nodes, as processes over Gloo: the bits of LocalWorld(nodes=)."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import compressing
import golden_nodes
import pytest
import spanning
import torch
from compressing import Case

import pycomm

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], [3, 1]]


def everything(group: pycomm.Group) -> list[torch.Tensor]:
    """One of each operation, sync and async."""
    made = []
    for dtype, op in [(torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.int64, "max")]:
        x = (compressing.gradient(torch.float32, 400_001, group.rank) * 100).to(dtype)
        made.append(pycomm.all_reduce(x.clone(), op, group=group))
        made.append(y := x.clone())
        pycomm.all_reduce(y, op, group=group, async_op=True).wait()
    x = compressing.gradient(torch.float32, 7 * group.size, group.rank)
    made.append(pycomm.reduce_scatter(torch.empty(7), x, group=group))
    made.append(pycomm.all_gather(torch.empty(7 * group.size), x[:7], group=group))
    made.append(pycomm.broadcast(x, group.size - 1, group=group))
    for compression in (pycomm.Int8(), pycomm.TopK(0.01), pycomm.Cast()):
        case = Case(compression, torch.bfloat16, count=700_001, steps=2)
        for step in compressing.run(group, case):
            made += [step.result, step.residual]
    pycomm.barrier(group=group)
    return made


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_the_bits_of_threads(world, nodes):
    wanted = world(sum(nodes), nodes=nodes).run(everything)
    for rank, made in enumerate(spanning.run(nodes, everything)):
        for i, (got, expected) in enumerate(zip(made, wanted[rank], strict=True)):
            compressing.compare(f"tensor {i} of rank {rank}", got, expected)


BLOCK = 2501


def one_of_each(group: pycomm.Group) -> tuple:
    x = compressing.gradient(torch.float32, 4 * BLOCK, group.rank)
    return (
        group.nodes,
        pycomm.all_reduce(x.clone(), group=group),
        pycomm.reduce_scatter(torch.empty(BLOCK), x, group=group),
        pycomm.all_gather(torch.empty(4 * BLOCK), x[:BLOCK], group=group),
        pycomm.broadcast(x.clone(), 1, group=group),
        pycomm.compressed_all_reduce(x.clone(), pycomm.Int8(), group=group),
    )


def test_nodes_whose_ranks_alternate(world):
    """Sums go node by node, blocks rank by rank."""
    inputs = [compressing.gradient(torch.float32, 4 * BLOCK, rank) for rank in range(4)]
    in_order = [inputs[rank] for rank in (0, 3, 1, 2)]
    total = golden_nodes.all_reduced(in_order, "sum", [2, 2])
    coded = world(4, nodes=[2, 2]).run(
        lambda group: pycomm.compressed_all_reduce(
            in_order[group.rank].clone(), pycomm.Int8(), group=group
        )
    )[0]
    gathered = torch.cat([x[:BLOCK] for x in inputs])
    for rank, (nodes, *made) in enumerate(spanning.run("abba", one_of_each)):
        assert nodes == ((0, 3), (1, 2))
        block = total[rank * BLOCK : (rank + 1) * BLOCK]
        wanted = (total, block, gathered, inputs[1], coded)
        for i, (got, expected) in enumerate(zip(made, wanted, strict=True)):
            compressing.compare(f"result {i} of rank {rank}", got, expected)


def where(group: pycomm.Group) -> tuple:
    return group.nodes, group.stripes, group.rank, group.size


def test_ranks_find_out_who_is_where():
    nodes = ((0, 1, 2), (3,))
    assert spanning.run([3, 1], where) == [(nodes, 1, rank, 4) for rank in range(4)]


def groups_of_some(group: pycomm.Group) -> list[float]:
    """Ranks that are in different numbers of process groups; groups that come and go."""
    torch.distributed.new_group([0])
    some = torch.distributed.new_group([1, 2])
    sums, resources = [], []
    for _ in range(4):
        with pycomm.init(timeout=20) as again:
            sums.append(float(pycomm.all_reduce(torch.ones(3), group=again)[0]))
            pycomm.barrier(group=again)
        if group.rank > 0:
            with pycomm.init(some, timeout=20) as pair:
                sums.append(float(pycomm.all_reduce(torch.ones(3), group=pair)[0]))
        torch.distributed.barrier()
        time.sleep(0.3)
        gc.collect()
        held = [list(Path("/proc/self", what).iterdir()) for what in ("fd", "task")]
        resources.append(sum(map(len, held)))
    assert resources[-1] <= resources[1], resources
    return sums


def test_groups_whatever_torch_has():
    """Ranks of such groups meet, and leave nothing behind."""
    three = [3.0] * 4
    both = [3.0, 2.0] * 4
    assert spanning.run([2, 1], groups_of_some) == [three, both, both]


class Elementwise(torch.nn.Module):
    """A model with bit-equal gradients at any alignment, unlike those of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 200), (200,), (9, 200), (9,)]
        self.weights = torch.nn.ParameterList(
            torch.randn(shape, generator=generator) for shape in shapes
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in self.weights]) * rows


ELEMENTS = 300 * 200 + 200 + 9 * 200 + 9


def three_steps(group: pycomm.Group, parallel: torch.nn.Module) -> torch.Tensor:
    """Takes three steps; returns all parameters."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.randn(ELEMENTS, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parallel.parameters()])


def train(group: pycomm.Group, bucket_cap_mb: float, compression: pycomm.Compression | None):
    model = Elementwise()
    wrapped = pycomm.DataParallel(
        model, compression=compression, bucket_cap_mb=bucket_cap_mb, group=group
    )
    return three_steps(group, wrapped)


@pytest.mark.parametrize("compression", [None, pycomm.Int8(), pycomm.TopK(0.02)], ids=str)
def test_the_wrapper(world, compression):
    """The same parameters everywhere, whatever the buckets."""
    wanted = world(3, nodes=[2, 1]).run(train, 25, compression)
    for rank, got in enumerate(spanning.run([2, 1], train, 0.1, compression)):
        compressing.compare(f"parameters of rank {rank}", got, wanted[0])


def train_with_hook(group: pycomm.Group, name: str, bucket_cap_mb: float) -> torch.Tensor:
    model = Elementwise()
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    if name == "int8":
        state = pycomm.hooks.Int8State(model.named_parameters(), group=group)
        parallel.register_comm_hook(state, pycomm.hooks.int8_hook)
    else:
        state = pycomm.hooks.TopKState(model.named_parameters(), density=0.02, group=group)
        parallel.register_comm_hook(state, pycomm.hooks.topk_hook)
    parameters = three_steps(group, parallel)
    assert state.stats()["bytes_wire"] > 0
    saved = state.state_dict()
    state.load_state_dict(saved)
    return parameters


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_hooks(world, name):
    """With DistributedDataParallel; the bits of the wrapper, for every layout of buckets."""
    compression = pycomm.Int8() if name == "int8" else pycomm.TopK(0.02, values=torch.int8)
    wanted = world(4, nodes=[2, 2]).run(train, 25, compression)
    for bucket_cap_mb in (0.05, 25):
        for rank, got in enumerate(spanning.run([2, 2], train_with_hook, name, bucket_cap_mb)):
            compressing.compare(f"parameters of rank {rank}", got, wanted[0])
