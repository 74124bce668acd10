"""Memory pools of torch and CuPy in the CUDA window's heap, and peers' tensors there."""

from __future__ import annotations

import gc
import sys
from typing import Any

import cupy_stand_in
import gpu_ranks
import pytest
import torch
from test_gpu_peers import fill_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm

pytestmark = pytest.mark.gpu

MIB = 1 << 20
COUNT = 6 * MIB  # elements of 24 MiB: a segment of its own in torch's pools
HEAP = 64 * MIB


def path_of(group: pycomm.Group, tensor: torch.Tensor) -> str:
    side = group._cuda
    assert side is not None
    return side.path_of(tensor)


def full(value: float, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value, device="cuda")


def make_in_pool(group: pycomm.Group) -> None:
    pool = group.mem_pool()
    assert group.mem_pool() is pool
    before = full(1.0)
    with torch.cuda.use_mem_pool(pool):
        if group.rank == 1:
            first = full(7.0)  # no other rank waits for this
        inside = full(group.rank + 1.0)
    outside = full(1.0)
    assert path_of(group, inside) == "in place"
    assert path_of(group, before) == path_of(group, outside) == "staged"
    assert pycomm.all_reduce(inside, group=group) is inside
    assert inside.eq(3.0).all()
    if group.rank == 1:
        assert first.eq(7.0).all()
        del first
    del inside
    with torch.cuda.use_mem_pool(pool):
        again = [full(group.rank + 1.0) for _ in range(2)]  # there is no room for three
    for tensor in again:
        assert path_of(group, tensor) == "in place"
        assert pycomm.all_reduce(tensor, "avg", group=group).eq(1.5).all()


def test_tensors_of_the_pool_are_used_in_place() -> None:
    gpu_ranks.run(2, gpu_ranks.PEER, make_in_pool, cuda_heap_bytes=HEAP)


def wrap_ddp(group: pycomm.Group) -> set[str]:
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024, device="cuda")
    model: Any
    with torch.cuda.use_mem_pool(group.mem_pool()):
        model = DistributedDataParallel(net, bucket_cap_mb=100)
    state = pycomm.hooks.AllReduceState(group=group)
    state.register(model)
    model(full(group.rank + 1.0, 1024).view(1, 1024)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.eq(1.5).all()
    side = group._cuda
    assert side is not None
    assert len(side.heap.parts) == 1  # it needs no more
    return {bucket.path for bucket in state.explain().buckets}


def test_buckets_of_ddp_are_exchanged_in_place() -> None:
    assert gpu_ranks.run(2, gpu_ranks.PEER, wrap_ddp, cuda_heap_bytes=HEAP) == [{"in place"}] * 2


def exhaust(group: pycomm.Group) -> str:
    pool = group.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        kept = full(1.0)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            full(1.0, 16 * MIB)
        assert kept.eq(1.0).all()
        smaller = full(2.0)
    full(1.0)  # the ordinary pool has room
    pycomm.all_reduce(smaller, group=group)
    return str(caught.value)


def test_an_exhausted_heap_is_an_error_of_torch() -> None:
    for message in gpu_ranks.run(2, gpu_ranks.PEER, exhaust, cuda_heap_bytes=HEAP):
        assert message == (
            f"the CUDA window's heap has no room for {64 * MIB} bytes: of {HEAP} bytes {40 * MIB} "
            f"are free, the largest block has {40 * MIB}: make the group with a larger "
            "cuda_heap_bytes"
        )


def outlive(group: pycomm.Group) -> str:
    pool = group.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        kept = full(7.0)
    pycomm.barrier(group=group)
    group.close()
    gc.collect()
    assert kept.eq(7.0).all()
    with torch.cuda.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError) as caught:
        full(1.0, 8 * MIB)
    del kept, pool
    return str(caught.value)


def test_tensors_outlive_their_group() -> None:
    for message in gpu_ranks.run(2, gpu_ranks.PEER, outlive, cuda_heap_bytes=HEAP):
        assert message == "the group is closed: the heap of its CUDA window makes no more tensors"


