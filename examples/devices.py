"""Options of the examples: where a rank's tensors lie, of which type they are, and counts."""

from __future__ import annotations

import argparse
import os

import torch

CPU = torch.device("cpu")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def count(text: str) -> int:
    """The value of an option that counts something: at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return value


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--device``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--dtype``, a key of `DTYPES`, for ``torch.set_default_dtype``."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")


def device_of(name: str, rank: int) -> torch.device:
    """A rank's device, which becomes its current one; a machine's ranks take its GPUs in turn."""
    if name == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU that torch can use; there is none here")
    rank = int(os.environ.get("LOCAL_RANK", rank))  # torchrun's
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
