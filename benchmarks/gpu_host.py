"""What calls on a GPU cost the host: ``python -m benchmarks.gpu_host``.

Calls of one process, of ranks with shared and with separate launches, and CuPy's, if installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

import pycomm
from pycomm.bench.optimizers import SCHEMES, OptimizerBenchSettings, our_step

CALLS = 200
COUNT = 256  # fp32 elements: 1 KiB


def host_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of a call on the host, while the device runs what is enqueued."""
    for _ in range(3):
        call()
    torch.cuda.current_stream().synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - began
    torch.cuda.current_stream().synchronize()
    return 1e6 * taken / calls


def all_reduces(group: pycomm.Group) -> float:
    """The host's time of an eager all-reduce of 1 KiB."""
    x = torch.ones(COUNT, device="cuda")
    return host_us(lambda: pycomm.all_reduce(x, "avg", group=group))


def of_cupy(group: pycomm.Group) -> float:
    """The same, of an array of CuPy."""
    cupy: Any = importlib.import_module("cupy")
    x = cupy.ones(COUNT, dtype=cupy.float32)
    return host_us(lambda: pycomm.all_reduce(x, "avg", group=group))


def main() -> None:
    """Prints a line for each case as soon as it is known."""

    def tell(what: str, found: str) -> None:
        print(f"{what:50} {found}", flush=True)

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    ranks = min(4, processors)
    with pycomm.LocalWorld(1) as world:
        group = world.groups[0]
        tell("all_reduce of 1 KiB, one process", f"{all_reduces(group):8.1f} us")
        if importlib.util.find_spec("cupy") is None:
            tell("all_reduce of 1 KiB, CuPy", "absent: cupy is not installed")
        else:
            tell("all_reduce of 1 KiB, CuPy", f"{of_cupy(group):8.1f} us")
    for separate in (False, True):
        with pycomm.LocalWorld(ranks, separate_launches=separate) as world:
            slowest = max(world.run(all_reduces))
        how = "separate launches" if separate else "a shared launch"
        tell(f"all_reduce of 1 KiB, {ranks} threads, {how}", f"{slowest:8.1f} us")
    settings = OptimizerBenchSettings(name="adamw", small=True, device="cuda")
    step = our_step(settings, SCHEMES["fp32"], full=False)
    tell("AdamW step of 500 tensors", f"{host_us(step, 20):8.1f} us")


if __name__ == "__main__":
    main()
