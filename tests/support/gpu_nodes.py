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

import pycomm
from pycomm import _init

LAYOUTS = ([1, 1], [2, 2], [2, 1], [1, 1, 1], [1, 2, 1], "abba")
needs_gpus = pytest.mark.skipif(
    torch.version.cuda is not None and torch.cuda.device_count() < 4, reason="needs 4 GPUs"
)


def run(nodes: list[int] | str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``function(group, *args)`` on every rank, whose GPU has the rank's number."""
    names = spanning.names(nodes)
    return helpers.run_ranks(len(names), member, names, function, *args)


def member(
    rank: int, size: int, store: str, nodes: str, function: Callable[..., Any], *args: Any
) -> Any:
    """For :class:`helpers.Ranks`."""
    take_nccl(rank)
    options = {"timeout": 60.0}
    return spanning.member(rank, size, store, nodes, over_nccl, options, function, *args)


def over_nccl(group: pycomm.Group, function: Callable[..., Any], *args: Any) -> Any:
    """Checks that the group does not take CUDA tensors through host memory."""
    assert group._spans(torch.device("cuda"))
    return function(group, *args)


def take_nccl(rank: int) -> None:
    """From now on this process has a GPU, and torch's default group has NCCL for it."""
    torch.cuda.set_device(rank)
    backends = {"cpu": "gloo", "cuda": "nccl"}
    mock.patch.object(_init, "backends_of", return_value=backends).start()
    if torch.version.cuda is None:
        from emulated_nccl import ProcessGroupNCCL

        mock.patch.object(dist, "ProcessGroupNCCL", ProcessGroupNCCL, create=True).start()
