"""The benchmarks, on GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def said_by(*arguments: str) -> str:
    """What a Python program writes."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_developers_compare() -> None:
    """Some of each kind, once."""
    some = "cuda and (all_reduce or training or int8-encode or fp32-adamw)"
    said = said_by("-m", "pytest", "-q", "benchmarks", "--benchmark-disable", "-k", some)
    assert " passed" in said
