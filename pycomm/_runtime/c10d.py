"""The C++ module of the torch.distributed backend, which fits one minor version of torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from typing import Any

import torch

from pycomm._runtime.c10d_build import module_name

_NAME = f"pycomm.{module_name(torch.__version__)}"
_loading = threading.Lock()


def _installed() -> Any:
    try:
        return importlib.import_module(_NAME)
    except ImportError:  # pycomm was installed for another torch
        return None


# Functions of the module; None if pycomm was installed for another torch than the one that runs.
_module = _installed()
# Reads tensors for the fast path of collectives.
tensor_reader: Any = getattr(_module, "tensor_reader", None)
# take_memory(taker, giver): the taker, and tensors that share its memory, get the giver's memory.
take_memory: Any = getattr(_module, "take_memory", None)


def load() -> Any:
    """The module for the torch that runs, compiled if pycomm was installed for another one.

    Raises:
        ImportError: the module must be compiled, and compiling fails.
    """
    with _loading:
        if importlib.util.find_spec(_NAME) is not None:  # installed, or loaded before
            return importlib.import_module(_NAME)
        from pycomm._runtime import c10d_cache

        spec = importlib.util.spec_from_file_location(_NAME, c10d_cache.compiled())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_NAME] = module
        return module
