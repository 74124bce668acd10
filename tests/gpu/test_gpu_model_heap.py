"""The CUDA window's heap has room for what models need there, without an option."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import helpers
import pytest
import torch
from torch import nn

import pycomm
from pycomm._runtime.cuda import HeapWishes
from pycomm.optim import FusedAdamW

pytestmark = pytest.mark.gpu

WIDTHS = (100, 300, 70)
MIB = 1 << 20
GIVEN = 64 << 10


def member(
    rank: int, size: int, store: str, function: Callable[..., Any], options: dict, *args: Any
) -> Any:
    """For :class:`helpers.Ranks`: a rank whose group has not used CUDA."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with helpers.member(rank, size, store, timeout=60, **options) as group:
        value = function(group, *args)
        torch.cuda.synchronize()
        group.check()
        return value


def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return helpers.run_ranks(2, member, function, options, *args)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*layers).cuda()


def heap_bytes(group: pycomm.Group) -> int:
    side = group._cuda
    assert side is not None
    assert side.heap is not None
    return int(side.heap.ranges.refusal(0).split(": of ")[1].split()[0])


def train(model: nn.Module, group: pycomm.Group, steps: int = 3) -> float:
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.full((4, WIDTHS[0]), 1.0 + group.rank, device="cuda")).square().mean()
        loss.backward()
    return loss.item()


def paths_of(plan: pycomm.ExchangePlan) -> set[str]:
    return {bucket.path for bucket in plan.buckets}


def wrap(group: pycomm.Group, connected: bool) -> tuple[set[str], int]:
    if connected:
        pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)
    net = network()
    model = pycomm.DataParallel(net, group=group)
    train(model, group)
    paths = paths_of(model.explain())
    assert ("init(cuda_heap_bytes=...)" in str(model.explain())) is (paths == {"staged"})
    return paths, heap_bytes(group)


def test_a_wrapper_has_its_buckets_in_the_heap() -> None:
    nbytes = sum(p.nbytes for p in network().parameters())
    for paths, size in run(wrap, False):
        assert paths == {"in place"}
        assert nbytes < size < 1.1 * nbytes + 4096
    for paths, size in run(wrap, True):  # it grows
        assert paths == {"in place"}
        assert nbytes < size < 1.1 * nbytes + 4096
    for paths, size in run(wrap, False, cuda_heap_bytes=8 * MIB):  # what was asked for is larger
        assert paths == {"in place"}
        assert size >= 8 * MIB


def wrap_differently(group: pycomm.Group) -> set[str]:
    """Only rank 1 has said beforehand that it needs more."""
    wishes = HeapWishes(torch.device("cuda"))
    if group.rank == 1:
        wishes.add(group, MIB)
    return wrap(group, False)[0] if heap_bytes_after(group) >= MIB else set()


def heap_bytes_after(group: pycomm.Group) -> int:
    pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)
    return heap_bytes(group)


def test_the_largest_wish_counts() -> None:
    assert run(wrap_differently) == [{"in place"}] * 2


def wrap_with_little_memory(group: pycomm.Group) -> list[tuple[set[str], int]]:
    free = 2 * 60_000 if group.rank == 1 else 8 * MIB
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, 80 << 30)):
        return [wrap(group, connected) for connected in (False, True)]


def test_models_get_at_most_half_of_what_is_free() -> None:
    for seen in run(wrap_with_little_memory):
        for paths, size in seen:  # also of a window that could grow
            assert paths == {"staged"}
            assert 60_000 <= size < 64_100


def grow_beside(group: pycomm.Group) -> set[str]:
    """What lies in a heap, and graphs that use it, stay valid when it grows."""
    x = group.empty(1000, device="cuda")
    first, other = group.peers(x)
    pool = group.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.full((1000,), 1.0 + group.rank, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        pycomm.all_reduce(x, group=group)
    paths = wrap(group, False)[0]
    gc.collect()
    kept = group.empty(40_000, device="cuda") if group.rank == 0 else None
    paths |= wrap(group, False)[0]  # one rank has room
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert x.tolist() == [2 * value] * 1000
    torch.cuda.synchronize()
    pycomm.barrier(group=group)
    assert first.tolist() == other.tolist() == [4.0] * 1000
    pycomm.all_reduce(pooled, group=group)
    assert pooled.tolist() == [3.0] * 1000
    with torch.cuda.use_mem_pool(pool):  # in what is new, on each rank in another part
        late = torch.full((20_000,), float(group.rank), device="cuda")
    peers = group.peers(late)
    torch.cuda.synchronize()
    assert [peer.unique().tolist() for peer in peers] == [[0.0], [1.0]]
    if group.rank == 1:
        pycomm.send(late, 0, group=group)
    else:
        pycomm.recv(late, 1, group=group)
        assert late.eq(1).all()
    assert heap_bytes(group) > 6 * GIVEN
    del kept
    return paths


def test_a_heap_grows_beside_what_lies_there() -> None:
    assert run(grow_beside, cuda_heap_bytes=GIVEN) == [{"in place"}] * 2


def shard(group: pycomm.Group, stage: str) -> list[tuple[float, int, int]]:
    """Two models; the window exists when the second one begins, and the first one fills it."""
    kept: list[Any] = []
    return [shard_one(group, stage, kept) for _ in range(2)]


def shard_one(group: pycomm.Group, stage: str, kept: list[Any]) -> tuple[float, int, int]:
    net = network(group.rank)
    model = pycomm.DataParallel(net, group=group, shard=stage)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(train(model, group, 1))
        optimizer.step()
    assert losses[2] < losses[0]
    side = group._cuda
    assert side is not None
    assert side.heap is not None
    free = int(side.heap.ranges.refusal(0).split(" bytes ")[1].split()[0])
    kept += model, optimizer
    return losses[2], heap_bytes(group), free


@pytest.mark.parametrize("stage", ["optimizer", "gradients"])
def test_shards_need_no_option(stage: str) -> None:
    """As in a heap that is given, and hardly any of it is left."""
    without, given = run(shard, stage), run(shard, stage, cuda_heap_bytes=64 * MIB)
    for seen, expected in zip(without, given, strict=True):
        sizes = [size for _, size, _ in seen]
        assert [loss for loss, _, _ in seen] == [loss for loss, _, _ in expected]
        assert all(free < 2 * 8192 for _, _, free in seen)
        assert 8192 < sizes[0] < sizes[1] <= 2 * sizes[0] < expected[0][1] == expected[1][1]


def wrap_threads(group: pycomm.Group) -> set[str]:
    model = pycomm.DataParallel(network(), group=group)
    loss = model(torch.ones(4, WIDTHS[0], device="cuda")).square().mean()
    loss.backward()
    return paths_of(model.explain())


def test_threads_need_no_heap() -> None:
    with pycomm.LocalWorld(1) as world:
        assert world.run(wrap_threads) == [{"in place"}]
