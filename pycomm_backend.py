"""Registers the backend "pycomm" of torch.distributed, which torch finds by an entry point.

A module of its own, because up to torch 2.13 every ``import torch`` imports it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist


def register() -> None:
    """Registers the backend, unless it is registered. Never raises: torch may call it."""
    try:
        if "pycomm" not in dist.Backend.backend_list:
            devices = ["cpu", "cuda"]
            dist.Backend.register_backend("pycomm", _create, extended_api=True, devices=devices)
    except Exception as error:
        warnings.warn(f"torch.distributed has no backend pycomm: {error!r}", stacklevel=2)


def _create(options: Any, given: object) -> Any:
    from pycomm.backend import create

    return create(options, given)
