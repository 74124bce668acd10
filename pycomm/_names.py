"""Compressions as text, for command lines and operators."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from pycomm.compression import VALUES, Cast, Compression, Identity, Int8, TopK

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES: dict[str, Callable[..., Compression]] = {
    "none": Identity,
    "bf16": Cast,
    "fp16": functools.partial(Cast, torch.float16),
    "int8": Int8,
    "topk": TopK,
}
_FIRST_OPTION = {"int8": "block", "topk": "density"}
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "block": int,
    "rounding": str,
    "seed": int,
    "density": float,
    "k": int,
    "values": {str(dtype).removeprefix("torch."): dtype for dtype in VALUES}.__getitem__,
    "density_steps": int,
    "momentum": float,
}


def parse_compression(text: str) -> Compression:
    """Makes a compression from its name, for command lines and ``torch.ops.pycomm``.

    Args:
        text: ``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"topk"``, followed by options:
            ``"topk:0.01"``, ``"topk:k=1000:values=bfloat16"``, ``"int8:512:rounding=stochastic"``.

    Raises:
        ValueError: the name or an option is unknown, or a value is not allowed.
    """
    name, *items = text.split(":")
    try:
        pairs = [item if "=" in item else f"{_FIRST_OPTION[name]}={item}" for item in items]
        options = [
            (key, _OPTIONS[key](value)) for key, _, value in (p.partition("=") for p in pairs)
        ]
        make = _NAMES[name]
    except (KeyError, ValueError) as error:
        raise ValueError(_HOW_TO_NAME + repr(text)) from error
    if len(dict(options)) < len(options):
        raise ValueError(f"compression must name each option once, got {text!r}")
    try:
        return make(**dict(options))
    except TypeError as error:  # an option of another compression
        raise ValueError(_HOW_TO_NAME + repr(text)) from error


_HOW_TO_NAME = (
    "compression must be none, bf16, fp16, int8[:BLOCK] or topk:DENSITY, or these with options "
    "such as topk:k=1000:values=bfloat16, got "
)
