"""The supported dtypes, reductions and algorithms, as C++ knows them."""

from __future__ import annotations

import functools

import torch

from pycomm import _C

# The dtypes of tensors. Which reductions a dtype has is up to csrc/core/elements.h.
ELEMENTS = tuple(getattr(torch, name) for name in _C.elements if hasattr(torch, name))
# From names to numbers of the enums in csrc/. The dtypes with arithmetic of their own:
DTYPES = {getattr(torch, name): number for name, number in _C.dtypes.items()}
OPS = _C.reduce_ops
ALGORITHMS = _C.algorithms
CODED_ALGORITHMS = {name: ALGORITHMS[name] for name in ("auto", *_C.coded_algorithms)}
# The algorithms that add in rank order and round once.
FIXED_ORDER = [name for name in ALGORITHMS if name not in _C.partial_sum_algorithms]
CODECS = _C.codecs


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that no collective accepts."""
    if dtype not in ELEMENTS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in ELEMENTS)
        raise ValueError(f"{argument} must have one of the dtypes {allowed}, got {dtype}")


def check_choice(argument: str, value: str, choices: dict[str, int]) -> int:
    """The number of a choice; ValueError for anything else."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]


@functools.cache
def operation_of(
    collective: str, algorithm: str, dtype: torch.dtype, op: str = "sum", root: int = 0
) -> _C.Operation:
    """An operation of any size; ValueError if the dtype or its reduction is not supported."""
    check_dtype("dtype", dtype)
    name = str(dtype).removeprefix("torch.")
    return _C.Operation(collective=collective, algorithm=algorithm, dtype=name, op=op, root=root)
