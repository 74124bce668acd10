"""The short programs for newcomers, on GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["spawn_ddp.py", "--epochs", "1"], "epoch 1: loss 1.1"),  # 1.1300 on the CPU
        (["split_model.py", "--steps", "5"], "    5  3.2728  3.2728"),  # as on the CPU
        (["primitives.py"], "pycomm gave the same"),
    ],
)
def test_on_a_gpu(command, words):
    name, *options = command
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options, "--device", "cuda"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
