"""Runs pytest in an emulated Python whose child processes are emulated, too.

``EMULATED_PYTHON`` is the command that starts it.
"""

import multiprocessing
import os
import sys

import pytest

sys.executable = os.environ["EMULATED_PYTHON"]
multiprocessing.set_executable(sys.executable)

if __name__ == "__main__":
    raise SystemExit(pytest.main(sys.argv[1:]))
