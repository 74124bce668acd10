"""``python -m pycomm.top [PID]``: what the ranks of running jobs do, in a live table.

It reads the records in the jobs' shared memory (:mod:`pycomm.report`), from another process of the
same user, without stopping or slowing them. So it also shows where a job hangs, and which rank the
others wait for. Only ranks of this machine are seen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pycomm import _C
from pycomm._runtime.torch_distributed import WINDOW_FILE
from pycomm.report import RankReport, Report, make_report
from pycomm.tracing import OperationLog, TracePart, make_trace, next_pause, write_trace

_LONGEST = 3600.0  # seconds between updates
_OPERATIONS = 64  # of each rank, for rates and lateness

Place = tuple[int, int]  # a file's inode and the position of a window in it


class Jobs:
    """The groups of one process, or of all processes that this user may look at, except this one.

    A process must not open its own groups' files here: when it closes a file, it loses all its
    locks on the file, by which the other ranks know that it lives.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.strangers: set[int] = set()  # processes that use another version of pycomm
        self._knows_pids: dict[Place, bool] = {}  # of the last windows

    def ended(self) -> bool:
        """True if this looks at one process only, and the process has ended."""
        return self._pid is not None and not Path(f"/proc/{self._pid}").exists()

    def windows(self) -> dict[Place, _C.WindowReader]:
        """The shared memory of all groups."""
        own = {inode for inode, _ in _mapped(os.getpid())}
        self.strangers.clear()
        self._knows_pids.clear()
        windows: dict[Place, _C.WindowReader] = {}
        for pid in [self._pid] if self._pid is not None else _all_pids():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                for place in _mapped(pid) - windows.keys():
                    if place[0] not in own:
                        self._knows_pids[place] = _namespace(pid) == _namespace(os.getpid())
                        self._add(pid, place, windows)
        return dict(sorted(windows.items()))

    def reports(self) -> dict[Place, Report]:
        """The groups whose ranks have joined and have not all gone."""
        reports = {}
        for place, window in self.windows().items():
            report = make_report(window.state(_OPERATIONS))
            if self._knows_pids[place]:
                report = replace(report, ranks=_without_ended(report.ranks, place))
            if not all(rank.gone for rank in report.ranks):
                reports[place] = report
        return reports

    def _add(self, pid: int, place: Place, windows: dict[Place, _C.WindowReader]) -> None:
        try:
            windows[place] = _open(pid, place)
        except (ValueError, MemoryError):  # tensors, not a window
            pass
        except RuntimeError:
            self.strangers.add(pid)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _mapped(pid: int) -> set[Place]:
    """The beginnings of a process's mappings of windows' files."""
    lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    fields = [line.split(maxsplit=5) for line in lines if line.endswith(WINDOW_FILE)]
    return {(int(inode), int(offset, 16)) for _, _, offset, _, inode, _ in fields}


def _open(pid: int, place: Place) -> _C.WindowReader:
    inode, position = place
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()) != WINDOW_FILE or link.stat().st_ino != inode:
                continue
            fd = os.open(link, os.O_RDONLY)
            try:
                return _C.WindowReader(fd, position)
            finally:
                os.close(fd)
    raise OSError(f"process {pid} has closed the file of its window")


def _namespace(pid: int) -> Path:
    """The namespace in which a process's pids are numbered."""
    return Path(f"/proc/{pid}/ns/pid").readlink()


def _without_ended(ranks: tuple[RankReport, ...], place: Place) -> tuple[RankReport, ...]:
    """Marks the ranks whose processes do not map the window's file any more as gone."""
    return tuple(replace(r, gone=r.gone or not _maps(r.pid, place)) for r in ranks)


def _maps(pid: int, place: Place) -> bool:
    """True if a process maps a window's file, or if that is unknown."""
    try:
        return any(inode == place[0] for inode, _ in _mapped(pid))
    except PermissionError:
        return True
    except OSError:  # there is no such process
        return False


def _rows(report: Report, before: Report | None) -> Iterator[tuple[list[str], bool]]:
    """The cells of each rank, and whether it holds others up; ranks that do come first.

    `before` is an earlier report of the group, for rates.
    """
    earlier = {} if before is None else {rank.rank: rank for rank in before.ranks}
    seconds = 0.0 if before is None else report.time - before.time
    first = {rank.rank: rank.gone or rank.rank in report.late for rank in report.ranks}
    for rank in sorted(report.ranks, key=lambda rank: not first[rank.rank]):
        late = report.lateness.get(rank.rank)
        cells = [str(rank.rank), str(rank.pid), rank.state(report.time)]
        cells.append("" if late is None else f"{1e3 * late:.3f}")
        cells += _rates(rank, earlier.get(rank.rank), seconds)
        yield [*cells, _peak(rank.memory)], first[rank.rank]


def _rates(rank: RankReport, earlier: RankReport | None, seconds: float) -> list[str]:
    """Operations and gigabytes per second, since an earlier report.

    If the rank has launched operations on CUDA, only these count: ranks that are threads also
    record an operation on the CPU for each of them.
    """
    if earlier is None:
        return ["", ""]
    rates = ["", ""]
    rings = (rank.operations, earlier.operations), (rank.launched, earlier.launched)
    for now, before in rings:
        count = now[-1].sequence - before[-1].sequence if now and before else -1
        if count > 0 or (count == 0 and rates[0] == ""):
            mean = sum(operation.bytes for operation in now) / len(now)
            rates = [f"{count / seconds:,.0f}", f"{count * mean / seconds / 1e9:.2f}"]
    return rates  # none if another group now lies in the same place


