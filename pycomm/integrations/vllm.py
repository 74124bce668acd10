"""vLLM: tensor and pipeline parallelism on CPUs with pycomm's collectives.

.. code-block:: shell

    VLLM_PLUGINS=pycomm vllm serve MODEL --tensor-parallel-size 2

vLLM's own collectives on CPUs share memory on one node, and otherwise are Gloo's. These
span nodes, and have the same bits on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

import pycomm
from pycomm.integrations import missing

try:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
except ModuleNotFoundError as error:
    raise missing("vllm", "vllm") from error

TIMEOUT = 1800.0  # in seconds, as torch's: a rank may compile or load weights while others wait


class Communicator(CpuCommunicator):
    """The collectives of one of vLLM's groups.

    Attributes:
        group: pycomm's group of the same ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group = pycomm.init(self.device_group or self.cpu_group, TIMEOUT)

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False  # so that vLLM does not set up memory for its own collectives

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sums tensors, in place."""
        pycomm.all_reduce(input_, group=self.group)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Joins all ranks' tensors along a dimension."""
        parts = input_.new_empty(self.group.size, *input_.shape)
        pycomm.all_gather(parts, input_, group=self.group)
        return _joined(parts, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Joins all ranks' tensors along a dimension, on rank `dst` of the group."""
        if self.group.rank != dst:
            pycomm.gather(input_, dst=dst, group=self.group)
            return None
        parts = input_.new_empty(self.group.size, *input_.shape)
        pycomm.gather(input_, parts, dst, group=self.group)
        return _joined(parts, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sums tensors; returns this rank's part along a dimension."""
        blocks = input_.movedim(dim, 0).contiguous()
        part = blocks.new_empty(blocks.shape[0] // self.group.size, *blocks.shape[1:])
        pycomm.reduce_scatter(part, blocks, group=self.group)
        return part.movedim(0, dim).contiguous()

    def destroy(self) -> None:
        """Closes the group."""
        self.group.close()
        super().destroy()


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= parts.dim() - 1
    return parts.movedim(0, dim).flatten(dim, dim + 1)
