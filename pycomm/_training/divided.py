"""The tensor in ``p.grad`` if a rank has only its part of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm._runtime.torch_private import no_dispatch, no_torch_function

ADVICE = (
    "this rank has only a part of it: call reduce_gradients() of the wrapper before changing "
    "gradients; to clip them, give max_norm to the optimizer; to scale the loss, use "
    "pycomm.optim.GradScaler"
)


class DividedGradient(torch.Tensor):
    """A tensor whose elements share memory, with an error that says why it cannot be written to.

    Results of operations on it are plain tensors.
    """

    __torch_function__ = no_torch_function  # its attributes cost what a plain tensor's cost

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stubs have another signature
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation; torch refuses most that write to elements that share memory."""
        try:
            with no_dispatch():
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            raise RuntimeError(f"{func} on a divided gradient: {ADVICE}") from error
