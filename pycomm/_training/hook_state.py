"""The hook of DistributedDataParallel, the base of its states, and where its buckets lie."""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pycomm._runtime.c10d import take_memory
from pycomm._runtime.log import fallback
from pycomm._runtime.torch_private import GradBucket
from pycomm.errors import PycommError
from pycomm.group import Group


class HookState(ABC):
    """The base of all states in :mod:`pycomm.hooks`, as hooks and the wrapper use them.

    Attributes:
        averages_parameters: True if ranks train separately, and exchange parameters.
        agreements: if so, how many times all ranks have had the same parameters.
    """

    algorithm = "auto"  # of exchanges; also the default of states that older versions have pickled
    averages_parameters = False
    agreements = 0
    _wishes: Any = None  # for buckets in the CUDA window, until the first one comes

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
        on_cuda = [p for p in model.parameters() if p.requires_grad and p.is_cuda]
        if on_cuda and self.exchanges_in_place(on_cuda):
            from pycomm._training.heap import wish_for_ddp

            self._wishes = wish_for_ddp(self._wishes, self.group, model, on_cuda)

    @property
    @abstractmethod
    def group(self) -> Group:
        """The group whose ranks exchange gradients or parameters."""

    @property
    @abstractmethod
    def gradient_group(self) -> Group | None:
        """The group that exchanges gradients in this step, or None."""

    def exchanges_parameter(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """True for a tensor that this state exchanges, instead of its gradient."""
        return False

    @abstractmethod
    def sends_dense(self, parameter: torch.Tensor) -> bool:
        """True if this parameter's gradient is sent uncompressed."""

    def exchanges_in_place(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True if these parameters' gradients are exchanged where they lie."""
        return not self.averages_parameters and all(map(self.sends_dense, parameters))

    @abstractmethod
    def options(self) -> dict[str, object]:
        """The options that must be the same on all ranks."""

    @abstractmethod
    def check_module(self, module: nn.Module) -> None:
        """Raises ValueError if this state does not fit a module's parameters."""

    def follow_formats(self, parameters: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Adapts residuals to the memory formats of parameters that get new buckets."""

    @abstractmethod
    def start(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        backward: int = -1,
        *,
        begins: Sequence[int] | None = None,
    ) -> Future[Any]:
        """Begins to average a bucket of gradients."""

    @abstractmethod
    def finish(self, backward: int = -1) -> None:
        """Waits for the exchanges that were started with this number."""

    @abstractmethod
    def give_back(self) -> None:
        """Adds the step's unused means to residuals."""

    @abstractmethod
    def note_failure(self) -> None:
        """Records that the step has failed although its exchanges may have completed."""

    @abstractmethod
    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether all ranks take the step."""

    @abstractmethod
    def regroup(self, group: Group) -> None:
        """Continues with another group."""

    @abstractmethod
    def start_in_backward(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Future[torch.Tensor]:
        """Takes a bucket of gradients from the running backward."""


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Exchanges gradients as the state does. This hook accepts every state."""
    try:
        start = state.start_in_backward
    except AttributeError:
        raise TypeError(f"state must be one of pycomm.hooks, got {type(state).__name__}") from None
    check_bucket(bucket)
    return start(bucket.buffer(), bucket.parameters())


def check_bucket(bucket: object) -> None:
    """Raises TypeError for what torch's reducer in Python passes to hooks instead of buckets."""
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"bucket must be a torch.distributed.GradBucket, got {type(bucket).__name__}: hooks "
            "need DistributedDataParallel's own reducer"
        )


# Moves the buckets of DistributedDataParallel into the window.
#
# torch allocates them, so without this each exchange would copy them into the window and back.


def move_into_window(bucket: torch.Tensor, group: Group) -> None:
    """Gives a bucket, and all views of it, memory in the group's window, with the same content.

    NumPy arrays and DLPack tensors that were made from a view are no longer valid. The bucket stays
    where it is if it is only a part of its storage or shared with other processes, if the group has
    one rank, or if the window has no memory left.
    """
    storage = bucket.untyped_storage()
    alone = storage.nbytes() == bucket.nbytes and (bucket.is_cuda or not storage.is_shared())
    if take_memory is None or not alone or group.size == 1:
        return
    try:
        if bucket.is_cuda:
            if not group._spans(bucket.device) and not group._stages(bucket.device):
                group._cuda_side(bucket.device).take_in(bucket)
        elif bucket.is_cpu and group._core.offset_of(bucket.data_ptr()) < 0:
            memory = group.empty(bucket.numel(), dtype=bucket.dtype)
            take_memory(bucket, memory.copy_(bucket))
    except MemoryError as error:
        told = "no memory for DistributedDataParallel's buckets, exchanges copy them: %s"
        fallback(group, told, error)
    except PycommError:  # the exchange raises it
        return
