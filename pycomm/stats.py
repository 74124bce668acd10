"""Statistics of a group: how long its operations have taken, and which rank is slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pycomm._peaks import MemoryPeak, memory_peaks

_UNDISTURBED = 0.1  # the share of exchanges that count as undisturbed
_MOST_LINES = 40


@dataclass(frozen=True)
class Times:
    """A distribution of times in seconds, on a logarithmic scale: quantiles are within 6 %.

    Attributes:
        seconds: their sum.
        buckets: the number of times by bucket.
        middles: the time in the middle of each bucket.
    """

    seconds: float
    buckets: Mapping[int, int]
    middles: Sequence[float] = field(repr=False)

    @property
    def count(self) -> int:
        """The number of times; a sampled time counts for all the times that it stands for."""
        return sum(self.buckets.values())

    @property
    def mean(self) -> float:
        """Their mean; NaN if there is none."""
        return self.seconds / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The time that this share of the times does not exceed; NaN if there is none."""
        left = share * self.count
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if left <= 0:
                return self.middles[bucket]
        return math.nan

    def since(self, earlier: Times) -> Times:
        """The times since `earlier`, an earlier state of the same distribution."""
        more = {b: n - earlier.buckets.get(b, 0) for b, n in self.buckets.items()}
        buckets = {bucket: count for bucket, count in more.items() if count > 0}
        return Times(max(self.seconds - earlier.seconds, 0.0), buckets, self.middles)


@dataclass(frozen=True)
class OperationStats:
    """The times of one rank's operations of one kind and size.

    The mean time of an operation is the sum of three parts. :attr:`late` is the wait for the last
    rank to come. The rest is the exchange. Its fastest tenth shows how long it takes on this
    machine if nothing disturbs it: :attr:`transfer`. The mean exchange takes longer by
    :attr:`contention`. All times are NaN if no operation was timed, which may be so if there are
    few, on less than 64 KiB.

    Attributes:
        operation: the collective, such as ``"all_reduce"``.
        codec: ``"none"``, ``"cast"``, ``"int8"`` or ``"topk"``.
        device: ``"cpu"`` or ``"cuda"``, where the tensors lie and whose clock gives the times.
        size: the tensors, or a rank's blocks, have at least this many bytes and less than twice as
            many; a power of two, or 0 for no bytes.
        count: the number of operations.
        bytes: the bytes of their tensors.
        whole: the times from when this rank came to an operation to its end.
        exchange: the times from when all ranks had come to an operation to its end.
    """

    operation: str
    codec: str
    device: str
    size: int
    count: int
    bytes: int
    whole: Times
    exchange: Times

    @property
    def p50(self) -> float:
        """The median time of an operation in seconds, with the wait for late ranks."""
        return self.whole.quantile(0.5)

    @property
    def p99(self) -> float:
        """The time that 99 % of the operations do not exceed, in seconds."""
        return self.whole.quantile(0.99)

    @property
    def late(self) -> float:
        """The mean wait for the last rank to come, in seconds per operation."""
        return self._timed(max(self.whole.mean - self.exchange.mean, 0.0))

    @property
    def transfer(self) -> float:
        """The time that the fastest tenth of the exchanges do not exceed, in seconds."""
        return self._timed(min(self.exchange.quantile(_UNDISTURBED), self.exchange.mean))

    @property
    def contention(self) -> float:
        """The time by which the mean exchange is longer than :attr:`transfer`, in seconds.

        It grows if a rank loses its core, or if others use the memory's bandwidth. Also, sizes that
        differ by less than a factor of two share a row.
        """
        return self.exchange.mean - self.transfer

    @property
    def gb_per_s(self) -> float:
        """Bytes of the tensors per second of the exchange, in 1e9; NaN if no time is known."""
        seconds = self.exchange.mean * self.count
        return self.bytes / seconds / 1e9 if seconds else math.nan

    @property
    def _kind(self) -> tuple[str, str, str, int]:
        return self.operation, self.codec, self.device, self.size

    def _timed(self, seconds: float) -> float:
        return seconds if self.whole.count else math.nan

    def since(self, earlier: OperationStats | None) -> OperationStats:
        """The operations since `earlier`, an earlier state of the same row."""
        if earlier is None:
            return self
        return OperationStats(
            self.operation,
            self.codec,
            self.device,
            self.size,
            self.count - earlier.count,
            self.bytes - earlier.bytes,
            self.whole.since(earlier.whole),
            self.exchange.since(earlier.exchange),
        )


