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


@pytest.mark.slow
def test_what_developers_compare() -> None:
    """Some of each kind, once."""
    some = "cuda and (all_reduce or training or int8-encode or fp32-adamw)"
    said = said_by("-m", "pytest", "-q", "benchmarks", "--benchmark-disable", "-k", some)
    assert " passed" in said


def test_the_command_line() -> None:
    """All algorithms and compressions as on the CPU, beside NCCL where every rank has a GPU."""
    what = "all_reduce --device cuda -a all --compression none,int8,topk:0.05 --peer nccl"
    how = "-b 1K -e 1K -n 1 -w 0"
    said = said_by("-m", "pycomm.bench", *what.split(), *how.split())
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
    ours = [row for row in rows if row[4] == "pycomm"]
    algorithms = {"auto:one_shot", "one_shot", "two_shot", "ring", "tree", "auto:two_shot"}
    assert {row[5] for row in ours} == algorithms
    assert {row[7] for row in ours} == {"none", "int8", "topk:0.05"}
    assert "no nccl: needs" in said or any(row[4] == "nccl" for row in rows)


@pytest.mark.slow
def test_steps_and_optimizers() -> None:
    """Without ranks, and with two of them."""
    rules = ["--name", "all", "--scheme", "fp16_master,bf16_remainder"]
    small = ["--device", "cuda", "-n", "1", "-w", "0"]
    said = said_by("-m", "pycomm.bench", "optimizer", *small, "-b", "4K", "-e", "4K", *rules)
    assert said.count("fp16_master") == said.count("bf16_remainder") == 5
    said = said_by("-m", "pycomm.bench", "step", *small, "-p", "1M", "--batch", "1")
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line[:1] == " "}
    assert {"ddp", "wrapper"} <= rows.keys()
    assert all(row[-5] == "0" for row in rows.values())


@pytest.mark.slow
def test_scaling() -> None:
    """On one rank and on two."""
    what = "scaling --device cuda --ranks 1,2 -p 1M --batch 1 -n 1 -w 0"
    said = said_by("-m", "pycomm.bench", *what.split())
    rows = [line.split() for line in said.splitlines() if line[:1] == " "]
    ways = {(row[0], row[1]) for row in rows}
    assert ways >= {(n, name) for n in ("1", "2") for name in ("none", "ddp", "wrapper")}
    assert all(row[-5] == "0" for row in rows)
