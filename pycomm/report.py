"""Reports of what ranks do, from their records in shared memory (csrc/cpu/record.h)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

# What a report lists at most, so that it stays below 20 KB for any number of ranks.
_MOST_LINES = 40
_MOST_OPERATIONS = 40


@dataclass(frozen=True)
class RecordedOperation:
    """One operation of one rank. Times are those of :func:`time.monotonic`.

    Attributes:
        sequence: its number in the group, counted from 1.
        operation: the collective, such as ``"all_reduce"``.
        description: the collective with its arguments.
        bytes: the bytes of the tensor, or of one rank's block.
        entered: when the rank came to it.
        done: when it had succeeded on this rank; None while it runs, and if it has failed. For less
            than 4 KiB it is the same as `entered`: so short a time is not taken.
    """

    sequence: int
    operation: str
    description: str
    bytes: int
    entered: float
    done: float | None


@dataclass(frozen=True)
class RankReport:
    """What one rank does.

    Attributes:
        rank: its number in the group.
        pid: its process.
        gone: True if it has left the group or its process has ended.
        waits_for: the rank that it has waited for longer than for a moment, or None.
        elsewhere: what it waits for in another group, or an empty string.
        operations: its last operations, in order.
    """

    rank: int
    pid: int
    gone: bool
    waits_for: int | None
    elsewhere: str
    operations: tuple[RecordedOperation, ...]

    def state(self, now: float) -> str:
        """What the rank does, in words; `now` is the time of the report."""
        words = ["gone; " if self.gone else ""]
        if not self.operations:
            words.append("before its first operation")
        else:
            last = self.operations[-1]
            where = f"operation {last.sequence}, {last.description}"
            since = last.entered if last.done is None else last.done
            words.append(
                f"{'in' if last.done is None else 'after'} {where}, for {now - since:.1f} s"
            )
        if self.waits_for is not None:
            words.append(f"; waits for rank {self.waits_for}")
        if self.elsewhere:
            words.append(f"; {self.elsewhere}")
        return "".join(words)


@dataclass(frozen=True)
class Report:
    """What the ranks of a group on this node do, and their last operations.

    ``str`` gives a text of at most 40 lines of ranks; ranks that do the same share a line.
    Messages between two ranks (:func:`pycomm.send`) are not recorded, but waits for them are.

    Attributes:
        time: when the report was made, on the clock of :func:`time.monotonic`.
        ranks: the ranks, in order.
    """

    time: float
    ranks: tuple[RankReport, ...]

    @property
    def late(self) -> tuple[int, ...]:
        """The ranks that others wait for, and that wait for no rank of this group themselves."""
        waiting = {rank.rank for rank in self.ranks if rank.waits_for is not None}
        awaited = [rank.waits_for for rank in self.ranks if rank.waits_for is not None]
        return tuple(sorted(set(awaited) - waiting))

    @property
    def lateness(self) -> dict[int, float]:
        """By rank: how many seconds after the first rank it came to an operation, as a median.

        Counts the recorded operations that all ranks have entered. Without any, the dict is empty.
        """
        after: dict[int, list[float]] = {rank.rank: [] for rank in self.ranks}
        for entered in self._meetings().values():
            for rank, moment in entered.items():
                after[rank].append(moment - min(entered.values()))
        return {rank: statistics.median(times) for rank, times in after.items() if times}

    def json(self) -> str:
        """The report as JSON, below 20 KB: of many ranks, those furthest behind, and `omitted`."""
        kept = sorted(self.ranks, key=lambda rank: (rank.rank not in self.late, _progress(rank)))
        kept = sorted(kept[:_MOST_OPERATIONS], key=lambda rank: rank.rank)
        most = max(_MOST_OPERATIONS // max(len(kept), 1), 1)
        told = {
            "time": self.time,
            "late": self.late[:_MOST_OPERATIONS],
            "omitted": len(self.ranks) - len(kept),
            "ranks": [asdict(replace(rank, operations=rank.operations[-most:])) for rank in kept],
        }
        return json.dumps(told)

    def __str__(self) -> str:
        """The text."""
        lines = [f"waited for: {_listed(self.late)}"] if self.late else []
        groups = list(self._by_state())
        lines += [f"{_listed(ranks)}: {state}" for state, ranks in groups[:_MOST_LINES]]
        if len(groups) > _MOST_LINES:
            lines.append(f"and {sum(len(r) for _, r in groups[_MOST_LINES:])} more ranks")
        if self.lateness:
            latest, seconds = max(self.lateness.items(), key=lambda item: item[1])
            behind = f"{1e3 * seconds:.3g} ms after the first one"
            lines.append(f"latest in the last operations: rank {latest}, {behind} in the median")
        return "\n".join(lines)

    def _by_state(self) -> Iterator[tuple[str, list[int]]]:
        """What ranks do, with the ranks that do it; those furthest behind come first.

        Ranks that came to the same state at different times share the longest one.
        """
        ordered = sorted(self.ranks, key=lambda rank: (_progress(rank), _kind(rank), rank.rank))
        for _, same in groupby(ordered, key=lambda rank: (_progress(rank), _kind(rank))):
            ranks = list(same)
            longest = min(ranks, key=lambda rank: [o.entered for o in rank.operations[-1:]])
            yield longest.state(self.time), [rank.rank for rank in ranks]

    def _meetings(self) -> dict[int, dict[int, float]]:
        """By operation that all ranks have entered: when each did."""
        entered: dict[int, dict[int, float]] = {}
        for rank in self.ranks:
            for operation in rank.operations:
                entered.setdefault(operation.sequence, {})[rank.rank] = operation.entered
        return {key: times for key, times in entered.items() if len(times) == len(self.ranks)}


def make_report(states: Sequence[Mapping[str, Any]]) -> Report:
    """The report of what the extension tells of ranks."""
    ranks = (
        RankReport(
            **{**state, "operations": tuple(RecordedOperation(**o) for o in state["operations"])}
        )
        for state in states
    )
    return Report(time.monotonic(), tuple(ranks))


def _progress(rank: RankReport) -> tuple[int, bool]:
    """How far a rank has come."""
    if not rank.operations:
        return 0, False
    return rank.operations[-1].sequence, rank.operations[-1].done is not None


def _kind(rank: RankReport) -> tuple[bool, int, str, str]:
    """What ranks must share to share a line, besides how far they have come."""
    what = rank.operations[-1].description if rank.operations else ""
    return rank.gone, -1 if rank.waits_for is None else rank.waits_for, rank.elsewhere, what


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as in "ranks 0 to 3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}" if texts else ""
