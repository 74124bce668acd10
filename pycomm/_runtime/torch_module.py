"""Functions of the C++ module that is compiled for one version of torch (see ``c10d_build``).

Each is None if pycomm was installed for another torch than the one that runs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pycomm._runtime.c10d_build import module_name


def _installed() -> Any:
    try:
        return importlib.import_module(f"pycomm.{module_name(torch.__version__)}")
    except ImportError:  # pycomm was installed for another torch
        return None


_module = _installed()
# Reads tensors for the short way of collectives.
tensor_reader: Any = getattr(_module, "tensor_reader", None)
# take_memory(taker, giver): the taker, and all tensors that share its memory, get the giver's.
take_memory: Any = getattr(_module, "take_memory", None)
