"""Communication hooks for torch's DistributedDataParallel.

.. code-block:: python

    model = DistributedDataParallel(model)
    state = pycomm.hooks.Int8State(model.named_parameters())
    state.register(model)

For ``model.register_comm_hook(state, hook)``, there is also a hook for each kind of state, and
:func:`comm_hook` accepts every state. A hook never blocks backward, averages in place, and gives
the same bits on every rank, whatever the buckets. ``backward()`` raises errors with their type.
"""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from pycomm._names import lazy_names
from pycomm._runtime.torch_private import GradBucket
from pycomm._training.comm_state import CommState, NamedParameters
from pycomm._training.hook_state import HookState, comm_hook
from pycomm.compression import Int8, TopK
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm._training.local_sgd import LocalSGDState

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"pycomm._training.local_sgd": ["LocalSGDState"]})


class AllReduceState(CommState):
    """The state of :func:`all_reduce_hook`, which sends gradients uncompressed."""

    def __init__(self, *, group: Group | None = None) -> None:
        super().__init__(group=group)


class Int8State(CommState):
    """The state of :func:`int8_hook`, which sends gradients in 8 bits.

    Args:
        params: see :class:`CommState`. Without them there is no error feedback.
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
    """The state of :func:`topk_hook`, which sends the largest gradients, with error feedback.

    By default it sends about half a bit per parameter. With momentum or Adam, the loss is then
    closer to uncompressed training than with 1 % in fp32, which takes as many bytes. It is even
    closer with `local_residuals` of :class:`LocalSGDState` (docs/data-parallel.md).

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
        density: float = 0.03,
        values: torch.dtype = torch.int8,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        if params is None:
            raise TypeError("params must be model.named_parameters(), got None")
        super().__init__(TopK(density, values=values, momentum=momentum), params, **options)


def all_reduce_hook(state: AllReduceState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients uncompressed, in rank order, with fp32 sums."""
    _check_pair("all_reduce_hook", AllReduceState, state)
    return comm_hook(state, bucket)


def int8_hook(state: Int8State, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients as blocks of 8-bit integers."""
    _check_pair("int8_hook", Int8State, state)
    return comm_hook(state, bucket)


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the largest gradients of every parameter."""
    _check_pair("topk_hook", TopKState, state)
    return comm_hook(state, bucket)


def local_sgd_hook(state: "LocalSGDState", bucket: GradBucket) -> Future[torch.Tensor]:
    """Does not exchange gradients, except in the state's warm-up or in its inner group."""
    from pycomm._training.local_sgd import LocalSGDState

    _check_pair("local_sgd_hook", LocalSGDState, state)
    return comm_hook(state, bucket)


def _check_pair(hook: str, kind: type[HookState], state: object) -> None:
    if not isinstance(state, kind):
        raise TypeError(
            f"state must be a pycomm.hooks.{kind.__name__} for {hook}, got "
            f"{type(state).__name__}: state.register(model) picks the hook that fits"
        )
