"""Traces of training steps: what each rank computed, exchanged and waited for."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._init import resolve_group
from pycomm._runtime import host
from pycomm._runtime.ranges import Range, Watch, watches
from pycomm._runtime.threads import start_thread
from pycomm.collectives import all_gather, all_reduce
from pycomm.errors import GroupUnusable

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm._runtime.lifetime import Member
    from pycomm.group import Group

# Collects a rank's recorded operations, of which shared memory holds only the last ones.

_LONGEST, _SHORTEST = 0.01, 0.0002  # seconds from one look to the next
_WANTED = 32  # new operations per look, a quarter of what the record holds
_NUMBERS = 1 << 32  # operations are numbered modulo this


class OperationLog:
    """Operations of a rank, put together from readings of its record.

    If an operation is seen only while it runs, its end is unknown, as the end of a small operation
    is.

    Attributes:
        operations: the operations seen so far, by their number from the first one on.
    """

    def __init__(self, newest: Sequence[Operation]) -> None:
        """Begins with the last operation of a reading; with the first of all if there is none."""
        self.operations: dict[int, Operation] = {}
        self._first = newest[-1]["sequence"] if newest else 1
        self._known = -1  # up to this number, operations have been seen when they were done

    def fresh(self, newest: Sequence[Operation]) -> int:
        """How many operations have come since the last reading."""
        return max(self._number(newest[-1]) - self._known, 0) if newest else 0

    def reaches_back(self, reading: Sequence[Operation]) -> bool:
        """True if no operation is missing between the last reading and this one."""
        return min(map(self._number, reading), default=0) <= self._known + 1

    def take(self, reading: Sequence[Operation]) -> None:
        """Takes what is new in a reading."""
        seen = {self._number(each): each for each in reading}
        new = {number: each for number, each in seen.items() if number > self._known}
        self.operations.update(new)
        done = (number for number, each in new.items() if each["done"] is not None)
        self._known = max(done, default=self._known)

    def finish(self) -> list[Operation]:
        """The operations in order, after the last reading."""
        ordered = [self.operations[number] for number in sorted(self.operations)]
        for each in ordered[:-1]:
            if each["done"] is None:  # it still ran when it was read, and newer ones replaced it
                each["done"] = each["entered"]
        return ordered

    @property
    def lost(self) -> int:
        """The number of operations that it has not seen."""
        return max(self.operations, default=-1) + 1 - len(self.operations)

    def _number(self, operation: Operation) -> int:
        """The number from the first one on."""
        distance: int = (operation["sequence"] - self._first) % _NUMBERS
        return distance if distance < _NUMBERS // 2 else distance - _NUMBERS


class Sampler:
    """Looks at the record from a thread of its own, as often as operations come.

    It begins with the last operation before it was made.

    Attributes:
        log: what it has seen.
    """

    def __init__(self, group: Member) -> None:
        self._core = group._core
        self.log = OperationLog(self._last(1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pycomm trace", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        start_thread(self._thread)

    def stop(self) -> None:
        """Ends the thread, after a last look, also if :meth:`start` was interrupted."""
        self._stop.set()
        if self._thread.ident is not None:  # else, if it begins at all, it ends at once
            self._thread.join()

    def _run(self) -> None:
        pause = _SHORTEST
        ends = False
        try:
            while not ends:
                ends = self._stop.wait(pause)
                pause = next_pause(pause, self._look())
        except GroupUnusable:  # it has been closed
            pass

    def _look(self) -> int:
        """Takes new operations; returns the number of operations since the last look."""
        fresh = self.log.fresh(self._last(1))
        if fresh == 0:
            return 0
        for most in (2 * fresh + 8, _C.most_recorded):  # more may have come between two readings
            reading = self._last(most)
            if self.log.reaches_back(reading):
                break
        self.log.take(reading)
        return fresh

    def _last(self, most: int) -> list[Operation]:
        """This rank's last operations."""
        (own,) = self._core.state(min(most, _C.most_recorded), only_own=True)["ranks"]
        operations: list[Operation] = own["operations"]
        return operations


def next_pause(pause: float, fresh: int) -> float:
    """The seconds until the next look, after one that has found so many new operations."""
    return min(max(pause * _WANTED / max(fresh, 1), _SHORTEST), _LONGEST)


# Chrome's trace event format, which Perfetto and Holistic Trace Analysis read.
#
# Every rank is a process with a thread "operations" and a thread for each thread that called
# pycomm. Times are microseconds since torch.profiler's zero, so that its traces fit ours.