def use_two(group: pycomm.Group) -> None:
    with pycomm.init(cuda_heap_bytes=HEAP) as other:
        pycomm.all_reduce(full(1.0, 4), group=other)  # connects
        pools = group.mem_pool(), other.mem_pool()
        tensors = []
        for pool in pools:
            with torch.cuda.use_mem_pool(pool):
                tensors.append(full(group.rank + 1.0))
        for of in (group, other):
            paths = [path_of(of, tensor) for tensor in tensors]
            assert paths == (["in place", "staged"] if of is group else ["staged", "in place"])
        for of, tensor in zip((group, other), tensors, strict=True):
            assert pycomm.all_reduce(tensor, group=of).eq(3.0).all()


def test_each_group_has_a_pool() -> None:
    gpu_ranks.run(2, gpu_ranks.PEER, use_two, cuda_heap_bytes=HEAP)


def use_none(group: pycomm.Group) -> None:
    with pytest.raises(MemoryError, match="no heap, because CUDA tensors go through pinned host"):
        group.mem_pool()
    with pytest.raises(ValueError, match=r"library must be one of torch, cupy, got 'numpy'"):
        group.mem_pool("numpy")
    tensor = full(1.0, 8)
    assert pycomm.all_reduce(tensor, group=group).tolist() == [2.0] * 8


def test_pinned_host_memory_has_no_pool() -> None:
    gpu_ranks.run(2, gpu_ranks.PINNED, use_none, cuda_heap_bytes=HEAP)


@pytest.mark.parametrize("nodes", [None, [1, 1]])
def test_ranks_that_are_threads_need_no_heap(nodes: list[int] | None) -> None:
    def body(group: pycomm.Group) -> None:
        with torch.cuda.use_mem_pool(group.mem_pool()):
            tensor = full(group.rank + 1.0, 100)
        assert pycomm.all_reduce(tensor, group=group).eq(3.0).all()

    with pycomm.LocalWorld(2, nodes=nodes) as world:
        world.run(body)


# CuPy.


def use_cupy(group: pycomm.Group) -> None:
    with pytest.raises(ValueError, match='library must have been imported, got "cupy"'):
        group.mem_pool("cupy")
    assert "cupy" not in sys.modules
    cupy = cupy_stand_in.install()
    first, second = (cupy.cuda.Stream(torch.cuda.Stream()) for _ in range(2))
    pool = group.mem_pool("cupy")
    assert group.mem_pool("cupy") is pool
    with cupy.cuda.using_allocator(pool.malloc):
        first.use()
        for _ in range(3):  # each is freed while its stream may use it
            array = cupy.full(COUNT, group.rank + 1.0)
            assert path_of(group, array.data) == "in place"
            assert pycomm.all_reduce(array, group=group) is array
            assert array.get() == [3.0] * COUNT
        del array
        second.use()  # cannot use the blocks of the first one, which are given back
        arrays = [cupy.full(COUNT, float(group.rank)) for _ in range(2)]
        with pytest.raises(MemoryError, match=rf"no room for {4 * COUNT} bytes: of {HEAP} bytes"):
            cupy.full(COUNT, 0.0)
        for array in arrays:
            assert pycomm.all_reduce(array, group=group).get() == [1.0] * COUNT
    torch.cuda.synchronize()


def test_arrays_of_cupy_are_used_in_place() -> None:
    gpu_ranks.run(2, gpu_ranks.PEER, use_cupy, cuda_heap_bytes=HEAP)


# Peers.


def use_peers_in_pool(group: pycomm.Group) -> None:
    with torch.cuda.use_mem_pool(group.mem_pool()):
        x = full(float(group.rank), 1000)
        other = group.peers(x)[1 - group.rank]
        del x
        others = fill_up(lambda count: torch.empty(count, device="cuda"))
    torch.cuda.synchronize()
    pycomm.barrier(group=group)
    assert other.eq(1.0 - group.rank).all()
    pycomm.barrier(group=group)
    del others


def test_tensors_of_peers_in_a_pool() -> None:
    gpu_ranks.run(2, gpu_ranks.PEER, use_peers_in_pool, cuda_heap_bytes=4 * MIB)
