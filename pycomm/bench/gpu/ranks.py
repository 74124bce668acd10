"""All-reduces among ranks that share one GPU ("HBM loopback"), which does not measure links.

Ranks that are threads of this process share one launch. Ranks that are processes take turns on the
GPU, pycomm's and others' alike, so their times only compare with each other.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import pycomm
from pycomm._runtime.torch_private import symmetric_handle, symmetric_tensor
from pycomm.bench import floor
from pycomm.bench.cases import KIB, MIB
from pycomm.bench.gpu.cases import RANKS, Call, Case

SIZE = 256 * MIB
SMALL = KIB
SMALL_REPEATS = 100
PROCESS_SIZES = (KIB, 64 * MIB)
PROCESS_CALLS = 15
PROCESS_LIMIT_S = 20.0


class Loopback:
    """Averages a tensor per rank, in place; equal tensors do not change."""

    def __init__(
        self,
        world: pycomm.LocalWorld,
        count: int,
        device: str,
        compression: pycomm.Compression | None = None,
        repeats: int = 1,
    ) -> None:
        self.tensors = [torch.empty(count, device=device) for _ in world]
        self._world = world
        self._compression = compression
        self._repeats = repeats
        self._stream: torch.cuda.Stream | None = None
        self.call: Call = self.enqueue

    def enqueue(self) -> None:
        """Enqueues the all-reduces from a thread per rank; on CUDA all on one stream."""
        self._world.run(self._on_rank)

    def capture(self) -> Loopback:
        """Makes the call the replay of a graph."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.fill()
        self.enqueue()  # connects, which a capture cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
            self.enqueue()
        self.call = graph.replay
        return self

    def fill(self) -> None:
        """Fills every rank's tensor with random numbers."""
        for rank, tensor in enumerate(self.tensors):
            torch.manual_seed(rank)
            tensor.normal_()

    def wrong(self) -> int:
        """The number of elements that are not the mean, to the bit or within the codec's bound."""
        self.fill()
        mean, off = torch.zeros_like(self.tensors[0]), 0.0
        for tensor in self.tensors:  # in rank order
            mean += tensor
            off = max(off, float(tensor.abs().max()))
        mean /= len(self.tensors)
        off = 0.0 if self._compression is None else 2 * off / 254 * (1 + 1e-5)
        self.call()
        first = self.tensors[0]
        wrong = sum(int((tensor != first).sum()) for tensor in self.tensors[1:])
        return wrong + int((~((first - mean).abs() <= off)).sum())

    def _on_rank(self, group: pycomm.Group) -> None:
        tensor = self.tensors[group.rank]
        with torch.cuda.stream(self._stream):
            for _ in range(self._repeats):
                if self._compression is None:
                    pycomm.all_reduce(tensor, "avg", group=group)
                else:
                    pycomm.compressed_all_reduce(tensor, self._compression, op="avg", group=group)


def moved_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that two-shot moves without staging: it reads and writes every tensor once."""
    return floor.BYTES_MOVED_PER_BYTE * nbytes * ranks


@contextmanager
def large_cases(device: str, nbytes: int = SIZE) -> Iterator[list[Case]]:
    """Uncompressed and with int8, which reads and writes the same tensors; slots lie in the L2."""
    with pycomm.LocalWorld(RANKS) as world:
        plain = Loopback(world, nbytes // 4, device).capture()
        coded = Loopback(world, nbytes // 4, device, pycomm.Int8()).capture()
        both = RANKS * nbytes, moved_bytes(nbytes, RANKS)
        yield [
            Case("all_reduce_loopback", *both, plain.call, wrong=plain.wrong,
                 peer_name="torch, add and copy", peer=by_torch(plain.tensors)),
            Case("int8_all_reduce_loopback", *both, coded.call, wrong=coded.wrong,
                 base="all_reduce_loopback"),
        ]  # fmt: skip


def by_torch(tensors: list[torch.Tensor]) -> Call:
    """The same mean with torch's operators."""
    total = torch.empty_like(tensors[0])

    def call() -> None:
        torch.add(tensors[0], tensors[1], out=total)
        for tensor in tensors[2:]:
            total.add_(tensor)
        total.div_(len(tensors))
        for tensor in tensors:
            tensor.copy_(total)

    return call


@contextmanager
def small_cases(device: str) -> Iterator[list[Case]]:
    """A graph of many all-reduces, and many replays of a graph of one."""
    with pycomm.LocalWorld(RANKS) as world:
        many = Loopback(world, SMALL // 4, device, repeats=SMALL_REPEATS).capture()
        one = Loopback(world, SMALL // 4, device).capture()

        def replays() -> None:
            for _ in range(SMALL_REPEATS):
                one.call()

        both = RANKS * SMALL, moved_bytes(SMALL, RANKS)
        yield [
            Case("all_reduce_1KiB", *both, many.call, SMALL_REPEATS, wrong=many.wrong),
            Case("all_reduce_1KiB_replay", *both, replays, SMALL_REPEATS, wrong=one.wrong),
        ]  # fmt: skip


def in_processes() -> dict[str, Any]:
    """Median microseconds of all-reduces among processes, or the error, by contestant.

    torch's kernels wait for each other without a deadline: each contestant has processes of its
    own, and they are killed when its time is up.
    """
    return {name: _in_processes(name) for name in CONTESTANTS}


def _in_processes(name: str) -> dict[str, float] | str:
    with tempfile.TemporaryDirectory(prefix="pycomm-gpu-") as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _process, (RANKS, name, folder), nprocs=RANKS, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + PROCESS_LIMIT_S
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0.01)):
                if time.monotonic() > deadline:
                    return f"did not end within {PROCESS_LIMIT_S:g} s"
        except Exception as error:
            return str(error).strip().splitlines()[-1]
        finally:
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()
        found: dict[str, float] = json.loads(Path(folder, "times").read_text())
        return found


def _process(rank: int, ranks: int, name: str, folder: str) -> None:
    make = CONTESTANTS[name]
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    with pycomm.init(timeout=PROCESS_LIMIT_S):
        times = {str(nbytes): _median_us(make(nbytes // 4)) for nbytes in PROCESS_SIZES}
        if rank == 0:
            Path(folder, "times").write_text(json.dumps(times))
        dist.barrier()
    dist.destroy_process_group()


def _median_us(call: Call) -> float:
    samples = []
    for _ in range(PROCESS_CALLS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return round(statistics.median(samples[2:]), 1)


def _pycomm(count: int) -> Call:
    tensor = torch.zeros(count, device="cuda")
    return lambda: pycomm.all_reduce(tensor)


def _symmetric_memory(operator: str) -> Callable[[int], Call]:
    def make(count: int) -> Call:
        memory = symmetric_tensor(4 * count, torch.device("cuda", torch.cuda.current_device()))
        tensor = memory.view(torch.float32).zero_()
        group = dist.group.WORLD
        assert group is not None
        symmetric_handle(tensor, group)
        reduce = getattr(torch.ops.symm_mem, operator)
        return lambda: reduce(tensor, "sum", group.group_name)

    return make


CONTESTANTS: dict[str, Callable[[int], Call]] = {
    "pycomm": _pycomm,
    "symmetric memory, one-shot": _symmetric_memory("one_shot_all_reduce"),
    "symmetric memory, two-shot": _symmetric_memory("two_shot_all_reduce_"),
}