_QUARTER = 7_889_238  # seconds; torch.profiler counts from the last multiple of it
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# On no rank do these operations end before all ranks have begun them.
_MEETINGS = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")

Event = dict[str, Any]
Operation = dict[str, Any]  # as in pycomm.report.RecordedOperation


@dataclass
class TracePart:
    """What one rank has seen. Times are seconds of its node's steady clock.

    Attributes:
        rank: its number in the group.
        size: the number of ranks.
        pid: its process.
        node: the index of its node.
        system: the system's clock minus the steady clock.
        begin: when the trace began.
        end: when it ended.
        lost: the number of operations that are not among `operations`.
        steps: the bounds of steps.
        operations: the recorded operations.
        calls: what its threads did.
        runs: what the group's worker ran, by the name of the range that had launched it.
    """

    rank: int
    size: int
    pid: int
    node: int
    system: float
    begin: float
    end: float = 0.0
    lost: int = 0
    steps: list[float] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    calls: list[Range] = field(default_factory=list)
    runs: list[Range] = field(default_factory=list)


def make_trace(parts: Sequence[TracePart], shown: Sequence[TracePart]) -> dict[str, Any]:
    """The trace of the ranks `shown`, as a dict for JSON, from all known parts."""
    base = int(parts[0].begin + parts[0].system) // _QUARTER * _QUARTER
    ahead = _clocks(parts)
    entered: dict[int, dict[int, float]] = {}  # on the first part's clock
    for part in parts:
        for each in part.operations:
            moment = each["entered"] - ahead[part.node]
            entered.setdefault(each["sequence"], {})[part.rank] = moment
    events = []
    for part in shown:
        shift = parts[0].system - base - ahead[part.node]
        own = [*_rank_events(part), *_operations(part, entered, ahead[part.node])]
        for event in own:
            if "ts" in event:
                event["ts"] = round(1e6 * (event["ts"] + shift), 3)
                event["dur"] = round(1e6 * event["dur"], 3)
            event["pid"] = part.rank
        # Readers nest ranges that begin together in the order in which they stand.
        events += sorted(own, key=lambda e: (e["tid"], e.get("ts", 0), -e.get("dur", 0)))
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "pycomm",
            "rank": shown[0].rank,
            "world_size": shown[0].size,
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base * 1_000_000_000,
        "lostOperations": {str(part.rank): part.lost for part in parts if part.lost},
        "traceEvents": events,
    }


def human_bytes(count: int) -> str:
    """A size: 64 KiB, 1.5 MiB."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"


def _clocks(parts: Sequence[TracePart]) -> dict[int, float]:
    """By node: the seconds by which its steady clock is ahead of the first part's.

    No rank comes out of an operation before all ranks have come to it. So each operation bounds the
    difference of two nodes' clocks from both sides, and the middle of all bounds is taken.
    """
    first = parts[0].node
    begins: dict[int, dict[int, float]] = {}  # by node and operation: the last rank's
    ends: dict[int, dict[int, float]] = {}  # the first rank's
    for part in parts:
        begun, ended = begins.setdefault(part.node, {}), ends.setdefault(part.node, {})
        for each in part.operations:
            number, begin, end = each["sequence"], each["entered"], each["done"]
            if each["operation"] not in _MEETINGS:
                continue
            begun[number] = max(begun.get(number, begin), begin)
            if end is not None and end > begin:  # else the end is not known
                ended[number] = min(ended.get(number, end), end)
    ahead = dict.fromkeys(begins, 0.0)
    for node in begins.keys() - {first}:
        most = [ends[node][n] - begins[first][n] for n in ends[node].keys() & begins[first].keys()]
        least = [begins[node][n] - ends[first][n] for n in begins[node].keys() & ends[first].keys()]
        if most and least:
            ahead[node] = (min(most) + max(least)) / 2
    return ahead


def _event(tid: int, kind: str, name: str, begin: float, end: float, **details: Any) -> Event:
    lasts = max(end - begin, 0.0)
    return {
        "ph": "X", "cat": kind, "name": name, "tid": tid, "ts": begin, "dur": lasts,
        "args": details,
    }  # fmt: skip


def _label(kind: str, tid: int, name: str, order: int) -> Iterator[Event]:
    """Names and orders a process or a thread."""
    yield {"ph": "M", "name": f"{kind}_name", "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "tid": tid, "args": {"sort_index": order}}


def _rank_events(part: TracePart) -> Iterator[Event]:
    """Labels, steps, and what the rank's own threads did; thread 1 made the first call."""
    threads = list(dict.fromkeys(call.thread for call in part.calls)) or [0]
    yield from _label("process", 0, f"rank {part.rank} (pid {part.pid})", part.rank)
    yield from _label("thread", 0, "operations", len(threads) + 1)
    for number, thread in enumerate(threads, 1):
        yield from _label("thread", number, f"calls of thread {thread}", number)
    for number, (begin, end) in enumerate(zip(part.steps, part.steps[1:], strict=False)):
        yield _event(1, "user_annotation", f"ProfilerStep#{number}", begin, end)  # HTA's name
    for call in part.calls:
        thread = 1 + threads.index(call.thread)
        name = f"pycomm:{call.name}"
        yield _event(thread, "call", name, call.begin, call.end, **call.details)


