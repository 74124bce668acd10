"""Codecs beside torch's operators for the same: on one core, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm
from pycomm.bench.codecs import make_tasks
from pycomm.bench.measure import synchronised
from pycomm.bench.report import KIB, MIB, human_bytes

OPERATIONS = {
    "int8": ("encode", "decode", "decode_add"),
    "bf16": ("encode", "decode"),
    "topk:0.01": ("select", "encode", "decode"),
}


@pytest.mark.parametrize("name", ["pycomm", "torch"])
@pytest.mark.parametrize(
    ("codec", "operation"), [(codec, name) for codec, names in OPERATIONS.items() for name in names]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nbytes", [64 * KIB, 4 * MIB], ids=human_bytes)
def test_codec(
    benchmark: Any,
    device: str,
    fit: Callable[[int], int],
    nbytes: int,
    dtype: str,
    codec: str,
    operation: str,
    name: str,
) -> None:
    benchmark.group = f"{codec} {operation}, {human_bytes(nbytes)}, {dtype}, {device}"
    kind: torch.dtype = getattr(torch, dtype)
    x = torch.randn(fit(nbytes) // kind.itemsize, device=device).to(kind)
    (task,) = (t for t in make_tasks(pycomm.parse_compression(codec), x) if t.name == operation)
    benchmark(synchronised(task.contestants[name], device))
    assert name == "torch" or task.count_wrong() == 0
