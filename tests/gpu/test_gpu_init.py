"""What init sets up where ranks have GPUs."""

from __future__ import annotations

import logging
from unittest import mock

import gpu_ranks
import helpers
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm._runtime.torch_private import backends_of

pytestmark = pytest.mark.gpu


def set_up_by_init(rank: int, size: int, _: str, port: int) -> tuple[str | None, int, list[str]]:
    """NCCL or nothing, the current device, and the warnings that name Gloo."""
    helpers.as_torchrun(rank, size, port)
    if gpu_ranks.EMULATED:  # which counts as used
        torch.cuda.set_device(rank)
    told: list[str] = []
    with mock.patch.object(logging.getLogger("pycomm.group"), "warning") as warning:
        with pycomm.init(timeout=60) as group:
            x = pycomm.all_reduce(torch.ones(3, device="cuda"), group=group)
            assert x.tolist() == [size] * 3
        told = [str(call.args[0] % call.args[1:]) for call in warning.call_args_list]
    backend = backends_of(dist.group.WORLD).get("cuda")
    dist.destroy_process_group()
    return backend, torch.cuda.current_device(), [text for text in told if "Gloo alone" in text]


def test_init_sets_up_nccl_if_every_rank_has_a_gpu() -> None:
    found = helpers.run_ranks(2, set_up_by_init, helpers.free_port())
    if not gpu_ranks.EMULATED and torch.cuda.device_count() > 1:
        assert found == [("nccl", rank, []) for rank in range(2)]
        return
    why = (
        "rank 0 has no NCCL in its torch"
        if gpu_ranks.EMULATED
        else "ranks 0 and 1 are on the same GPU"
    )
    for rank, (backend, _, (told,)) in enumerate(found):
        assert backend != "nccl"
        assert told.startswith(f"rank {rank}: torch.distributed has Gloo alone, because {why}: ")
