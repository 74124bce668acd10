"""Threads, and what to say if there are none left."""

from __future__ import annotations

import threading

from pycomm import _C

_NO_THREAD = "Resource temporarily unavailable"  # in errors of C++ threads, as Gloo's


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread; RuntimeError names the limits if there is none left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {_C.thread_limits()}") from error


def with_limits(error: Exception) -> Exception:
    """An error of torch's; it names the limits if it says that there is no thread left."""
    if _NO_THREAD not in str(error):
        return error
    return RuntimeError(f"no thread can be started ({error}): {_C.thread_limits()}")
