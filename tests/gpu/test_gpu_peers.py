"""Tensors of other ranks on CUDA, used where they lie in the window's heap."""

from __future__ import annotations

import gc
from collections.abc import Callable

import gpu_ranks
import pytest
import torch

import pycomm

pytestmark = pytest.mark.gpu

HEAP = 4 << 20


def full(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value, device="cuda")


def fill_up(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Takes all memory that is free, in blocks of at least 1 KiB."""
    made, count = [], HEAP // 4
    while count >= 256:
        try:
            made.append(make(count).fill_(9.0))
        except (MemoryError, torch.OutOfMemoryError):
            count //= 2
    return made


def use_peers(group: pycomm.Group) -> tuple[int, list[float]]:
    if group.rank == 1:
        before = group.empty(1000, device="cuda")
    x = group.empty(5, 2000, device="cuda").fill_(group.rank)[:, 7:]
    side = group._cuda
    assert side is not None
    place = side.place_of(x)
    peers = group.peers(x)
    assert all(peer.device == x.device and peer.stride() == (2000, 1) for peer in peers)
    torch.cuda.synchronize()
    pycomm.barrier(group=group)
    seen = [peer.mean().item() for peer in peers]
    pycomm.barrier(group=group)
    peers[1 - group.rank][1, :] = 50.0 + group.rank
    torch.cuda.synchronize()
    pycomm.barrier(group=group)
    assert x[1].eq(51.0 - group.rank).all()
    assert x[0].eq(float(group.rank)).all()
    del x, peers[group.rank]
    (other,) = peers
    kept = 1.0 - group.rank
    others = fill_up(lambda count: group.empty(count, device="cuda"))
    torch.cuda.synchronize()
    pycomm.barrier(group=group)
    assert other[0].eq(kept).all()  # its rank has freed it
    pycomm.barrier(group=group)
    if group.rank == 1:
        del before
    del others
    with pytest.raises(ValueError, match="got others on ranks 1"):
        group.peers(group.empty(10, device="cuda") if group.rank == 0 else full(1.0, 10))
    group.close()
    gc.collect()
    assert other[0].eq(kept).all()
    return place, seen


def test_tensors_of_peers() -> None:
    (first, seen), (second, same) = gpu_ranks.run(
        2, gpu_ranks.PEER, use_peers, cuda_heap_bytes=HEAP
    )
    assert first != second
    assert seen == same == [0.0, 1.0]


def refuse_pinned(group: pycomm.Group) -> None:
    with pytest.raises(ValueError, match=r"ranks 0, 1: .* go through pinned host memory"):
        group.peers(full(1.0, 8))


def test_pinned_host_memory_has_no_views() -> None:
    gpu_ranks.run(2, gpu_ranks.PINNED, refuse_pinned, cuda_heap_bytes=HEAP)


def test_peers_that_are_threads() -> None:
    def body(group: pycomm.Group) -> list[float]:
        x = full(float(group.rank), 100)
        pycomm.all_reduce(full(0.0, 4), group=group)  # connects
        peers = group.peers(x)
        del x
        torch.cuda.synchronize()
        pycomm.barrier(group=group)
        return [peer.mean().item() for peer in peers]

    with pycomm.LocalWorld(2) as world:
        assert world.run(body) == [[0.0, 1.0]] * 2
