"""Processes whose default group of torch.distributed runs on pycomm."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import helpers
import torch.distributed as dist
from usage import descriptors, threads, window_bytes


def join(rank: int, size: int, store: str, backend: str = "pycomm", seconds: float = 60) -> None:
    """Makes the default group."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def member(
    rank: int, size: int, store: str, function: Callable[..., Any], seconds: float, *args: Any
) -> Any:
    """For :class:`helpers.Ranks`: ``function(rank, size, *args)`` in a group on pycomm."""
    join(rank, size, store, seconds=seconds)
    result = function(rank, size, *args)
    dist.destroy_process_group()
    return result


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """Results of ``function(rank, size, *args)`` on every rank."""
    return helpers.run_ranks(size, member, function, seconds, *args)


def ranks(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = 60
) -> helpers.Ranks:
    """The processes, which tests can kill or stop."""
    return helpers.Ranks(size, member, function, seconds, *args)


def cost() -> tuple[int, int, int]:
    """A rank's memory of windows, descriptors and threads, while no rank does anything."""
    dist.barrier()
    now = window_bytes(), descriptors(), threads()
    dist.barrier()
    return now
