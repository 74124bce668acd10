"""What the benchmarks share: devices, ranks, and sizes that are small where nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import ranks
from pycomm import collect_env
from pycomm.bench.gpu.machine import missing

SMOKE_BYTES = 16 << 10
NO_GPU = missing()
GPU = pytest.param("cuda", marks=pytest.mark.skipif(NO_GPU is not None, reason=NO_GPU or ""))


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Stored files name the software, and not the host."""
    del machine_info["node"]
    machine_info["versions"] = collect_env.versions()


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    """The device of the tensors."""
    return str(request.param)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[ranks.Ranks]:
    """This process and another one."""
    with ranks.start(2) as started:
        yield started


@pytest.fixture
def fit(benchmark: Any) -> Callable[[int], int]:
    """Makes a number of bytes small if nothing is timed."""
    return lambda nbytes: nbytes if benchmark.enabled else min(nbytes, SMOKE_BYTES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch on one core, as every rank has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
