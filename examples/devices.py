"""The option ``--device`` of the short programs: where a rank's tensors lie."""

from __future__ import annotations

import argparse

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")


def device_of(name: str, rank: int) -> torch.device:
    """A rank's device, which becomes its current one; ranks take the GPUs in turn."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU that torch can use; there is none here")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
