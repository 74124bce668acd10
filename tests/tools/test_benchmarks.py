"""The benchmarks of ``make bench``: that they run, and that a wrong result fails them."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pycomm
from benchmarks.ranks import Ranks
from pycomm.bench.measure import Prepared

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_runs(tmp_path):
    """With the options of the Makefile, which pytest-benchmark must know."""
    (options,) = re.findall(r"-m pytest -q benchmarks (.*?) \$\(BENCH\)", makefile(), re.DOTALL)
    storage = f"--benchmark-storage={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "benchmarks", *options.replace("\\\n", "").split(),
         storage, "--benchmark-disable", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed, skipped = map(int, re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups())
    assert passed > 100
    assert "torch finds no CUDA device" in done.stdout
    assert skipped == passed  # of each on a GPU


def makefile():
    return (ROOT / "Makefile").read_text()


class Disabled:
    """pytest-benchmark's fixture where nothing is timed."""

    enabled = False

    def pedantic(self, target, setup, rounds):
        assert rounds == 1
        setup()
        target()


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_result_fails(wrong):
    """On a rank that nobody follows."""
    calls, tensor = [], torch.zeros(4)

    def make(group, value):
        assert group.size == 1
        return Prepared(tensor, tensor, lambda: calls.append(tensor.tolist()), value), wrong

    fails = pytest.raises(AssertionError) if wrong else contextlib.nullcontext()
    with pycomm.LocalWorld(1) as world, fails:
        Ranks(world.groups[0], []).time(Disabled(), make, torch.ones(4))
    assert calls == [[1.0] * 4]  # on new input
