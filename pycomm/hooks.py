"""Communication hooks for torch's DistributedDataParallel.

.. code-block:: python

    model = DistributedDataParallel(model)
    state = pycomm.hooks.Int8State(model.named_parameters())
    model.register_comm_hook(state, pycomm.hooks.int8_hook)

A hook never blocks backward, averages in place, and gives the same bits on every rank, whatever the
buckets. Errors come out of ``backward()`` with their type.
"""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
from typing import Any

import torch
from torch.futures import Future

from pycomm._runtime.torch_private import GradBucket
from pycomm._training.comm_state import CommState, NamedParameters
from pycomm._training.local_sgd import LocalSGDState
from pycomm.compression import Int8, TopK
from pycomm.group import Group

__all__ = [
    "AllReduceState",
    "CommState",
    "Int8State",
    "LocalSGDState",
    "TopKState",
    "all_reduce_hook",
    "comm_hook",
    "int8_hook",
    "local_sgd_hook",
    "topk_hook",
]


class AllReduceState(CommState):
    """For :func:`all_reduce_hook`: nothing to remember but the group."""

    def __init__(self, *, group: Group | None = None) -> None:
        super().__init__(group=group)


class Int8State(CommState):
    """For :func:`int8_hook`. With `params` there is error feedback, without there is none.

    Args:
        params: see :class:`CommState`.
        block: see :class:`pycomm.Int8`.
        rounding: see :class:`pycomm.Int8`.
        seed: see :class:`pycomm.Int8`.
        options: `group`, `exclude`, `grad_scaler`, `warmup_steps` of :class:`CommState`.
    """

    def __init__(
        self,
        params: NamedParameters | None = None,
        *,
        block: int = 256,
        rounding: str = "nearest",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(Int8(block, rounding, seed), params, **options)


class TopKState(CommState):
    """For :func:`topk_hook`; always with error feedback.

    Args:
        params: see :class:`CommState`.
        density: see :class:`pycomm.TopK`.
        values: see :class:`pycomm.TopK`.
        momentum: see :class:`pycomm.TopK`.
        options: `group`, `exclude`, `grad_scaler`, `warmup_steps` of :class:`CommState`.
    """

    def __init__(
        self,
        params: NamedParameters,
        *,
        density: float = 0.01,
        values: torch.dtype = torch.float32,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        if params is None:
            raise TypeError("params must be model.named_parameters(), got None")
        super().__init__(TopK(density, values=values, momentum=momentum), params, **options)


def all_reduce_hook(state: AllReduceState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients as they are, in rank order, with fp32 sums."""
    return _run(state, AllReduceState, bucket)


def int8_hook(state: Int8State, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients as blocks of 8-bit integers."""
    return _run(state, Int8State, bucket)


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the largest gradients of every parameter."""
    return _run(state, TopKState, bucket)


def comm_hook(state: CommState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients with any compressor: the one of the state."""
    return _run(state, CommState, bucket)


def local_sgd_hook(state: LocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Leaves gradients alone, unless the state is in its warm-up or has an inner group."""
    return _run(state, LocalSGDState, bucket)


def _run(
    state: CommState | LocalSGDState,
    kind: type[CommState] | type[LocalSGDState],
    bucket: GradBucket,
) -> Future[torch.Tensor]:
    if not isinstance(state, kind):
        raise TypeError(f"state must be a pycomm.hooks.{kind.__name__}, got {state!r}")
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            f"bucket must be a torch.distributed.GradBucket, got {type(bucket).__name__}: hooks "
            "need DistributedDataParallel's own reducer"
        )
    return state.start_in_backward(bucket.buffer(), bucket.parameters())
