"""Reports of what ranks do, from their records in shared memory (csrc/cpu/record.h)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

_MOST_BYTES = 16_000  # of a report, for any number of ranks
_MOST_LINES = 40
_MOST_NODES = 8
_MOMENT = 0.01  # seconds; shorter waits are the everyday ones of ranks that meet


@dataclass(frozen=True)
class RecordedOperation:
    """One operation of one rank. Times are those of :func:`time.monotonic`.

    Attributes:
        sequence: its number in the group, counted from 1.
        operation: the collective, such as ``"all_reduce"``.
        description: the collective with its arguments.
        bytes: the bytes of the tensor, or of one rank's block.
        entered: when the rank came to it.
        done: when it had succeeded on this rank; None while it runs, and if it has failed. The same
            as `entered` for most operations on less than 64 KiB that took but a moment; they are
            not timed.
        subject: what it exchanges, such as the parameters of a bucket, ``"layers.3.weight ...
            layers.5.bias (7 parameters)"``; an empty string if that is unknown.
    """

    sequence: int
    operation: str
    description: str
    bytes: int
    entered: float
    done: float | None
    subject: str = ""

    def __str__(self) -> str:
        """The operation in words."""
        about = f" of {self.subject}" if self.subject else ""
        return f"operation {self.sequence}, {self.description}{about}"


@dataclass(frozen=True)
class RankReport:
    """What one rank does.

    Attributes:
        rank: its number in the group.
        pid: its process.
        gone: True if it has left the group or its process has ended.
        waits_for: the rank that it waits for, in an operation of 10 ms or more, or None.
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
        """What the rank does at the time `now`, in words."""
        words = ["gone; " if self.gone else ""]
        if not self.operations:
            words.append("before its first operation")
        else:
            last = self.operations[-1]
            # A rank may have gone on between the reading of the clock and that of its record.
            since = max(now - (last.entered if last.done is None else last.done), 0)
            words.append(f"{'in' if last.done is None else 'after'} {last}, for {since:.1f} s")
        if self.waits_for is not None:
            words.append(f"; waits for rank {self.waits_for}")
        if self.elsewhere:
            words.append(f"; {self.elsewhere}")
        return "".join(words)


@dataclass(frozen=True)
class NodeReport:
    """What this rank knows of another node.

    Attributes:
        node: the index of the node in :attr:`pycomm.Group.nodes`.
        ranks: its ranks.
        peer: the rank there with which this one exchanges, or None if others of this node do.
        awaited: True if this rank waits for that one.
        lost: True if the connection has ended, and nothing was said before.
        told: why the node stops, in words, if it has said so, or an empty string.
    """

    node: int
    ranks: tuple[int, ...]
    peer: int | None
    awaited: bool
    lost: bool
    told: str

    def __str__(self) -> str:
        """The state as a sentence."""
        knows = "exchanges with none of them"
        if self.peer is not None:
            knows = f"{'waits for' if self.awaited else 'exchanges with'} rank {self.peer}"
        lost = "; the connection is lost" if self.lost else ""
        told = f"; it says: {self.told}" if self.told else ""
        return f"node {self.node} ({_listed(self.ranks)}): this rank {knows}{lost}{told}"


