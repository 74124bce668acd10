"""The hook of DistributedDataParallel, and the base of its states."""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pycomm._runtime.torch_private import GradBucket


class HookState(ABC):
    """The base of all states in :mod:`pycomm.hooks`."""

    def register(self, model: DistributedDataParallel) -> None:
        """Registers this state with a model, together with the matching hook.

        This is the same as ``model.register_comm_hook(state, comm_hook)``.

        Args:
            model: a torch.nn.parallel.DistributedDataParallel, before its first backward.

        Raises:
            TypeError: `model` is something else.
            RuntimeError: `model` has a hook already.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                "model must be a torch.nn.parallel.DistributedDataParallel, "
                f"got {type(model).__name__}"
            )
        model.register_comm_hook(self, comm_hook)

    @abstractmethod
    def start_in_backward(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Future[torch.Tensor]:
        """Takes a bucket of gradients from the running backward."""


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Exchanges gradients in the state's way. This hook accepts every state."""
    if not isinstance(state, HookState):
        raise TypeError(f"state must be one of pycomm.hooks, got {type(state).__name__}")
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"bucket must be a torch.distributed.GradBucket, got {type(bucket).__name__}: hooks "
            "need DistributedDataParallel's own reducer"
        )
    return state.start_in_backward(bucket.buffer(), bucket.parameters())