@dataclass(frozen=True)
class RankTimes:
    """How a rank has spent its time, from the end of its first operation to that of its last one.

    Attributes:
        own: seconds outside of operations: its computing, reading of data and so on.
        blocked: seconds in which its program stood still in operations, or waited for works.
    """

    own: float
    blocked: float


@dataclass(frozen=True)
class Stats:
    """Statistics of a group. ``print`` shows a table.

    Attributes:
        rank: the rank that called the operations.
        size: the number of ranks in the group.
        operations: by kind and size.
        ranks: the times of every rank of this node, by rank.
        memory: this rank's peaks in each phase of a step, if :func:`pycomm.memory.record` has
            recorded them; the most so far, also in the result of :meth:`since`.
    """

    rank: int
    size: int
    operations: tuple[OperationStats, ...]
    ranks: Mapping[int, RankTimes]
    memory: Mapping[str, MemoryPeak] = field(default_factory=dict)

    @cached_property
    def skew(self) -> dict[int, float]:
        """By rank: the own time of the fastest rank, divided by this rank's; 1 is the fastest.

        A rank that takes 20 % longer than the others between operations has a score of 0.83. Empty
        if no operation has been timed.
        """
        own = {rank: times.own for rank, times in self.ranks.items()}
        if not own or min(own.values()) <= 0:
            return {}
        return {rank: min(own.values()) / seconds for rank, seconds in own.items()}

    def since(self, earlier: Stats) -> Stats:
        """The statistics since `earlier`, an earlier result of the same rank and group.

        Raises:
            ValueError: `earlier` is of another rank or group, or not earlier.
        """
        before = {row._kind: row for row in earlier.operations}
        rows = [row.since(before.pop(row._kind, None)) for row in self.operations]
        same = earlier.rank == self.rank and earlier.ranks.keys() == self.ranks.keys()
        if not same or before or any(row.count < 0 for row in rows):
            raise ValueError("earlier must be an earlier result of the same rank and group")
        ranks = {
            rank: RankTimes(
                times.own - earlier.ranks[rank].own, times.blocked - earlier.ranks[rank].blocked
            )
            for rank, times in self.ranks.items()
        }
        some = tuple(row for row in rows if row.count)
        if all(row.device != "cpu" for row in some):  # differences of nanoseconds would make scores
            ranks = dict.fromkeys(ranks, RankTimes(0.0, 0.0))
        return Stats(self.rank, self.size, some, ranks, self.memory)

    def __str__(self) -> str:
        """The table; times are in microseconds."""
        lines = [
            f"rank {self.rank} of {self.size}; times in us",
            f"{'operation':<22}{'bytes from':>13}{'count':>11}{'p50':>11}{'p99':>11}"
            f"{'late':>11}{'transfer':>11}{'contention':>11}{'GB/s':>8}",
        ]
        for row in self.operations[:_MOST_LINES]:
            told = [row.operation, row.codec, row.device]
            name = ", ".join(word for word in told if word not in ("none", "cpu"))
            times = (row.p50, row.p99, row.late, row.transfer, row.contention)
            cells = "".join(f"{1e6 * seconds:>11,.1f}" for seconds in times)
            if not row.whole.count:
                cells = f"{'none was timed':>22}"
            speed = "" if math.isnan(row.gb_per_s) else f"{row.gb_per_s:>8.2f}"
            lines.append(f"{name:<22}{row.size:>13,}{row.count:>11,}{cells}{speed}")
        if len(self.operations) > _MOST_LINES:
            lines.append(f"and {len(self.operations) - _MOST_LINES} more")
        if len(self.skew) > 1:
            slowest = min(self.skew, key=self.skew.__getitem__)
            lines.append(f"slowest: rank {slowest}, with a score of {self.skew[slowest]:.2f}")
        return "\n".join(lines)


def make_stats(told: Mapping[str, Any], rank: int, size: int) -> Stats:
    """Makes statistics from the extension's data of a group."""
    middles = told["middles"]
    rows = [
        OperationStats(
            **{**row, "whole": Times(**row["whole"], middles=middles),
               "exchange": Times(**row["exchange"], middles=middles)}
        )
        for row in told["operations"]
    ]  # fmt: skip
    ranks = {number: RankTimes(own, blocked) for number, own, blocked in told["ranks"]}
    return Stats(rank, size, tuple(rows), ranks, memory_peaks(told["memory"], rank))
