"""torch.distributed on pycomm with CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import backends
import helpers
import pytest
import random_operations
import spanning
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm._runtime.torch_private import backend_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def run(size: int, function: Callable[..., Any], *args: Any, backend: str = "pycomm") -> list[Any]:
    """Results of ``function(rank, size, *args)`` on every rank, in a default group on pycomm."""
    return helpers.run_ranks(size, member, backend, function, *args)


def member(
    rank: int, size: int, store: str, backend: str, function: Callable[..., Any], *args: Any
) -> Any:
    """For :class:`helpers.Ranks`."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    backends.join(rank, size, store, backend)
    result = function(rank, size, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_random_sequences(size: int) -> None:
    kinds = run(size, random_operations.sequence, size, 100, "cuda")
    assert set().union(*kinds) == random_operations.KINDS


def on_three_streams(rank: int, _size: int) -> list[list[float]]:
    """One stream makes the tensors, another calls the operation, and a third waits for it."""
    maker, caller, waiter = (torch.cuda.Stream() for _ in range(3))
    results = []
    for strided in (False, True):
        with torch.cuda.stream(maker):
            x = torch.full((2000,), float(rank + 1), device="cuda")[:: 1 + strided]
        caller.wait_stream(maker)
        with torch.cuda.stream(caller):
            work = dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(waiter):
            work.wait()
            results.append(x.unique().cpu().tolist())
        x.record_stream(waiter)
        x.record_stream(caller)
        del work, x
    return results


def test_three_streams() -> None:
    """The emulated device ends a process that uses memory on two streams without an order."""
    assert run(2, on_three_streams) == [[[3.0], [3.0]]] * 2


def abandoned(rank: int, size: int) -> float:
    """Nobody waits for works whose tensors have gone; kernels and copies may still use them."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True)
        dist.all_gather_into_tensor(
            torch.empty(2 * size, device="cuda"), torch.ones(4, device="cuda")[::2], async_op=True
        )
        dist.isend(torch.ones(5, device="cuda"), 1 - rank)
        dist.irecv(torch.empty(5, device="cuda"), 1 - rank)
    x = torch.full((7,), float(rank), device="cuda")
    dist.all_reduce(x)
    return float(x.sum())


def test_works_without_a_wait() -> None:
    assert run(2, abandoned) == [7.0, 7.0]


def futures(rank: int, size: int) -> list[Any]:
    x = torch.full((1000,), float(rank), device="cuda")
    blocks = [torch.full((4,), float(rank), device="cuda") for _ in range(size)]
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: 2 * done.value()[0])
    staged = dist.all_to_all([torch.empty_like(b) for b in blocks], blocks, async_op=True)
    gathered = staged.get_future().then(lambda done: torch.stack(done.value()).sum(1))
    values = [doubled.wait()[0].item(), gathered.wait().tolist(), work.get_future().done()]
    work.wait()
    torch.cuda.synchronize()
    return [*values, work.is_completed(), work.result()[0].data_ptr() == x.data_ptr()]


def test_futures() -> None:
    assert run(2, futures) == [[2.0, [0.0, 4.0], True, True, True]] * 2


def captured(rank: int, _size: int) -> list[float]:
    x, y = (torch.zeros(100, device="cuda") for _ in range(2))
    dist.all_reduce(x)  # connects outside of the capture
    torch.cuda.synchronize()
    graph, sums = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        work = dist.all_reduce(y, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        y.add_(1)
        for call in (dist.isend, dist.irecv):
            with pytest.raises(pycomm.ArgumentError, match="a CUDA graph cannot capture"):
                call(x, 1 - rank)
    for step in range(3):
        x.fill_(rank + step)
        y.fill_(rank)
        graph.replay()
        sums += [x[0].item(), y[99].item()]
    return sums


def test_replays_in_a_graph() -> None:
    assert run(2, captured) == [[1.0, 1.5, 3.0, 1.5, 5.0, 1.5]] * 2


def refused(_rank: int, _size: int) -> list[str]:
    on_device, on_host = torch.ones(4, device="cuda"), torch.ones(4)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather_into_tensor(torch.empty(8), on_device),
        lambda: dist.all_reduce(on_device, dist.ReduceOp.BXOR),
        lambda: dist.all_gather([on_device, on_host], on_device),
    ]
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as error:
            call()
        texts.append(str(error.value))
    dist.all_reduce(on_device)
    assert on_device.tolist() == [2.0] * 4
    return texts


def test_refusals_name_the_operation_and_leave_the_group_usable() -> None:
    first, second = run(2, refused)
    assert first[1] == second[1]
    assert "all_gather" in first[0]
    assert "one on cpu and one on cuda:0" in first[0] or "one on cuda:0 and one on cpu" in first[0]
    assert "float32, got bxor" in first[1]


def leaves(rank: int, _size: int, how: str) -> tuple[int, str] | None:
    x = torch.ones(100, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        dist.destroy_process_group()
        return None
    work = dist.all_reduce(x, async_op=True)  # nobody has looked whether it has failed
    calls = {
        "wait": work.wait,
        "operation": lambda: dist.all_reduce(torch.ones(3, device="cuda")),
        "end": dist.destroy_process_group,
    }
    try:
        calls[how]()
    except pycomm.CollectiveError as error:
        return error.rank, type(error).__name__
    return None


@pytest.mark.parametrize("how", ["wait", "operation", "end"])
def test_a_rank_that_leaves_is_named(how: str) -> None:
    with helpers.Ranks(2, member, "pycomm", leaves, how) as ranks:
        outcome = ranks.wait_for([0])[0]
        assert outcome.value is not None, outcome.trace
        assert outcome.value[0] == 1


def after_the_end(_rank: int, _size: int) -> float:
    """A work may be waited for after the group is gone."""
    x = torch.ones(100, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    group = dist.new_group()
    dist.destroy_process_group(group)
    backend = backend_of(dist.group.WORLD, CUDA)
    backend.shutdown()
    work.wait()
    return x.sum().item()


def test_a_work_outlives_its_group() -> None:
    assert run(2, after_the_end) == [200.0, 200.0]


def bound(rank: int, size: int, store: str) -> list[Any]:
    """With a device for the default group, torch splits groups from it."""
    torch.cuda.set_device(rank)
    own = torch.device("cuda", rank)
    store = dist.FileStore(store, size)
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=size, device_id=own,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    found = []
    first = dist.new_group([0])  # a group of rank 0 has other names on other ranks
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
    for group in (half, mesh["a"].get_group(), mesh["b"].get_group()):
        for device in ("cpu", own):
            x = torch.full((3,), float(rank), device=device)
            dist.all_reduce(x, group=group)
            found.append(x[0].item())
    if rank == 0:
        dist.all_reduce(torch.ones(1, device=own), group=first)
    dist.destroy_process_group()
    return found


def test_groups_are_split_from_one_with_a_device() -> None:
    low, high = [1.0, 1.0], [5.0, 5.0]
    columns = [[2.0, 2.0], [4.0, 4.0]]
    expected = [half + columns[rank % 2] + half for rank, half in enumerate([low, low, high, high])]
    assert helpers.run_ranks(4, bound) == expected


def coalesced(rank: int, size: int) -> list[Any]:
    x = [torch.full((4,), float(rank + i), device="cuda") for i in range(4)]
    device = torch.device("cuda", torch.cuda.current_device())
    for async_op, parts in (False, x[:2]), (True, x[2:]):
        with dist._coalescing_manager(device=device, async_ops=async_op) as works:
            for part in parts:
                dist.all_reduce(part)
        if async_op:
            works.wait()  # the emulated device ends a process that uses results without it
    outputs = [[torch.empty(n, device="cuda") for n in (2, 2 * rank + 1)] for rank in range(size)]
    given = [torch.full((n,), float(rank), device="cuda") for n in (2, 2 * rank + 1)]
    dist.all_gather_coalesced(outputs, given)
    return [[part[0].item() for part in x], [part.unique().tolist() for o in outputs for part in o]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_operations() -> None:
    """Also with lists of which kernels can gather only some."""
    assert run(2, coalesced) == [[[1.0, 3.0, 5.0, 7.0], [[0.0], [0.0], [1.0], [1.0]]]] * 2


def train(model: torch.nn.Module, rank: int, device: str) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 12, generator=generator).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def trained(rank: int, _size: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    layers = (torch.nn.Linear(12, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = torch.nn.Sequential(*layers).to(device)
    ids = [torch.cuda.current_device()] if device == "cuda" else None
    return train(torch.nn.parallel.DistributedDataParallel(model, ids), rank, device)


@pytest.mark.parametrize("backend", ["pycomm", "cpu:gloo,cuda:pycomm"])
def test_distributed_data_parallel(backend: str) -> None:
    """As on the CPU with Gloo: sums of two are the same in any order."""
    want = run(2, trained, "cpu", backend="gloo")
    for got in run(2, trained, "cuda", backend=backend):
        for mine, theirs in zip(got, want[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def spanning_groups(rank: int, size: int) -> list[Any]:
    """On a simulated pair of nodes without NCCL everything is staged."""
    x = torch.full((1000,), float(rank), device="cuda")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    whole = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank), device="cuda"))
    return [x[0].item(), whole.tolist(), backend_of(dist.group.WORLD, CUDA).name()]


def on_nodes(rank: int, size: int, store: str, names: str, function: Callable[..., Any]) -> Any:
    spanning.pretend(names[rank])
    return member(rank, size, store, "pycomm", function)


def test_between_nodes_without_nccl() -> None:
    for result in helpers.run_ranks(3, on_nodes, "aab", spanning_groups):
        assert result == [3.0, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], "pycomm"]


class FakeNCCL:
    """Stands for torch.distributed.ProcessGroupNCCL: a backend whose all-reduce does nothing."""

    Options = SimpleNamespace

    def __new__(cls, _store: Any, rank: int, size: int, options: Any) -> Any:
        assert options._timeout == timedelta(seconds=60)
        return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())


def delegated(rank: int, size: int) -> list[Any]:
    x = torch.full((4,), float(rank), device="cuda")
    with mock.patch.multiple(
        dist, is_nccl_available=lambda: True, ProcessGroupNCCL=FakeNCCL, create=True
    ):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    received = torch.empty(4, device="cuda")
    requests = [dist.isend(x, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for request in requests:
        request.wait()
    return [x[0].item(), received[0].item()]


def test_nccl_has_collectives_between_nodes() -> None:
    results = helpers.run_ranks(3, on_nodes, "aab", delegated)
    assert results == [[0.0, 2.0], [1.0, 0.0], [2.0, 1.0]]


def trained_by_fsdp(rank: int, size: int, device: str) -> list[torch.Tensor]:
    mesh = init_device_mesh(device, (size,))
    torch.manual_seed(0)
    layers = (torch.nn.Linear(12, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model = torch.nn.Sequential(*layers).to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, device)
    return [p.full_tensor().detach().cpu() for p in model.parameters()]


@pytest.mark.hardware
def test_fsdp2() -> None:
    want = run(2, trained_by_fsdp, "cpu", backend="gloo")
    for got in run(2, trained_by_fsdp, "cuda"):
        for mine, theirs in zip(got, want[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
