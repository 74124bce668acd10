"""Tasks whose contestants all move the same bytes, beside streams that do nothing else.

Work that only memory limits takes as long as a stream with the same mix of reads and writes. A
single loop has a fixed mix, so a stream is two loops, one after the other, whose reads and writes
add up to the mix: to read 5 bytes per 4 written, ``y += a`` on a quarter of the tensor and
``y *= 1`` on the rest. Several such streams compete, and the fastest of them counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

import pycomm
from pycomm.bench.measure import Figures, Prepared, compete
from pycomm.bench.report import Settings


@dataclass(frozen=True)
class Mix:
    """Bytes that one call reads and writes."""

    read: int
    write: int

    @property
    def total(self) -> int:
        """Read plus written."""
        return self.read + self.write


@dataclass(frozen=True)
class Outcome:
    """The times of a task.

    Attributes:
        figures: the contestants' figures, by name.
        stream: the fastest stream in the same rounds, which is the floor.
        stream_us: its time.
    """

    figures: dict[str, Figures]
    stream: str
    stream_us: float


@dataclass(frozen=True)
class Task:
    """Work on existing memory, which every contestant does in its own way.

    Attributes:
        name: the work.
        mix: the bytes that must be read and written.
        contestants: a call of each, by name.
    """

    name: str
    mix: Mix
    contestants: Mapping[str, Callable[[], object]]

    def compete(
        self, settings: Settings, device: str = "cpu", group: pycomm.Group | None = None
    ) -> Outcome:
        """Times the contestants and the streams in the same rounds.

        Args:
            settings: the calls of each.
            device: where the memory is.
            group: the ranks that do the work together; None if a process works alone.
        """
        probes = streams(self.mix, device, group=group)
        figures = compete(group, {**self.contestants, **probes}, settings, device)
        fastest = min(probes, key=lambda name: figures[name].time_us)
        floor_us = figures[fastest].time_us
        return Outcome({name: figures[name] for name in self.contestants}, fastest, floor_us)


@dataclass(frozen=True)
class Loop:
    """A loop that writes ``y``, and reads `reads` times as much.

    Attributes:
        name: for tables.
        reads: elements read per element written.
        operands: the number of these reads that come from other memory than ``y``.
        call: takes ``y`` and the operands.
    """

    name: str
    reads: int
    operands: int
    call: Callable[..., object]


# No function of torch writes without reading the cache lines first.
FILL = Loop("memset(y)", 0, 0, lambda y: ctypes.memset(y.data_ptr(), 0, y.nbytes))
SCALE = Loop("y *= 1", 1, 0, lambda y: y.mul_(1.0))
COPY = Loop("y = a", 1, 1, lambda y, a: y.copy_(a))
ADD = Loop("y += a", 2, 1, lambda y, a: y.add_(a))
ADD_PRODUCT = Loop("y += a * b", 3, 2, lambda y, a, b: y.addcmul_(a, b))
Ladder = tuple[Loop, ...]  # the loop at index i reads i elements per element written
OUT_OF_PLACE: tuple[Ladder, ...] = ((FILL, COPY),)
LADDERS = (*OUT_OF_PLACE, (FILL, SCALE), (FILL, SCALE, ADD), (FILL, SCALE, ADD, ADD_PRODUCT))
READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum(x)": lambda x: x.sum(),
    "max(x)": lambda x: x.max(),
}


def streams(
    mix: Mix,
    device: str,
    ladders: tuple[Ladder, ...] = LADDERS,
    group: pycomm.Group | None = None,
) -> dict[str, Prepared]:
    """The competing streams by name; on a GPU only a copy, with which GPU results are compared.

    They share one source and one target.

    Args:
        mix: the bytes that each of them reads and writes.
        device: where.
        ladders: the loops that they are made of; :data:`OUT_OF_PLACE` never reads what it writes.
        group: the ranks that stream at once. Each call ends with a barrier, because ranks that
            share a core could otherwise stream one after the other, unnoticed.
    """
    reads, writes = mix.read // 4, mix.write // 4
    if device != "cpu":
        reads = writes = mix.total // 8
    source, target = (torch.ones(max(n, 1), device=device) for n in (reads, writes))
    if device != "cpu":
        return {COPY.name: Prepared(source, target, lambda: target.copy_(source))}
    found: dict[str, Prepared] = {}
    for ladder in ladders:
        for reader in READERS:
            name, calls = _compose(source[:reads], target[:writes], ladder, reader)
            if group is not None:
                calls.append(partial(pycomm.barrier, group=group))
            found[name] = Prepared(source, target, partial(_run, calls))
    return found


def _run(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _compose(
    source: torch.Tensor, target: torch.Tensor, ladder: Ladder, reader: str
) -> tuple[str, list[Callable[[], object]]]:
    """A stream that writes all of `target` and reads as many elements as `source` has."""
    reads, writes = source.numel(), target.numel()
    top = len(ladder) - 1
    step = min(reads // writes, top) if writes else top
    above = reads - step * writes if step < top else 0  # elements for the loop that reads one more
    parts = [(ladder[min(step + 1, top)], above), (ladder[step], writes - above)]
    names: list[str] = []
    calls: list[Callable[[], object]] = []
    read = written = 0
    for loop, length in parts:
        if length > 0:
            operands = [source[read + i * length :][:length] for i in range(loop.operands)]
            calls.append(partial(loop.call, target[written:][:length], *operands))
            names.append(loop.name)
            read, written = read + loop.operands * length, written + length
    rest = reads - step * writes - above
    if rest > 0:
        calls.append(partial(READERS[reader], source[reads - rest :]))
        names.append(reader)
    return ", ".join(names), calls
