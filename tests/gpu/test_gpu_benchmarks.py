"""The benchmarks, on GPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.bench import cli, sharding, timeline, training

pytestmark = pytest.mark.gpu

PEER = "pycomm" if training.absent_peers("cuda", 2) else "nccl"  # of DDP without a hook
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


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    """All algorithms and compressions as on the CPU, beside NCCL where every rank has a GPU."""
    path = tmp_path / "results.json"
    what = "all_reduce --device cuda -a all --compression none,int8,topk:0.05 --peer nccl"
    how = f"-b 1K -e 1K -n 1 -w 0 -J {path}"
    said = said_by("-m", "pycomm.bench", *what.split(), *how.split())
    rows = json.loads(path.read_text())["rows"]
    ours = [row for row in rows if row["impl"] == "pycomm"]
    assert {row["algorithm"] for row in ours} == {"auto", "one_shot", "two_shot", "ring", "tree"}
    assert {row["compression"] for row in ours} == {"none", "int8", "topk:0.05"}
    assert all(row["wrong"] == 0 for row in ours)
    assert "no nccl: needs" in said or any(row["impl"] == "nccl" for row in rows)


@pytest.mark.slow
def test_optimizers() -> None:
    """Without ranks."""
    rules = ["--name", "all", "--scheme", "fp16_master,bf16_remainder"]
    small = ["--device", "cuda", "-n", "1", "-w", "0"]
    said = said_by("-m", "pycomm.bench", "optimizer", *small, "-b", "4K", "-e", "4K", *rules)
    assert said.count("fp16_master") == said.count("bf16_remainder") == 5


TINY = "-p 1M --batch 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ways"),
    [
        (f"step {TINY}", {"ddp", "wrapper", PEER}),
        (f"overlap {TINY}", {"ddp", "wrapper"}),
        (f"scaling --ranks 1,2 {TINY}", {"none", "ddp", "wrapper", "nccl", "pycomm"}),
        ("step --shard -p 1M --batch 1 --peer ddp,zero", {*sharding.MODES, "ddp", "zero"}),
        ("c10d --operation all_to_all_single,ping_pong,new_group", {"pycomm", "nothing", "nccl"}),
    ],
    ids=lambda value: value.split()[-1] if isinstance(value, str) else None,
)
def test_steps_among_ranks(what: str, ways: set[str], tmp_path: Path) -> None:
    """On two ranks, beside NCCL where each has a GPU, and else DDP on the backend pycomm."""
    path = tmp_path / "results.json"
    how = f"--device cuda -n 1 -w 0 -J {path}"
    said_by("-m", "pycomm.bench", *what.split(), *how.split())
    stored = json.loads(path.read_text())
    names = {row.get("name") or row.get("mode") or row["impl"] for row in stored["rows"]}
    absent = stored["meta"].get("absent_peers", {})
    assert {name.removesuffix(" clipped") for name in names} <= ways
    assert ways - names <= {"nccl", "pycomm"}
    assert not absent or absent == {"nccl": "needs torch with NCCL and a GPU per rank"}
    assert all(row.get("wrong", 0) == 0 for row in stored["rows"])
    assert all(row.get("device", "cuda") == "cuda" for row in stored["rows"])
    for row in stored["rows"] if what.startswith("overlap") else ():
        check_timeline(row)


def check_timeline(row: dict[str, Any]) -> None:
    """Each bucket is exchanged after its gradients were computed, in turn."""
    step, buckets = row["timeline"], row["timeline"]["buckets"]
    assert step["backward_ms"][0] <= min(step["gradients_ms"])
    assert sum(bucket["bytes"] for bucket in buckets) == row["bytes"]
    assert len(buckets) == row["buckets"]
    moments = [moment for each in buckets for moment in (each["begin_ms"], each["end_ms"])]
    assert moments == sorted(moments)
    assert all(each["ready_ms"] <= each["begin_ms"] for each in buckets)
    assert moments[-1] <= step["end_ms"]


def record_counted(group: pycomm.Group, waits: list[str]) -> tuple[list[list[str]], int]:
    """What steps have waited for, an ordinary one and those that are recorded; the gradients."""
    what = f"overlap --device cuda --mode wrapper {TINY}"
    trainee = training.make("wrapper", cli.parse(what.split()), group)
    assert trainee.state is not None
    link, step = training.EmulatedLink(trainee.state), trainee.step
    steps: list[list[str]] = []

    def counted() -> None:
        before = len(waits)
        step()
        steps.append(waits[before:])

    counted()
    trainee.step = counted  # type: ignore[method-assign]
    return steps, len(timeline.record(trainee, link.intervals, "cuda").gradients_ms)


def test_recording_a_step_makes_it_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for place, name in ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize")):
        real = getattr(place, name)

        def noted(*args: Any, real: Any = real, of: str = str(place)) -> Any:
            waits.append(of)
            return real(*args)

        monkeypatch.setattr(place, name, noted)
    with pycomm.LocalWorld(1) as world:
        ((steps, gradients),) = world.run(record_counted, waits)
    assert gradients == 4
    ordinary, *recorded = steps
    assert recorded == [ordinary] * timeline.STEPS
