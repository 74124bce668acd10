"""Ranks that are processes on the GPUs of this machine, which they take in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import helpers
import torch

import pycomm
from pycomm._runtime import cuda

PEER, PINNED = "peer memory", "pinned host memory"
ONE_VISIBLE = "one visible GPU each"  # as under Ray or SLURM
MULTICAST = "peer memory, and multicast where there is any"
EMULATED = torch.version.cuda is None
# Numbers of ranks; one if the device is emulated, because the C++ tests run the kernels with all.
SIZES = (3,) if EMULATED else (1, 2, 3, 4, 8)
LAYOUTS = (PEER, PINNED, ONE_VISIBLE)


def run(
    size: int, layout: str, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Results of ``function(group, *args)`` on every rank; `options` are ``pycomm.init``'s."""
    return helpers.run_ranks(size, member, layout, function, options, *args)


def member(
    rank: int, size: int, store: str, layout: str, function: Callable[..., Any], options: dict,
    *args: Any,
) -> Any:  # fmt: skip
    """For :class:`helpers.Ranks`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    gpus = visible.split(",")
    if layout == ONE_VISIBLE:  # torch reads it when it first uses a device
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
    else:
        torch.cuda.set_device(rank % len(gpus))
    if layout == PINNED:
        mock.patch.object(cuda, "_denied", return_value="a test says so").start()
    asks = {cuda.MULTICAST: "1"} if layout == MULTICAST else {}
    asking = mock.patch.dict(os.environ, asks)
    with asking, helpers.member(rank, size, store, timeout=60, **options) as group:
        pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)  # connects
        path = group.explain(4, device="cuda").path
        assert size == 1 or path == (PINNED if layout == PINNED else PEER)
        value = function(group, *args)
        torch.cuda.synchronize()
        group.check()
    return value


def has_multicast() -> bool:
    """True if processes on several GPUs of this machine can have it."""
    if EMULATED:
        return True
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return torch.cuda.device_count() > 1 and _SymmetricMemory.has_multicast_support(
        DeviceType.CUDA, 0
    )


def capture_averages(world: pycomm.LocalWorld, tensors: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Averages the ranks' tensors once, and captures that in a graph.

    Several threads cannot capture a stream per rank; a world can if its ranks share a stream.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def average(group: pycomm.Group) -> None:
        with torch.cuda.stream(stream):
            pycomm.all_reduce(tensors[group.rank], "avg", group=group)

    world.run(average)  # connects outside the capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        world.run(average)
    return graph
