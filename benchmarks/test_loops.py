"""The element loops through the public API, beside torch's own addition in the same run.

Two ranks in one process reduce 64 KiB and 4 MiB in every dtype and by every reduction. Compare the
rows within a group of the report; nothing here asserts a speed.

    pytest benchmarks/test_loops.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pycomm

SIZES = {"64KiB": 64 << 10, "4MiB": 4 << 20}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
OPS = ("sum", "avg", "min", "max", "prod")

sized = pytest.mark.parametrize("size", SIZES)
typed = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def world() -> Iterator[pycomm.LocalWorld]:
    with pycomm.LocalWorld(2) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Torch's additions on one core, as each of our ranks has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def zeros(size: str, dtype: str) -> torch.Tensor:
    """A fixed point of every reduction, so that repeating it changes nothing."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.zeros(SIZES[size] // kind.itemsize, dtype=kind)


@sized
@typed
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(
    benchmark: Any, world: pycomm.LocalWorld, size: str, dtype: str, op: str
) -> None:
    benchmark.group = f"{size} {dtype}"
    first, second = world.groups
    mine, other = zeros(size, dtype), zeros(size, dtype)

    def both_ranks() -> None:
        work = pycomm.all_reduce(other, op, group=second, async_op=True)
        pycomm.all_reduce(mine, op, group=first)
        work.wait()

    benchmark(both_ranks)
    assert not mine.any()


@sized
@typed
def test_torch_add(benchmark: Any, size: str, dtype: str) -> None:
    benchmark.group = f"{size} {dtype}"
    left, right = zeros(size, dtype), zeros(size, dtype)
    benchmark(left.add_, right)
