"""Chrome's trace event format, which Perfetto and Holistic Trace Analysis read.

Every rank is a process with a thread "operations" and a thread for each thread that called pycomm.
Times are microseconds since torch.profiler's zero, so that its traces fit ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycomm._runtime.ranges import Range

_QUARTER = 7_889_238  # seconds; torch.profiler counts from the last multiple of it
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# They end on no rank before all ranks have begun.
_MEETINGS = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")

Event = dict[str, Any]
Operation = dict[str, Any]  # as in pycomm.report.RecordedOperation


@dataclass
class Part:
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


def make_trace(parts: Sequence[Part], shown: Sequence[Part]) -> dict[str, Any]:
    """The trace of the ranks `shown`, as a dict for JSON; `parts` are all that are known."""
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


def _clocks(parts: Sequence[Part]) -> dict[int, float]:
    """By node: by how many seconds its steady clock is ahead of the first part's.

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


def _rank_events(part: Part) -> Iterator[Event]:
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


def _operations(part: Part, entered: dict[int, dict[int, float]], ahead: float) -> Iterator[Event]:
    """The worker's runs, and in them the operations: the wait for the last rank, the transfer."""
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
        # Small operations do not record when they end: soon after the last rank has come.
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
    """A bucket; runs of single operations would say nothing new."""
    if run.details:
        yield _event(0, "bucket", run.name, run.begin, run.end, **run.details)


def _title(operation: Operation) -> str:
    """An operation in short: all_reduce 4 MiB float32."""
    if operation["operation"] == "barrier":
        return "barrier"
    _, _, arguments = operation["description"].partition("(")
    dtype = arguments.split(",")[0]
    return f"{operation['operation']} {human_bytes(operation['bytes'])} {dtype}"
