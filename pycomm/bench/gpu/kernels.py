"""Eight kinds of kernels, each launched once between a profiler's start and stop; for ncu.

``python -m pycomm.bench.gpu.kernels [FILE]``. With the results of ``python -m pycomm.bench gpu``,
only the five whose rows there have the least shares. See benchmarks/gpu.sh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

import pycomm
from pycomm.bench.gpu.cases import TOPK
from pycomm.bench.gpu.ranks import Loopback
from pycomm.bench.optimizers import SCHEMES, OptimizerBenchSettings, our_step
from pycomm.bench.report import KIB, MIB

COUNT = 64 * MIB  # elements
SHARED = 16 * MIB  # elements per rank


def calls(device: str, stack: ExitStack, count: int = COUNT) -> dict[str, Callable[[], object]]:
    """What to profile, by the names of rows."""
    settings = OptimizerBenchSettings(name="adamw", count=count, full=True, device=device)
    world = stack.enter_context(pycomm.LocalWorld(4))
    shared = min(count, SHARED)
    x = torch.randn(count, device=device)
    wire, total = pycomm.Int8().encode(x), torch.zeros_like(x)
    return {
        "adamw_fp32": our_step(settings, SCHEMES["fp32"], full=False),
        "adamw_8bit_states_full": our_step(settings, SCHEMES["bf16_remainder_8bit"], full=True),
        "int8_encode": lambda: pycomm.Int8().encode(x, wire),
        "int8_decode_add": lambda: pycomm.Int8().decode(wire, count, total, add=True),
        "topk_select": lambda: TOPK.select(x),
        "all_reduce_1KiB": Loopback(world, KIB // 4, device).call,
        "all_reduce_loopback": Loopback(world, shared, device).call,
        "int8_all_reduce_loopback": Loopback(world, shared, device, pycomm.Int8()).call,
    }


def worst(results: str, names: list[str], count: int = 5) -> list[str]:
    """The names with the least shares in a file; all of them if there is no file."""
    if not Path(results).is_file():
        return names
    rows = json.loads(Path(results).read_text())["rows"]
    shares = {row["name"]: row["share"] for row in rows}
    return sorted(names, key=lambda name: shares.get(name, 0.0))[:count]


def main() -> None:
    """Runs everything twice; the profiler sees the second time."""
    with ExitStack() as stack:
        every = calls("cuda", stack)
        made = {name: every[name] for name in worst("".join(sys.argv[1:2]), list(every))}
        for call in made.values():
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        for name, call in made.items():
            print(name, flush=True)
            call()
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
