"""The tensor in ``p.grad`` if a rank has only its part of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm._runtime.torch_private import no_dispatch, no_torch_function, pytree, schema_of

ADVICE = (
    "this rank has only a part of it: call reduce_gradients() of the wrapper before changing "
    "gradients; to clip them, give max_norm to the optimizer; to scale the loss, use "
    "pycomm.optim.GradScaler"
)


class DividedGradient(torch.Tensor):
    """A tensor whose elements share memory, so that it can only be zeroed as a whole.

    Other writes raise an error that says why. Views of it are such tensors, too; results of other
    operations are plain tensors.

    Attributes:
        whole: the number of elements of the gradient, also in a view of some of them.
    """

    __torch_function__ = no_torch_function  # its attributes cost what a plain tensor's cost
    whole: int

    @classmethod
    def of(cls, values: torch.Tensor, whole: int) -> DividedGradient:
        """Elements of a gradient that has so many."""
        made = values.as_subclass(cls)
        made.whole = whole
        return made

    def __repr__(self) -> str:  # type: ignore[override] # torch's stubs have another signature
        return repr(self.clone())

    def tolist(self) -> Any:
        """See :meth:`torch.Tensor.tolist`."""
        return self.clone().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stubs have another signature
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, unless it writes to some elements, or writes other values than 0."""
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            if not (_zeroes(func, args) and tensor.numel() == tensor.whole):
                raise RuntimeError(f"{func} on a divided gradient: {ADVICE}")
        with no_dispatch():
            made = func(*args, **kwargs)
            if not func.is_view:
                return made
            return pytree.tree_map(lambda view: cls.of(view, args[0].whole), made)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DividedGradient]:
    """The divided gradients that an operation writes to."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    values = [named[a.name] for a in schema.arguments if a.is_write and a.name in named]
    return [one for one in pytree.tree_leaves(values) if isinstance(one, DividedGradient)]


def _zeroes(func: Any, args: Sequence[Any]) -> bool:
    """True for an operation that sets all elements to 0."""
    name = schema_of(func).name
    return name in ("aten::zero_", "aten::_foreach_zero_") or (
        name == "aten::fill_" and not args[1]
    )
