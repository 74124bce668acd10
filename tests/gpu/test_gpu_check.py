"""``python -m pycomm.check`` on devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.check import cli, items

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize("one", [True, False], ids=["one device", "all devices"])
def test_all_items(tmp_path: Path, one: bool) -> None:
    """What needs NCCL, or a GPU per rank, says so; all else is fine."""
    if not one and torch.cuda.device_count() == 1:
        pytest.skip("there is one device")
    file = tmp_path / "found.json"
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if one else {})
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.check", "--json", file],
        env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [each for each in json.loads(file.read_text())["items"] if "CUDA" in each["place"]]
    assert len(found) > 40
    for each in found:
        hook = each["item"].startswith("hook")
        assert each["state"] == "ok" or (hook and "needs NCCL" in each["detail"]), each


def test_a_broken_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is within the bound, but has not the CPU's bits; and a wrong one."""
    compress, send = pycomm.compressed_all_reduce, pycomm.broadcast

    def compressed(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        compress(tensor, *args, **options)
        if tensor.is_cuda:
            tensor.mul_(1 + torch.finfo(torch.float32).eps)

    def broadcast(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        send(tensor, *args, **options)
        if tensor.is_cuda:
            tensor[-1] += 1

    monkeypatch.setattr(pycomm, "compressed_all_reduce", compressed)
    monkeypatch.setattr(pycomm, "broadcast", broadcast)

    def run(group: pycomm.Group, name: str) -> items.Outcome:
        torch.cuda.set_device(0)
        return items.outcome(items.operations(False)[name], name, group, "cuda")

    def verdict(name: str) -> tuple[str, str]:
        with pycomm.LocalWorld(2, timeout=60) as world:
            return cli._verdict(dict(enumerate(world.run(run, name))))

    state, detail = verdict("compressed int8")
    assert state == "FAILED"
    assert detail.startswith("rank 0: not as on the CPU: mean of 1003: element ")
    state, detail = verdict("broadcast")
    assert state == "FAILED"
    assert detail.startswith("rank 0: 1 float32: element 0 is ")
    assert verdict("all_gather") == ("ok", "")
