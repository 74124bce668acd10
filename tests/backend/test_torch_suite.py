"""torch's own tests of its backends pass on pycomm, on 2, 3 and 4 ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_suite

# By number of ranks, the number of tests that run in torch 2.13; Gloo passes as many.
COUNTS = {2: 89, 3: 89, 4: 92}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all(ranks):
    done = subprocess.run(
        [sys.executable, torch_suite.__file__, str(ranks)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNTS[ranks]} ok" in done.stdout.splitlines()[-1], done.stdout