def _operations(
    part: TracePart, entered: dict[int, dict[int, float]], ahead: float
) -> Iterator[Event]:
    """The worker's runs, and their operations, each as a wait for the last rank and a transfer."""
    runs = iter(sorted(part.runs, key=lambda run: run.begin))
    run = next(runs, None)
    for each in part.operations:
        begin = each["entered"]
        while run is not None and run.end <= begin:
            yield from _run(run)
            run = next(runs, None)
        inside = run is not None and run.begin <= begin
        arrivals = entered[each["sequence"]]
        last = max(arrivals, key=lambda rank: arrivals[rank])
        complete = arrivals[last] + ahead
        # Small operations do not record their end, which is soon after the last rank has come.
        timed = each["done"] is not None and each["done"] > begin
        end = each["done"] if timed else part.end if each["done"] is None else complete
        details = {
            "sequence": each["sequence"],
            "bytes": each["bytes"],
            "description": each["description"],
            "asynchronous": inside,
            "end is known": timed,
        }
        if each["subject"]:
            details["subject"] = each["subject"]
        if inside and run is not None:
            details["launched in"] = run.name
            end = min(end, run.end)
        if len(arrivals) == part.size:
            late = arrivals[last] - min(arrivals.values())
            details |= {"last rank": last, "after the first (us)": round(1e6 * late, 3)}
        yield _event(0, "operation", _title(each), begin, end, **details)
        if len(arrivals) == part.size:
            there = min(max(complete, begin), end)
            if there > begin:
                yield _event(0, "wait", f"wait for rank {last}", begin, there)
            if end > there:
                yield _event(0, "transfer", "transfer", there, end)
    while run is not None:
        yield from _run(run)
        run = next(runs, None)


def _run(run: Range) -> Iterator[Event]:
    """The run of a bucket; runs of single operations are left out, because they add nothing."""
    if run.details:
        yield _event(0, "bucket", run.name, run.begin, run.end, **run.details)


def _title(operation: Operation) -> str:
    """An operation in short: all_reduce 4 MiB float32."""
    if operation["operation"] == "barrier":
        return "barrier"
    _, _, arguments = operation["description"].partition("(")
    dtype = arguments.split(",")[0]
    return f"{operation['operation']} {human_bytes(operation['bytes'])} {dtype}"


# Traces of training steps: what each rank computed, exchanged and waited for.

_RANK = "{rank}"