@dataclass(frozen=True)
class Report:
    """What the ranks of a group on this node do, and their last operations.

    ``str`` gives a text in which ranks that do the same share a line; it is shorter than 20 KB.
    Messages between two ranks (:func:`pycomm.send`) are not recorded, but waits for them are.

    Attributes:
        time: of the report, on the clock of :func:`time.monotonic`.
        size: the number of ranks on this node.
        failed: True if the group has failed or was aborted. Its ranks stay in the operation in
            which that happened.
        ranks: the ranks that have joined, in order.
        nodes: what the rank that reports knows of other nodes.
    """

    time: float
    size: int
    failed: bool
    ranks: tuple[RankReport, ...]
    nodes: tuple[NodeReport, ...] = ()

    @cached_property
    def late(self) -> tuple[int, ...]:
        """The ranks that others wait for, and that wait for no rank of this group themselves."""
        waiting = {rank.rank for rank in self.ranks if rank.waits_for is not None}
        awaited = [rank.waits_for for rank in self.ranks if rank.waits_for is not None]
        return tuple(sorted(set(awaited) - waiting))

    @cached_property
    def lateness(self) -> dict[int, float]:
        """By rank: how many seconds after the first rank it came to an operation, as a median.

        Counts the recorded operations that all ranks have entered. Without any, the dict is empty.
        """
        after: dict[int, list[float]] = {rank.rank: [] for rank in self.ranks}
        for entered in self._meetings():
            first = min(entered.values())
            for rank, moment in entered.items():
                after[rank].append(moment - first)
        return {rank: statistics.median(times) for rank, times in after.items() if times}

    def json(self) -> str:
        """The report as JSON, shorter than 20 KB.

        If it would be longer, it has fewer operations of each rank, and of many ranks those that
        are waited for or furthest behind; `omitted` is the number of the others. Of many nodes, it
        has those that are waited for, are lost or have said why they stop.
        """
        order = sorted(self.ranks, key=lambda rank: (rank.rank not in self.late, _progress(rank)))
        most = 8 * max(len(order), 1)  # operations
        while True:
            kept = sorted(order[:most], key=lambda rank: rank.rank)
            each = max(most // max(len(kept), 1), 1)
            ranks = [asdict(replace(rank, operations=rank.operations[-each:])) for rank in kept]
            told = {"time": self.time, "size": self.size, "failed": self.failed, "ranks": ranks}
            told["nodes"] = [asdict(node) for node in self._nodes_by_news()[:most]]
            late, omitted = self.late[:most], len(order) - len(kept)
            text = json.dumps({**told, "late": late, "omitted": omitted})
            if len(text) < _MOST_BYTES or most == 1:
                return text
            most //= 2

    def __str__(self) -> str:
        """The text."""
        lines = ["the group has failed"] if self.failed else []
        if self.late:
            lines.append(f"waited for: {_listed(self.late)}")
        lines += map(str, self._nodes_by_news()[:_MOST_NODES])
        if len(self.nodes) > _MOST_NODES:
            lines.append(f"and {len(self.nodes) - _MOST_NODES} more nodes")
        told = 0
        for ranks in self._alike()[:_MOST_LINES]:
            if sum(map(len, lines)) > _MOST_BYTES:
                break
            pid = f" (pid {ranks[0].pid})" if len(ranks) == 1 else ""
            # Ranks that came to the same state at different times share the longest one.
            longest = min(ranks, key=lambda rank: [o.entered for o in rank.operations[-1:]])
            who = _listed([rank.rank for rank in ranks])
            lines.append(f"{who}{pid}: {longest.state(self.time)}")
            told += len(ranks)
        if told < len(self.ranks):
            lines.append(f"and {len(self.ranks) - told} more ranks")
        if len(self.lateness) > 1:
            latest, seconds = max(self.lateness.items(), key=lambda item: item[1])
            behind = f"{1e3 * seconds:,.3f} ms after the first one"
            lines.append(f"latest in the last operations: rank {latest}, {behind} in the median")
        return "\n".join(lines)

    def _nodes_by_news(self) -> list[NodeReport]:
        """The nodes of which something is known come first."""
        return sorted(self.nodes, key=lambda node: not (node.awaited or node.lost or node.told))

    def _alike(self) -> list[list[RankReport]]:
        """Ranks that do the same; those furthest behind come first."""
        ordered = sorted(self.ranks, key=lambda rank: (_progress(rank), _kind(rank), rank.rank))
        same = groupby(ordered, key=lambda rank: (_progress(rank), _kind(rank)))
        return [list(ranks) for _, ranks in same]

    def _meetings(self) -> Iterator[dict[int, float]]:
        """For each operation that all ranks have entered: when each did."""
        entered: dict[int, dict[int, float]] = {}
        for rank in self.ranks:
            for operation in rank.operations:
                entered.setdefault(operation.sequence, {})[rank.rank] = operation.entered
        return (times for times in entered.values() if len(times) == len(self.ranks))


def make_report(state: Mapping[str, Any]) -> Report:
    """The report of what the extension tells of a group."""
    ranks = [_make_rank(rank, state["time"], state["failed"]) for rank in state["ranks"]]
    nodes = [NodeReport(**{**node, "ranks": tuple(node["ranks"])}) for node in state["nodes"]]
    return Report(**{**state, "ranks": tuple(ranks), "nodes": tuple(nodes)})


def _make_rank(state: Mapping[str, Any], now: float, failed: bool) -> RankReport:
    operations = tuple(RecordedOperation(**operation) for operation in state["operations"])
    rank = RankReport(**{**state, "operations": operations})
    young = (
        bool(operations) and operations[-1].done is None and now - operations[-1].entered < _MOMENT
    )
    return replace(rank, waits_for=None) if rank.gone or (young and not failed) else rank


def _progress(rank: RankReport) -> tuple[int, bool]:
    """How far a rank has come."""
    if not rank.operations:
        return 0, False
    return rank.operations[-1].sequence, rank.operations[-1].done is not None


def _kind(rank: RankReport) -> tuple[bool, int, str, str]:
    """What ranks must share to share a line, besides how far they have come."""
    what = str(rank.operations[-1]) if rank.operations else ""
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
