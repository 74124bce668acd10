"""Parsers of the command line's values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence

from pycomm import parse_compression
from pycomm.bench.cases import GIB, KIB, MIB

MOST_SECONDS = 1e6
UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}
COMPRESSIONS = ("none", "bf16", "fp16", "int8", "topk:0.01")


def size(text: str) -> int:
    """Parses a number with nccl-tests' suffixes: ``8``, ``64K``, ``1M``, ``2G``."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a number such as 8, 64K or 1M, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def sizes(text: str) -> tuple[int, ...]:
    """Parses comma-separated numbers; see :func:`size`."""
    return tuple(map(size, text.split(",")))


def whole(least: int) -> Callable[[str], int]:
    """Makes a parser of whole numbers that are at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least} on, got {text!r}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """Parses a time to wait, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected seconds above 0 and at most {MOST_SECONDS:g}, got {text!r}"
        )
    return value


def picture(text: str) -> str:
    """Parses the name of a PNG file."""
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, got {text!r}")
    return text


def some_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Makes a parser of a comma-separated list of choices, or ``all``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(choices) if text == "all" else tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(choices)}, got {name!r}"
                )
        return names

    return parse


def compressions(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of names for pycomm.parse_compression, or ``all``."""
    names = COMPRESSIONS if text == "all" else tuple(text.split(","))
    for name in names:
        try:
            parse_compression(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names