class Trace:
    """A running trace, made by :func:`trace`.

    Attributes:
        lost: at the end, the number of operations of this rank that are not in the trace, because
            more than 128 came between two looks at the record.
    """

    def __init__(self, path: str | os.PathLike[str], group: Group) -> None:
        self._path, self._group = os.fspath(path), group
        self._steps: list[float] = []
        self.lost = 0

    def step(self) -> None:
        """Ends a step; the first one begins with the ``with`` block. Call it on all ranks."""
        self._steps.append(time.monotonic())

    def __enter__(self) -> Trace:
        group = self._group
        if group in watches:
            raise ValueError("trace must end before another one of the same group begins")
        Path(self._path.replace(_RANK, str(group.rank))).parent.mkdir(parents=True, exist_ok=True)
        # A tensor that is large enough for the operation's end to be recorded.
        all_reduce(
            host.zeros(_C.timed_from_bytes // 4, dtype=torch.float32),
            group=group,
            tag="pycomm.trace",
        )
        node = next(index for index, ranks in enumerate(group.nodes) if group.rank in ranks)
        begin = time.monotonic()
        self._steps, self.lost = [], 0
        self._part = TracePart(
            group.rank, group.size, os.getpid(), node, time.time() - begin, begin, steps=self._steps
        )
        self._watch, self._sampler, self._short_way = Watch(), Sampler(group), group._short_way
        try:
            self._sampler.start()
            group._short_way = None  # it makes no ranges
            watches[group] = self._watch
            self._steps.append(time.monotonic())
        except BaseException:  # interrupted
            self._stop()
            raise
        return self

    def _stop(self) -> None:
        """Ends everything that the block has begun."""
        watches.pop(self._group, None)
        self._group._short_way = self._short_way
        self._sampler.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._finish_part()
        parts = [self._part]
        try:
            if kind is None:
                parts = self._gather()
        finally:
            self._write(parts)
        if self.lost:  # at the end, because programs may turn warnings into errors
            warnings.warn(
                f"{self.lost} operations of rank {self._part.rank} are not in the trace: they came "
                "faster than the trace could read them",
                stacklevel=2,
            )

    def _finish_part(self) -> None:
        """Completes what this rank has seen."""
        part, sampler, watch = self._part, self._sampler, self._watch
        part.end = time.monotonic()
        if len(part.steps) == 1:
            part.steps.append(part.end)
        part.operations = sampler.log.finish()
        part.lost = self.lost = sampler.log.lost
        part.calls = watch.ranges
        for cause, work in watch.launched:
            if work.completed():
                part.runs.append(Range(cause.name, *work.interval(), 0, cause.details))

    def _gather(self) -> list[TracePart]:
        """Every rank's part; a collective call."""
        group = self._group
        mine = torch.frombuffer(
            bytearray(zlib.compress(json.dumps(asdict(self._part)).encode())), dtype=torch.uint8
        )
        sizes = host.empty(group.size, dtype=torch.int64)
        all_gather(sizes, host.tensor([len(mine)]), group=group, tag="pycomm.trace")
        padded = host.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyone = host.empty(group.size, len(padded), dtype=torch.uint8)
        all_gather(everyone, padded, group=group, tag="pycomm.trace")
        return [
            _parsed(zlib.decompress(bytes(row[:size].tolist())))
            for row, size in zip(everyone, sizes.tolist(), strict=True)
        ]

    def _write(self, parts: list[TracePart]) -> None:
        """Writes the file, or this rank's own."""
        rank, path = self._part.rank, self._path
        whole = len(parts) == self._part.size
        if whole and rank > 0 and _RANK not in path:
            return
        shown = parts
        if _RANK in path:
            path, shown = path.replace(_RANK, str(rank)), [parts[rank if whole else 0]]
        elif not whole:
            name = Path(path)
            path = str(name.with_name(f"rank{rank}.{name.name}"))
        write_trace(path, make_trace(parts, shown))


def write_trace(path: str, trace: Mapping[str, Any]) -> None:
    """Writes a trace, compressed if the file's name ends in ``.gz``."""
    data = json.dumps(trace).encode()
    Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


def _parsed(text: bytes) -> TracePart:
    """A part that another rank has sent."""
    told = json.loads(text)
    for kind in ("calls", "runs"):
        told[kind] = [Range(**each) for each in told[kind]]
    return TracePart(**told)


def trace(path: str | os.PathLike[str], *, group: Group | None = None) -> Trace:
    """Traces the operations of a ``with`` block; all ranks enter and leave it together.

    .. code-block:: python

        with pycomm.trace("trace.json") as trace:
            for batch in batches:
                train(batch)
                trace.step()

    The trace shows on one clock what each rank did: its steps, its calls of pycomm, its buckets,
    and each operation as a wait until the last rank had come, and a transfer. ``ui.perfetto.dev``
    opens it, and so does Holistic Trace Analysis. docs/how-to/observing.md tells what is not in it.

    If the block raises, each rank writes what it has seen to a file of its own,
    ``rank0.trace.json`` and so on.

    Args:
        path: the file, in Chrome's trace event format, compressed if the name ends in ``.gz``. Rank
            0 writes it, with all ranks in it. If the name has ``{rank}`` in it, each rank writes
            its own file instead, as Holistic Trace Analysis needs them.
        group: by default the default group.

    Returns:
        The :class:`Trace`, a context manager.

    Raises:
        ValueError: another trace of the group is running.
        OSError: the file cannot be written.
        pycomm.CollectiveError: an operation of the trace itself failed: at the beginning, where
            ranks meet, or at the end, where rank 0 collects what they have seen.
    """
    return Trace(path, resolve_group(group))
