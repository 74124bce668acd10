"""The supported dtypes and reductions, and the numbers that stand for them in C++."""

from __future__ import annotations

import torch

from pycomm import _C

DTYPES: dict[torch.dtype, int] = {
    torch.float64: _C.float64,
    torch.float32: _C.float32,
    torch.float16: _C.float16,
    torch.bfloat16: _C.bfloat16,
    torch.int64: _C.int64,
    torch.int32: _C.int32,
    torch.uint8: _C.uint8,
}

OPS: dict[str, int] = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}
ALGORITHMS: dict[str, int] = {"auto": 0, "one_shot": 1, "two_shot": 2, "ring": 3, "tree": 4}
COLLECTIVES: dict[str, int] = {
    "all_reduce": 0,
    "reduce_scatter": 1,
    "all_gather": 2,
    "broadcast": 3,
    "barrier": 4,
}


def check_dtype(argument: str, dtype: torch.dtype) -> int:
    """The number of a supported dtype; ValueError for another."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"{argument} must have one of the dtypes {allowed}, got {dtype}")
    return DTYPES[dtype]


def check_choice(argument: str, value: str, choices: dict[str, int]) -> int:
    """The number of a choice; ValueError for anything else."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]
