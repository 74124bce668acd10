"""What forked children have of this process's tensors in windows.

Such tensors lie in shared memory, which a fork does not copy. C++ makes them private to every child
(csrc/cpu/fork.h). This module asks for a copy before each fork of Python's, so that the child has
their values at the fork, as of other tensors: a child that writes a checkpoint must not see later
steps. Workers of a DataLoader are forked often, and have no use for a model: they get no copy.
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType

from pycomm import _C

# Modules with iterators over worker processes, which they start in their __init__.
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def _prepare() -> None:
    if _starts_worker_of_loader():
        return
    if not _C.copy_at_fork():
        logging.getLogger("pycomm.memory").warning(
            "no memory to copy tensors in the window for a forked process: it sees later writes"
        )


def _starts_worker_of_loader() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") in _LOADERS:
            return True
        frame = frame.f_back
    return False


os.register_at_fork(before=_prepare)
