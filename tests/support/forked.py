"""Runs functions in forked children."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def in_child(body: Callable[[], object], meanwhile: Callable[[], object] = int) -> None:
    """Runs `meanwhile` after a fork, and then `body` in the child.

    An exception in the child fails the test, and a hang as well.
    """
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(done)
            os.read(ready, 1)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        meanwhile()
    finally:
        os.close(ready)
        os.close(done)
    end = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("the child hung")
    assert os.waitstatus_to_exitcode(ended[1]) == 0
