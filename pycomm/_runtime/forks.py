"""What forked children have of this process's tensors in windows.

Such tensors lie in shared memory, which a fork does not copy. C++ makes them private to every child
(csrc/cpu/fork.h). This module asks for a copy before each fork of Python's, so that the child has
their values at the fork, as of other tensors: a child that writes a checkpoint must not see later
steps.
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType

from pycomm import _C

# Functions that fork for children without use for a model, or for a program to execute. All callers
# of a fork count, not only the last one.
_CALLERS_WITHOUT_COPY = {
    ("torch.utils.data.dataloader", "__init__"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "__init__"),
    ("subprocess", "_execute_child"),
}


def _prepare() -> None:
    if not _child_needs_no_copy() and not _C.copy_at_fork():
        logging.getLogger("pycomm.memory").warning(
            "no memory to copy the tensors in windows for a forked process, which may therefore "
            "see what is written to them later"
        )


def _child_needs_no_copy() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _CALLERS_WITHOUT_COPY:
            return True
        frame = frame.f_back
    return False


os.register_at_fork(before=_prepare)
