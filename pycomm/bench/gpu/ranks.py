"""All-reduces among ranks that are threads and share one GPU.

They share one launch ("HBM loopback"), so they do not measure links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import pycomm
from pycomm.bench.gpu.cases import RANKS, TOPK, Call, KernelCase
from pycomm.bench.report import KIB, MIB

SIZE = 256 * MIB
SMALL = KIB
SMALL_REPEATS = 100


class Loopback:
    """Averages a tensor per rank, in place; equal tensors do not change, except by top-k."""

    def __init__(
        self,
        world: pycomm.LocalWorld,
        count: int,
        device: str,
        compression: pycomm.Compression | None = None,
        repeats: int = 1,
        algorithm: str = "auto",
    ) -> None:
        self.tensors = [torch.empty(count, device=device) for _ in world]
        self._world = world
        self._compression = compression
        self._repeats = repeats
        self._algorithm = algorithm
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.call: Call = self.enqueue

    def enqueue(self) -> None:
        """Enqueues the all-reduces from a thread per rank; on CUDA all on one stream."""
        self._world.run(self._on_rank)

    def capture(self) -> Loopback:
        """Captures a graph; from then on the call replays it."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.fill()
        self._stream.wait_stream(torch.cuda.current_stream())
        self.enqueue()  # connects the ranks, which is impossible in a capture
        torch.cuda.synchronize()
        graph = self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
            self.enqueue()
        self.call = self.replay
        return self

    def replay(self) -> None:
        """Replays the graph, which does not keep its tensors; a reference to this method does."""
        assert self._graph is not None
        self._graph.replay()

    def fill(self) -> None:
        """Fills every rank's tensor with integers, whose sums are exact in any order."""
        for rank, tensor in enumerate(self.tensors):
            torch.manual_seed(rank)
            tensor.random_(-10_000, 10_001)

    def wrong(self) -> int:
        """The number of elements that differ between ranks, or from the mean of all tensors.

        Int8 may be off by its bound, and top-k, which sends some elements, by any value.
        """
        self.fill()
        mean, off = torch.zeros_like(self.tensors[0]), 0.0
        for tensor in self.tensors:
            mean += tensor
            off = max(off, float(tensor.abs().max()))
        mean /= len(self.tensors)
        if self._compression is None:
            off = 0.0
        elif isinstance(self._compression, pycomm.Int8):
            off *= 2 / 254 * (1 + 1e-5)
        else:
            off = math.inf
        self.call()
        first = self.tensors[0]
        wrong = sum(int((tensor != first).sum()) for tensor in self.tensors[1:])
        return wrong + int((~((first - mean).abs() <= off)).sum())

    def _on_rank(self, group: pycomm.Group) -> None:
        tensor = self.tensors[group.rank]
        with torch.cuda.stream(self._stream):
            for _ in range(self._repeats):
                if self._compression is None:
                    pycomm.all_reduce(tensor, "avg", algorithm=self._algorithm, group=group)
                else:
                    pycomm.compressed_all_reduce(tensor, self._compression, op="avg", group=group)


def moved_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that two-shot moves without staging: it reads and writes every tensor once."""
    return 2 * nbytes * ranks


@contextmanager
def large_cases(device: str, nbytes: int = SIZE) -> Iterator[list[KernelCase]]:
    """Cases of equal size: every algorithm, int8 (whose slots lie in the L2), top-k, and staged."""
    with pycomm.LocalWorld(RANKS) as world, pycomm.LocalWorld(RANKS, _stage_always=True) as staging:
        staged = Loopback(staging, nbytes // 4, device).capture()
        plain = Loopback(world, nbytes // 4, device).capture()
        ring, tree = (
            Loopback(world, nbytes // 4, device, algorithm=name).capture()
            for name in ("ring", "tree")
        )
        coded = Loopback(world, nbytes // 4, device, pycomm.Int8()).capture()
        sparse = Loopback(world, nbytes // 4, device, TOPK)
        both = RANKS * nbytes, moved_bytes(nbytes, RANKS)
        yield [
            KernelCase("all_reduce_loopback", *both, plain.call, wrong=plain.wrong,
                 peer_name="torch, add and copy", peer=by_torch(plain.tensors)),
            *(
                KernelCase(name, *both, run.call, wrong=run.wrong, base="all_reduce_loopback")
                for name, run in {
                    "ring_all_reduce_loopback": ring,
                    "tree_all_reduce_loopback": tree,
                    "int8_all_reduce_loopback": coded,
                    "topk_all_reduce_loopback": sparse,
                }.items()
            ),
            KernelCase("all_reduce_staged", *both, staged.call, wrong=staged.wrong,
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
def small_cases(device: str) -> Iterator[list[KernelCase]]:
    """Many all-reduces: in one graph, as replays of a graph of one, and without a graph."""
    with pycomm.LocalWorld(RANKS) as world:
        many = Loopback(world, SMALL // 4, device, repeats=SMALL_REPEATS).capture()
        one = Loopback(world, SMALL // 4, device).capture()
        eager = Loopback(world, SMALL // 4, device, repeats=SMALL_REPEATS)

        def replays() -> None:
            for _ in range(SMALL_REPEATS):
                one.call()

        both = RANKS * SMALL, moved_bytes(SMALL, RANKS)
        yield [
            KernelCase("all_reduce_1KiB", *both, many.call, SMALL_REPEATS, wrong=many.wrong),
            KernelCase("all_reduce_1KiB_replay", *both, replays, SMALL_REPEATS, wrong=one.wrong),
            KernelCase("all_reduce_1KiB_eager", *both, eager.call, SMALL_REPEATS,
                       wrong=eager.wrong),
        ]  # fmt: skip
