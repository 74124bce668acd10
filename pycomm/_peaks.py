"""Peaks of memory in the phases of a step (pycomm/memory.py), as ranks show them to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, EXCHANGE, STEP, OTHER = "forward", "backward", "exchange", "step", "other"
PHASES = (FORWARD, BACKWARD, EXCHANGE, STEP, OTHER)
KINDS = ("parameters", "buffers", "gradients", "master weights", "states", "communication")
REST = "activations"
# What the process and its device use, tensors or not. Each has a peak of its own.
GAUGES = ("allocated", "reserved", "outside torch", "pinned", "resident")
_FIGURES = (*KINDS, REST, *GAUGES)


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory in a phase of a step.

    Attributes:
        bytes: the bytes of each kind at the moment when tensors took the most. What is of no other
            kind is ``"activations"``: also inputs, and memory that operations need for a while.
        gauges: peaks, in bytes, which the process or the device had at moments of their own.
            ``"resident"`` is the process's memory in RAM. With CUDA, ``"allocated"`` and
            ``"reserved"`` are those of torch's allocator; ``"outside torch"`` is what else the
            device has in use at the phase's end, such as windows, NCCL's buffers, contexts and
            other processes; ``"pinned"`` is pinned host memory, also that of states and windows.
        rank: the rank that has measured this, or None if the model is in no group.
    """

    bytes: Mapping[str, int]
    gauges: Mapping[str, int]
    rank: int | None

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.bytes.values())

    def or_larger(self, other: MemoryPeak | None) -> MemoryPeak:
        """The larger of two peaks, with the larger of each gauge."""
        if other is None:
            return self
        most = max(self, other, key=lambda peak: peak.total)
        return MemoryPeak(most.bytes, larger_values(self.gauges, other.gauges), most.rank)


def larger_values(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """For each name in either mapping, the larger value."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def memory_numbers(peaks: Mapping[str, MemoryPeak]) -> list[int]:
    """Peaks by phase as whole numbers in a fixed order: bytes plus 1, and 0 if unknown."""
    numbers = []
    for phase in PHASES:
        values = {**peaks[phase].bytes, **peaks[phase].gauges} if phase in peaks else {}
        numbers += [values.get(name, -1) + 1 for name in _FIGURES]
    return numbers


def memory_peaks(numbers: Sequence[int], rank: int | None) -> dict[str, MemoryPeak]:
    """The peaks by phase of a rank, from its :func:`memory_numbers`."""
    peaks = {}
    for first, phase in zip(range(0, len(numbers), len(_FIGURES)), PHASES, strict=True):
        row = zip(_FIGURES, numbers[first : first + len(_FIGURES)], strict=True)
        known = {name: number - 1 for name, number in row if number}
        if known:
            kinds = {name: size for name, size in known.items() if name not in GAUGES}
            gauges = {name: size for name, size in known.items() if name in GAUGES}
            peaks[phase] = MemoryPeak(kinds, gauges, rank)
    return peaks


def memory_totals(numbers: Sequence[int]) -> dict[str, int]:
    """The most bytes of tensors in each phase, from :func:`memory_numbers`."""
    return {phase: peak.total for phase, peak in memory_peaks(numbers, None).items()}
