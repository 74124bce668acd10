"""Memory of the CUDA window's heap is used again, without a meeting of ranks."""

from __future__ import annotations

import gc

import gpu_ranks
import pytest
import torch
from torch import nn

import pycomm
from pycomm.optim import FusedAdamW

pytestmark = pytest.mark.gpu

BLOCK = 64 << 10
HEAP = 4 * BLOCK


def make(group: pycomm.Group, value: float, blocks: int = 1) -> torch.Tensor:
    return group.empty(blocks * BLOCK // 4, device="cuda").fill_(value)


def address_of(tensor: torch.Tensor, first: torch.Tensor) -> int:
    """Where a tensor lies, in blocks after the first one."""
    return (tensor.data_ptr() - first.data_ptr()) // BLOCK


def use_again(group: pycomm.Group) -> list[int]:
    """Frees the second and the third of four blocks, but the ranks in different orders."""
    first, *middle, last = [make(group, group.rank + 1.0) for _ in range(4)]
    side = group._cuda
    assert side is not None
    assert all(side.path_of(tensor) == "in place" for tensor in (first, *middle, last))
    seen = []
    view = middle[group.rank].view(-1)[BLOCK // 8 :]  # half of the block that goes first
    del middle[group.rank]
    with pytest.raises(MemoryError, match=f"{BLOCK} bytes: of {HEAP} bytes 0 are free"):
        make(group, 0)  # the view lives
    del view
    one = make(group, group.rank + 1.0)
    seen.append(address_of(one, first))
    pycomm.all_reduce(one, group=group)  # each rank's lies elsewhere
    assert one.tolist() == [3.0] * one.numel()
    del one, middle[0]
    both = make(group, group.rank + 1.0, blocks=2)
    seen.append(address_of(both, first))
    pycomm.all_reduce(both, group=group)
    assert both.tolist() == [3.0] * both.numel()
    assert first.tolist() == last.tolist() == [group.rank + 1.0] * first.numel()
    del first, both, last
    group.empty(0, device="cuda")  # has a place, too, which goes with it
    with pytest.raises(MemoryError, match=f" {HEAP} are free, the largest block has {HEAP}"):
        make(group, 0, blocks=5)
    return seen


def test_memory_is_used_again() -> None:
    seen = gpu_ranks.run(2, gpu_ranks.PEER, use_again, cuda_heap_bytes=HEAP)
    assert seen == [[1, 1], [2, 1]]  # neighbours have merged


def wrap_again(group: pycomm.Group) -> list[float]:
    """More wrappers, one after another, than the heap could hold together."""
    losses = []
    for _ in range(4):
        torch.manual_seed(group.rank)
        net = nn.Linear(128, 256, bias=False, device="cuda")
        model = pycomm.DataParallel(net, group=group, shard="optimizer")
        optimizer = FusedAdamW(model.parameters())
        loss = model(torch.ones(4, 128, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del net, model, optimizer, loss
        gc.collect()
    return losses


def test_a_model_can_be_wrapped_again() -> None:
    weights = 4 * 128 * 256
    for losses in gpu_ranks.run(2, gpu_ranks.PEER, wrap_again, cuda_heap_bytes=3 * weights):
        assert losses == losses[:1] * 4


def outlive(group: pycomm.Group) -> bool:
    kept = make(group, 7.0)
    pycomm.barrier(group=group)
    group.close()
    gc.collect()
    return kept.tolist() == [7.0] * kept.numel()


def test_a_tensor_outlives_its_group() -> None:
    assert gpu_ranks.run(2, gpu_ranks.PEER, outlive, cuda_heap_bytes=HEAP) == [True, True]
