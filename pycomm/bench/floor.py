"""The floor: the least time in which this machine can move the bytes of a two-shot all-reduce.

On tensors in the window, every rank reads one byte and writes one byte of main memory per byte of
the tensor: it reads its share of n tensors, and writes the sum into its share of n tensors. Nothing
with that mix of reads and writes is faster than the fastest stream with the same mix, so the probes
here are such streams: on private memory as large as the tensor, in all ranks at once, in the same
rounds as the contestants. The fastest of them is the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import pycomm
from pycomm.bench.cases import MIB, Case
from pycomm.bench.contestants import Contestant, Prepared

# Smaller tensors stay in caches, and streams say nothing about them.
SMALLEST = 8 * MIB
BYTES_MOVED_PER_BYTE = 2


@dataclass(frozen=True)
class Probe:
    """One stream that reads and writes as much as the two-shot all-reduce in the window."""

    group: pycomm.Group
    algorithm: str
    stream: Callable[[torch.Tensor, torch.Tensor], object]
    impl: str = "floor"
    buffer: str = "private"
    compression: str = "none"

    def supports(self, case: Case) -> bool:
        """True for all-reduces that are too large for the caches."""
        on_cpu = case.collective == "all_reduce" and case.device == "cpu"
        return on_cpu and case.nbytes >= SMALLEST

    def prepare(self, case: Case) -> Prepared:
        """The same bytes as fp32, since fp32 loops are limited only by memory."""
        source, target = torch.zeros(2, case.nbytes // 4, dtype=torch.float32).unbind()

        def call() -> None:
            self.stream(source, target)
            # Without it, ranks that share a core could stream one after the other, unnoticed.
            pycomm.barrier(group=self.group)

        return Prepared(source, source, call)


def probes(group: pycomm.Group) -> list[Contestant]:
    """The streams, of which the fastest is the floor."""
    return [
        Probe(group, "x += x", lambda source, _: source.add_(source)),
        Probe(group, "x *= 1", lambda source, _: source.mul_(1.0)),
        Probe(group, "y = x", lambda source, target: target.copy_(source)),
    ]


def rate(case: Case, time_us: float) -> float:
    """GB/s, read plus written, of all ranks together."""
    return BYTES_MOVED_PER_BYTE * case.nbytes * case.ranks / time_us / 1e3
