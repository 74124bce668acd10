"""Reports of what ranks do, from their records in shared memory (csrc/cpu/observe/record.h)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

_MOST_BYTES = 16_000  # of a report, for any number of ranks
_MOST_LINES = 40
_MOST_NODES = 8
_MOMENT = 0.01  # seconds; shorter waits are the everyday ones of ranks that meet
_WHERE = {"launched": "before", "running": "in", "done": "after"}


@dataclass(frozen=True)
class RecordedOperation:
    """One operation of one rank. Times are those of :func:`time.monotonic`.

    Attributes:
        sequence: its number in the group, counted from 1.
        operation: the collective, such as ``"all_reduce"``.
        description: the collective with its arguments.
        bytes: the bytes of the tensor, or of one rank's block.
        entered: when the rank came to it.
        done: when it had succeeded on this rank; None while it runs, and if it has failed. Most
            operations on less than 64 KiB are not timed; then it is the same as `entered`.
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
        return _in_words(self)


@dataclass(frozen=True)
class LaunchedOperation:
    """One operation that a rank has launched on its device. Times are as in RecordedOperation.

    Attributes:
        sequence: its number among the rank's launches in the group, counted from 1.
        operation: the collective, such as ``"all_reduce"``; an empty string if newer launches have
            taken the place of its record.
        description: the collective with its arguments.
        bytes: the bytes of the tensor, or of one rank's block.
        captured: True if it is part of a graph. Then `state` is its state in the last replay, if
            no other captured operation has been replayed since.
        launched: when the rank launched or captured it.
        state: ``"launched"`` if the device has not begun it, ``"running"``, or ``"done"`` if it has
            succeeded. If it fails, it stays ``"running"``.
        since: for the last operation that the device has begun, the time at which it came to
            `state`, to within about 5 ms, perhaps in an earlier replay; otherwise `launched`.
        subject: as in RecordedOperation.
    """

    sequence: int
    operation: str
    description: str
    bytes: int
    captured: bool
    launched: float
    state: str
    since: float
    subject: str = ""

    def __str__(self) -> str:
        """The operation in words."""
        return f"{'a replay of ' if self.captured else ''}{_in_words(self)}"


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
        launched: its last operations on CUDA tensors, in the order of their launches.
        memory: its peaks in each phase of a step, in bytes, from :func:`pycomm.memory.record`.
    """

    rank: int
    pid: int
    gone: bool
    waits_for: int | None
    elsewhere: str
    operations: tuple[RecordedOperation, ...]
    launched: tuple[LaunchedOperation, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_device(self) -> LaunchedOperation | None:
        """The operation that its device is in, or will begin next, or has done last."""
        running = [operation for operation in self.launched if operation.state == "running"]
        waiting = [each for each in self.launched if each.state == "launched" and not each.captured]
        done = [operation for operation in self.launched if operation.state == "done"]
        last = running[-1:] or waiting[:1] or sorted(done, key=lambda each: each.since)[-1:]
        return last[0] if last else None

    def state(self, now: float) -> str:
        """What the rank does at the time `now`, in words."""
        return self._state(now, 1)

    def _state(self, now: float, ranks: int) -> str:
        """As :meth:`state`, for a number of ranks that do the same."""
        waits, devices = ("waits", "its device is") if ranks == 1 else ("wait", "their devices are")
        # A rank may have gone on after the clock was read and before its record was.
        words = ["gone"] if self.gone else []
        current = self.on_device
        if self.operations:
            last = self.operations[-1]
            since = max(now - (last.entered if last.done is None else last.done), 0)
            words.append(f"{'in' if last.done is None else 'after'} {last}, for {since:.1f} s")
        elif current is None:
            words.append("before its first operation")
        if self.waits_for is not None:
            words.append(f"{waits} for rank {self.waits_for}")
        if self.elsewhere:
            words.append(self.elsewhere)
        if current is not None:
            since = max(now - current.since, 0)
            words.append(f"{devices} {_WHERE[current.state]} {current}, for {since:.1f} s")
            if self.launched[-1].sequence > current.sequence:
                words.append(f"launched up to operation {self.launched[-1].sequence}")
        return "; ".join(words)


@dataclass(frozen=True)
class NodeReport:
    """What this rank knows of another node.

    Attributes:
        node: the index of the node in :attr:`pycomm.Group.nodes`.
        ranks: its ranks.
        peer: the rank there with which this rank exchanges, or None if this rank carries no stripe.
        awaited: True if this rank waits for `peer`.
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
        group: the group's :attr:`pycomm.Group.title` in the process that reports.
    """

    time: float
    size: int
    failed: bool
    ranks: tuple[RankReport, ...]
    nodes: tuple[NodeReport, ...] = ()
    group: str = ""

    @cached_property
    def late(self) -> tuple[int, ...]:
        """The ranks that others wait for, and that wait for no rank of this group themselves.

        On CUDA, also ranks whose device has not begun an operation in which another one waits.
        """
        waiting = {rank.rank for rank in self.ranks if rank.waits_for is not None}
        awaited = {rank.waits_for for rank in self.ranks if rank.waits_for is not None}
        return tuple(sorted((awaited - waiting) | self._late_devices()))

    @cached_property
    def lateness(self) -> dict[int, float]:
        """By rank: the median of the seconds by which it came to an operation after the first rank.

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

        If it would be longer, it has fewer operations of each rank, and of many ranks the ones that
        are waited for or furthest behind; `omitted` is the number of ranks that are left out. Of
        many nodes, it has the nodes that are waited for, are lost or have said why they stop.
        """
        order = sorted(self.ranks, key=lambda rank: (rank.rank not in self.late, _progress(rank)))
        most = 8 * max(len(order), 1)  # operations
        while True:
            kept = sorted(order[:most], key=lambda rank: rank.rank)
            each = max(most // max(len(kept), 1), 1)
            ranks = [asdict(_shortened(rank, each)) for rank in kept]
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
            # Ranks that came to the same state at different times share the longest time.
            longest = min(ranks, key=_moment)
            who = _listed([rank.rank for rank in ranks])
            lines.append(f"{who}{pid}: {longest._state(self.time, len(ranks))}")
            told += len(ranks)
        if told < len(self.ranks):
            lines.append(f"and {len(self.ranks) - told} more ranks")
        if len(self.lateness) > 1:
            latest, seconds = max(self.lateness.items(), key=lambda item: item[1])
            behind = f"{1e3 * seconds:,.3f} ms after the first one"
            lines.append(f"latest in the last operations: rank {latest}, {behind} in the median")
        return "\n".join(lines)

    def _late_devices(self) -> set[int]:
        before = self.time - (0 if self.failed else _MOMENT)
        begun = {
            rank.rank: [o for o in rank.launched if o.state != "launched" and not o.captured]
            for rank in self.ranks
        }
        last = {rank: operations[-1] for rank, operations in begun.items() if operations}
        waits = [o.sequence for o in last.values() if o.state == "running" and o.since <= before]
        furthest = max(waits, default=0)
        return {r for r in begun if (last[r].sequence if r in last else 0) < furthest}

    def _nodes_by_news(self) -> list[NodeReport]:
        """The nodes of which something is known come first."""
        return sorted(self.nodes, key=lambda node: not (node.awaited or node.lost or node.told))

    def _alike(self) -> list[list[RankReport]]:
        """Ranks that do the same; the ranks furthest behind come first."""
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


def _in_words(operation: RecordedOperation | LaunchedOperation) -> str:
    about = f" of {operation.subject}" if operation.subject else ""
    return f"operation {operation.sequence}, {operation.description}{about}"


def make_report(state: Mapping[str, Any]) -> Report:
    """Makes a report from the extension's data of a group."""
    ranks = [_make_rank(rank, state["time"], state["failed"]) for rank in state["ranks"]]
    nodes = [NodeReport(**{**node, "ranks": tuple(node["ranks"])}) for node in state["nodes"]]
    return Report(**{**state, "ranks": tuple(ranks), "nodes": tuple(nodes)})


