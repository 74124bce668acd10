"""The codecs through the public API, beside torch's own operators in the same run.

64 KiB stays in a core's own cache, 4 MiB does not. Compare the rows within a group of the report;
nothing here asserts a speed. What memory allows: ``python -m pycomm.bench codec``.

    pytest benchmarks/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pycomm
from pycomm.bench.codecs import CodecTask, make_tasks

SIZES = {"64KiB": 64 << 10, "4MiB": 4 << 20}
DTYPES = ("float32", "float16", "bfloat16")
OPERATIONS = {
    "int8": ("encode", "decode", "decode_add"),
    "bf16": ("encode", "decode"),
    "topk:0.01": ("select", "encode", "decode"),
}

sized = pytest.mark.parametrize("size", SIZES)
typed = pytest.mark.parametrize("dtype", DTYPES)
operating = pytest.mark.parametrize(
    ("codec", "operation"), [(codec, name) for codec, names in OPERATIONS.items() for name in names]
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Torch on one core, as our codecs are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def task(benchmark: Any, size: str, dtype: str, codec: str, operation: str) -> CodecTask:
    benchmark.group = f"{size} {dtype} {codec} {operation}"
    kind: torch.dtype = getattr(torch, dtype)
    x = torch.randn(SIZES[size] // kind.itemsize).to(kind)
    found = {task.name: task for task in make_tasks(pycomm.parse_compression(codec), x)}
    return found[operation]


@sized
@typed
@operating
def test_codec(benchmark: Any, task: CodecTask) -> None:
    benchmark(task.contestants["pycomm"])
    assert task.count_wrong() == 0


@sized
@typed
@operating
def test_torch(benchmark: Any, task: CodecTask) -> None:
    benchmark(task.contestants["torch"])
