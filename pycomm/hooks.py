"""Communication hooks for torch's DistributedDataParallel.

.. code-block:: python

    model = DistributedDataParallel(model)
    state = pycomm.hooks.Int8State(model.named_parameters())
    state.register(model)

For ``model.register_comm_hook(state, hook)``, there is also a hook for each kind of state, and
:func:`comm_hook` accepts every state. :func:`all_reduce_hook` and :func:`int8_hook` need no state;
like torch's own hooks they also take a process group or None:

.. code-block:: python

    model.register_comm_hook(None, pycomm.hooks.int8_hook)

A hook never blocks backward, averages in place, and gives the same bits on every rank, whatever the
buckets; with ``algorithm="ring"`` or ``"tree"`` of a state, bits depend on the buckets.
``backward()`` raises errors with their type.
"""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from pycomm._init import group_over
from pycomm._names import lazy_names
from pycomm._runtime.torch_private import GradBucket
from pycomm._training.comm_state import CommState, NamedParameters
from pycomm._training.hook_state import HookState, check_bucket, comm_hook
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

S = TypeVar("S", bound=HookState)

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"pycomm._training.local_sgd": ["LocalSGDState"]})


class AllReduceState(CommState):
    """The state of :func:`all_reduce_hook`, a :class:`CommState` without compression."""

    def __init__(self, *, group: Group | None = None, algorithm: str = "auto") -> None:
        super().__init__(group=group, algorithm=algorithm)


class Int8State(CommState):
    """The state of :func:`int8_hook`, which sends gradients in 8 bits.

    Args:
        params: see :class:`CommState`. Without them there is no error feedback.
        block: see :class:`pycomm.Int8`.
        rounding: see :class:`pycomm.Int8`.
        seed: see :class:`pycomm.Int8`.
        options: `group`, `exclude`, `grad_scaler`, `warmup_steps`, `algorithm` of
            :class:`CommState`.
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
    closer with `local_residuals` of :class:`LocalSGDState` (docs/how-to/data-parallel.md).

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


def all_reduce_hook(
    state: AllReduceState | ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Averages gradients uncompressed, in rank order, with fp32 sums.

    Args:
        state: a state; or a process group whose ranks exchange, None for the default group.
        bucket: a bucket of gradients.
    """
    if _is_stateless(state):
        check_bucket(bucket)
        state = AllReduceState(group=group_over(state))
    return comm_hook(_checked("all_reduce_hook", AllReduceState, state), bucket)


def int8_hook(state: Int8State | ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients as blocks of 8-bit integers.

    Args:
        state: a state; or, without error feedback, a process group whose ranks exchange, None for
            the default group.
        bucket: a bucket of gradients.
    """
    if _is_stateless(state):
        check_bucket(bucket)
        state = Int8State(group=group_over(state))
    return comm_hook(_checked("int8_hook", Int8State, state), bucket)


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the largest gradients of every parameter."""
    return comm_hook(_checked("topk_hook", TopKState, state), bucket)


def local_sgd_hook(state: "LocalSGDState", bucket: GradBucket) -> Future[torch.Tensor]:
    """Does not exchange gradients, except in the state's warm-up or in its inner group."""
    from pycomm._training.local_sgd import LocalSGDState

    return comm_hook(_checked("local_sgd_hook", LocalSGDState, state), bucket)


def _is_stateless(state: object) -> TypeGuard[ProcessGroup | None]:
    """True for what torch's own hooks take."""
    return state is None or isinstance(state, ProcessGroup)


def _checked(hook: str, kind: type[S], state: object) -> S:
    if isinstance(state, kind):
        return state
    advice = "state.register(model) picks the hook that fits"
    if _is_stateless(state):
        advice = "only all_reduce_hook and int8_hook need no state"
    raise TypeError(
        f"state must be a pycomm.hooks.{kind.__name__} for {hook}, got {type(state).__name__}: "
        f"{advice}"
    )
