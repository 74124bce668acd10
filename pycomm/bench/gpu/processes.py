"""All-reduces among processes, beside torch's symmetric memory and NCCL.

``python -m pycomm.bench.gpu.processes --json FILE``. Each process has a GPU of its own if there are
several. On a single one they take turns, all contestants alike, so their times only compare with
each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import pycomm
from pycomm._runtime.cuda import SYMMETRIC_MEMORY
from pycomm._runtime.torch_private import environment, symmetric_handle, symmetric_tensor
from pycomm.bench import report
from pycomm.bench.contestants import bus_factor
from pycomm.bench.gpu.cases import RANKS, Call
from pycomm.bench.gpu.machine import gpu, missing, nvidia_smi
from pycomm.bench.report import KIB, MIB

SIZES = (KIB, 64 * KIB, MIB, 64 * MIB)
CALLS = 15
WARM_UP = 2
LIMIT_S = 15.0


def ranks_for(gpus: int) -> int:
    """The number of processes on a machine with this number of GPUs."""
    return min(gpus, 8) if gpus > 1 else RANKS


def peer_access(gpus: int) -> list[list[bool]]:
    """For every GPU, whether it has access to the memory of every GPU."""
    return [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(gpus)]
        for i in range(gpus)
    ]


def nvlink_counters() -> list[str]:
    """The bytes that every GPU has sent and received over its links so far."""
    return nvidia_smi("nvlink", "--getthroughput", "d").splitlines()


def measure(name: str, ranks: int, sizes: tuple[int, ...] = SIZES) -> dict[int, float] | str:
    """Median microseconds by bytes, or the error.

    Kernels of other libraries wait for each other without a deadline: each contestant has processes
    of its own, and they are killed when its time is up.
    """
    with tempfile.TemporaryDirectory(prefix="pycomm-gpu-") as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _process, (ranks, name, sizes, folder), nprocs=ranks, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + LIMIT_S
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0.01)):
                if time.monotonic() > deadline:
                    return f"did not end within {LIMIT_S:g} s"
        except Exception as error:
            return str(error).strip().splitlines()[-1]
        finally:
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()
        found = json.loads(Path(folder, "times").read_text())
        return {int(nbytes): time_us for nbytes, time_us in found.items()}


def _process(rank: int, ranks: int, name: str, sizes: tuple[int, ...], folder: str) -> None:
    make = (CONTESTANTS | ALGORITHMS)[name]
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if name == NCCL else "gloo",
        init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
    )  # fmt: skip
    with pycomm.init(timeout=LIMIT_S):
        times = {nbytes: _median_us(make(nbytes // 4)) for nbytes in sizes}
        if rank == 0:
            Path(folder, "times").write_text(json.dumps(times))
        pycomm.barrier()
    dist.destroy_process_group()


def _median_us(call: Call) -> float:
    samples = []
    for _ in range(WARM_UP + CALLS):
        torch.cuda.synchronize()
        pycomm.barrier()
        began = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return round(statistics.median(samples[WARM_UP:]), 1)


def _pycomm(algorithm: str) -> Callable[[int], Call]:
    def make(count: int) -> Call:
        tensor = torch.zeros(count, device="cuda")
        return lambda: pycomm.all_reduce(tensor, algorithm=algorithm)

    return make


def _nccl(count: int) -> Call:
    tensor = torch.zeros(count, device="cuda")
    return lambda: dist.all_reduce(tensor)


def _symmetric_memory(operator: str) -> Callable[[int], Call]:
    def make(count: int) -> Call:
        group = dist.group.WORLD
        assert group is not None
        with environment(SYMMETRIC_MEMORY):
            memory = symmetric_tensor(4 * count, torch.device("cuda", torch.cuda.current_device()))
            tensor = memory.view(torch.float32).zero_()
            symmetric_handle(tensor, group)
        reduce = getattr(torch.ops.symm_mem, operator)
        return lambda: reduce(tensor, "sum", group.group_name)

    return make


NCCL = "NCCL"
CONTESTANTS: dict[str, Callable[[int], Call]] = {
    "pycomm": _pycomm("auto"),
    NCCL: _nccl,
    "symmetric memory, one-shot": _symmetric_memory("one_shot_all_reduce"),
    "symmetric memory, two-shot": _symmetric_memory("two_shot_all_reduce_"),
}


# What pycomm.bench.gpu.sweep compares.
ALGORITHMS = {name: _pycomm(name) for name in ("one_shot", "two_shot")}


def rows(name: str, ranks: int, times: dict[int, float]) -> list[dict[str, Any]]:
    """A contestant's rows for the file."""
    factor = bus_factor("all_reduce", ranks)
    return [
        {
            "impl": name,
            "ranks": ranks,
            "bytes": nbytes,
            "time_us": time_us,
            "busbw_GBps": round(factor * nbytes / time_us / 1e3, 2),
        }
        for nbytes, time_us in times.items()
    ]


def run(path: str | None) -> bool:
    """Measures all contestants; True if none has failed."""
    gpus = torch.cuda.device_count()
    ranks = ranks_for(gpus)
    meta = report.circumstances("python -m pycomm.bench.gpu.processes") | {
        "gpu": gpu(),
        "gpus": gpus,
        "peer_access": peer_access(gpus),
        "links": nvidia_smi("topo", "-m"),
        "nvlink": {"before": nvlink_counters()},
        "failed": {},
    }
    print(f"# {ranks} processes on {gpus} x {meta['gpu']['name']}\n{meta['links']}")
    measured: list[dict[str, Any]] = []
    for name in CONTESTANTS:
        if name == NCCL and ranks > gpus:
            continue  # it refuses ranks that share a GPU
        found = measure(name, ranks)
        if isinstance(found, str):
            meta["failed"][name] = found
            print(f"{name:28} FAILED: {found}", flush=True)
        else:
            measured += rows(name, ranks, found)
            for row in measured[-len(found) :]:
                print(
                    "{impl:28} {bytes:12} {time_us:10.1f} us {busbw_GBps:10.2f} GB/s".format(**row)
                )
        meta["nvlink"][name] = nvlink_counters()
        if path is not None:
            report.write_json(path, meta, measured)
    return not meta["failed"]


def main(argv: list[str] | None = None) -> int:
    """Measures, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.gpu.processes")
    parser.add_argument("--json", metavar="FILE", help="write results")
    options = parser.parse_args(argv)
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    return 0 if run(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
