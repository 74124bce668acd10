"""Ranks on several nodes, with NCCL between their GPUs.

On emulated devices something else stands for NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

from pycomm._runtime import carriers

LAYOUTS = ([1, 1], [2, 2], [2, 1])
needs_gpus = pytest.mark.skipif(
    torch.version.cuda is not None and torch.cuda.device_count() < 4, reason="needs 4 GPUs"
)


def run(nodes: list[int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``function(group, *args)`` on every rank, whose GPU has the rank's number."""
    names = spanning.names(nodes)
    return helpers.run_ranks(len(names), member, names, function, *args)


def member(
    rank: int, size: int, store: str, nodes: str, function: Callable[..., Any], *args: Any
) -> Any:
    """For :class:`helpers.Ranks`."""
    torch.cuda.set_device(rank)
    backends = {"cpu": "gloo", "cuda": "nccl"}  # those of torch's default group
    mock.patch.object(carriers, "backends_of", return_value=backends).start()
    if torch.version.cuda is None:
        from emulated_nccl import ProcessGroupNCCL

        mock.patch.object(dist, "ProcessGroupNCCL", ProcessGroupNCCL, create=True).start()
        mock.patch.object(dist, "is_nccl_available", return_value=True).start()
    options = {"transport": "process_group", "timeout": 60.0}
    return spanning.member(rank, size, store, nodes, function, options, *args)