def _peak(memory: Mapping[str, int]) -> str:
    """The largest peak of memory and its phase; empty if none is recorded."""
    if not memory:
        return ""
    phase = max(memory, key=memory.__getitem__)
    return f"{memory[phase] / 2**20:,.1f} in {phase}"


def _title(report: Report) -> str:
    """A line about a group."""
    title = f"group of {report.size} ranks"
    if len(report.ranks) < report.size:
        title += f", of which {len(report.ranks)} have joined"
    if report.failed:
        title += ", failed"
    return title + (f", waiting for {', '.join(map(str, report.late))}" if report.late else "")


def _watch(jobs: Jobs, interval: float) -> None:
    """Shows a table per group, until Ctrl-C or the process ends; groups that wait come first."""
    if not sys.stdout.isatty():
        raise SystemExit("the table needs a terminal; use --json")
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise SystemExit("the table needs rich: pip install rich, or use --json") from None
    before: dict[Place, Report] = {}
    with Live(refresh_per_second=4) as live:
        while not jobs.ended():
            reports = jobs.reports()
            tables = []
            for place, report in sorted(reports.items(), key=lambda item: not item[1].late):
                table = Table(title=_title(report))
                for name in ("rank", "pid", "state", "late (ms)", "ops/s", "GB/s", "peak (MiB)"):
                    state = name == "state"
                    table.add_column(name, justify="left" if state else "right", no_wrap=not state)
                for row, holds_up in _rows(report, before.get(place)):
                    # Names of parameters may look like markup.
                    table.add_row(*map(Text, row), style="red" if holds_up else "")
                tables.append(table)
            notes = [f"process {pid} uses another version" for pid in sorted(jobs.strangers)]
            live.update(Group(*tables, *notes) if tables or notes else "no groups", refresh=True)
            before = reports
            time.sleep(interval)


class _Recording:
    """The operations of a group's ranks on this node, read from outside."""

    def __init__(self, window: _C.WindowReader) -> None:
        self._window = window
        self._begin = time.monotonic()
        self._logs: dict[int, OperationLog] = {}
        self._fresh = 0  # operations at the last look, of the rank with the most
        self.look()

    def look(self) -> int:
        """Takes new operations; returns how many, of the rank with the most."""
        for most in (8 + 2 * self._fresh, _C.most_recorded):
            ranks = {each["rank"]: each["operations"] for each in self._window.state(most)["ranks"]}
            for rank in ranks.keys() - self._logs.keys():
                self._logs[rank] = OperationLog(ranks[rank])
            if all(log.reaches_back(ranks.get(rank, ())) for rank, log in self._logs.items()):
                break
        self._fresh = max((self._logs[r].fresh(ranks[r]) for r in ranks), default=0)
        for rank, operations in ranks.items():
            self._logs[rank].take(operations)
        return self._fresh

    def trace(self) -> dict[str, Any]:
        """The trace so far, as a dict for JSON."""
        state, end = self._window.state(1), time.monotonic()
        pids = {each["rank"]: each["pid"] for each in state["ranks"]}
        parts = [
            TracePart(
                rank, state["size"], pids[rank], 0, time.time() - end, self._begin, end,
                log.lost, operations=log.finish(),
            )
            for rank, log in sorted(self._logs.items())
        ]  # fmt: skip
        return make_trace(parts, parts)


def _record(jobs: Jobs, path: str, seconds: float) -> None:
    """Writes a trace of each group's next operations, for `seconds`, until Ctrl-C or the end."""
    recordings = [_Recording(window) for window in jobs.windows().values()]
    if not recordings:
        raise SystemExit("no groups")
    names = [Path(path)]
    if len(recordings) > 1:
        names = [names[0].with_name(f"group{n}.{names[0].name}") for n in range(len(recordings))]
    end, pause = time.monotonic() + seconds, 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while not jobs.ended() and time.monotonic() < end:
            pause = next_pause(pause, max(recording.look() for recording in recordings))
            time.sleep(pause)
    for recording, name in zip(recordings, names, strict=True):
        write_trace(str(name), recording.trace())
        print(name)


ABOUT = (
    "Shows live what the ranks of running jobs do, also where a job hangs, and which rank others "
    "wait for. It reads records in the jobs' shared memory, of the same user's processes on this "
    "machine, without stopping or slowing them."
)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.top", description=ABOUT)
    parser.add_argument("pid", type=int, nargs="?", help="a rank's process (default: all)")
    parser.add_argument("--json", action="store_true", help="print one report as JSON, and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between updates")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of what comes, as JSON")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to trace")
    options = parser.parse_args(arguments)
    if not 0 < options.interval <= _LONGEST:
        allowed = f"more than 0 and at most {_LONGEST:.0f}"
        parser.error(f"--interval must be {allowed}, got {options.interval}")
    if not options.seconds > 0:
        parser.error(f"--seconds must be more than 0, got {options.seconds}")
    if options.trace is not None:
        file = Path(options.trace).absolute()
        if options.json or file.is_dir() or not file.parent.is_dir():
            reason = "a folder that exists, without --json"
            parser.error(f"--trace must name a file in {reason}, got {options.trace}")
    if options.pid is not None:
        try:
            _mapped(options.pid)
        except OSError as error:
            parser.error(f"cannot look at process {options.pid}: {error.strerror}")
    jobs = Jobs(options.pid)
    if options.json:
        groups = [json.loads(report.json()) for report in jobs.reports().values()]
        print(json.dumps({"groups": groups, "other_versions": sorted(jobs.strangers)}))
        return
    if options.trace is not None:
        _record(jobs, options.trace, options.seconds)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(jobs, options.interval)


if __name__ == "__main__":
    main(sys.argv[1:])