def _make_rank(state: Mapping[str, Any], now: float, failed: bool) -> RankReport:
    operations = tuple(RecordedOperation(**operation) for operation in state["operations"])
    launched = tuple(LaunchedOperation(**launch) for launch in state["launched"])
    made = {**state, "operations": operations, "launched": launched, "memory": {}}
    if any(state["memory"]):
        from pycomm._peaks import memory_totals

        made["memory"] = memory_totals(state["memory"])
    rank = RankReport(**made)
    young = any(o.done is None and now - o.entered < _MOMENT for o in operations[-1:])
    return replace(rank, waits_for=None) if rank.gone or (young and not failed) else rank


def _shortened(rank: RankReport, most: int) -> RankReport:
    """The operations without earlier ones, except for those that the device is in."""
    last = rank.launched[-most:]
    launched = tuple(o for o in rank.launched if o in last or o.state == "running")
    return replace(rank, operations=rank.operations[-most:], launched=launched)


def _progress(rank: RankReport) -> tuple[int, bool, int, int]:
    """How far a rank has come, and its device."""
    last, current = rank.operations[-1:], rank.on_device
    sequence, done = (last[0].sequence, last[0].done is not None) if last else (0, False)
    device = (0, 0) if current is None else (current.sequence, [*_WHERE].index(current.state))
    return sequence, done, *device


def _moment(rank: RankReport) -> list[float]:
    """When a rank came to its state."""
    current = rank.on_device
    entered = [operation.entered for operation in rank.operations[-1:]]
    return entered if current is None else [*entered, current.since]


def _kind(rank: RankReport) -> tuple[bool, int, str, str]:
    """What ranks must have in common to share a line, besides their progress."""
    what = "".join(map(str, [*rank.operations[-1:], rank.on_device, *rank.launched[-1:]]))
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
