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
from dataclasses import replace
from pathlib import Path

from pycomm import _C
from pycomm.report import RankReport, Report, make_report

_FILE = "/memfd:pycomm (deleted)"
_OPERATIONS = 64  # of each rank, for rates and lateness

Place = tuple[int, int]  # a file's inode and the position of a window in it


class Jobs:
    """The groups of one process, or of all that this user may look at, except for this process.

    A process must not open its own windows here: closing a file drops all its locks on it, by which
    the other ranks know that it lives.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.strangers: set[int] = set()  # processes that use another version of pycomm

    def reports(self) -> dict[Place, Report]:
        """The groups whose ranks have joined and have not all gone."""
        pids = [self._pid] if self._pid is not None else _all_pids()
        self.strangers.clear()
        windows: dict[Place, _C.Onlooker] = {}
        for pid in pids:
            if pid == os.getpid():
                continue
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                for place in _mapped(pid) - windows.keys():
                    self._open(pid, place, windows)
        reports = {}
        for place, window in sorted(windows.items()):
            report = make_report(window.state(_OPERATIONS))
            report = replace(report, ranks=_without_ended(report.ranks, place))
            if not all(rank.gone for rank in report.ranks):
                reports[place] = report
        return reports

    def _open(self, pid: int, place: Place, windows: dict[Place, _C.Onlooker]) -> None:
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
    fields = [line.split(maxsplit=5) for line in lines if line.endswith(_FILE)]
    return {(int(inode), int(offset, 16)) for _, _, offset, _, inode, _ in fields}


def _open(pid: int, place: Place) -> _C.Onlooker:
    inode, position = place
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()) != _FILE or link.stat().st_ino != inode:
                continue
            fd = os.open(link, os.O_RDONLY)
            try:
                return _C.Onlooker(fd, position)
            finally:
                os.close(fd)
    raise OSError(f"process {pid} has closed the file of its window")


def _without_ended(ranks: tuple[RankReport, ...], place: Place) -> tuple[RankReport, ...]:
    """Marks the ranks whose processes do not map the window any more.

    If no process does, the ranks' pids are those of another pid namespace, and tell nothing.
    """
    mapping = {rank.pid: _maps(rank.pid, place) for rank in ranks}
    if not any(mapping.values()):
        return ranks
    return tuple(replace(rank, gone=rank.gone or not mapping[rank.pid]) for rank in ranks)


def _maps(pid: int, place: Place) -> bool:
    """True if a process maps a window, or may."""
    try:
        return any(inode == place[0] for inode, _ in _mapped(pid))
    except PermissionError:
        return True
    except OSError:  # there is no such process
        return False


def _row(rank: RankReport, report: Report, before: Report | None) -> list[str]:
    """The cells of a rank: `before` is an earlier report of the group, for rates."""
    operations = rank.operations
    rates = ["", ""]
    earlier = {r.rank: r for r in before.ranks}.get(rank.rank) if before is not None else None
    if before is not None and earlier is not None and operations and earlier.operations:
        count = operations[-1].sequence - earlier.operations[-1].sequence
        per_second = count / (report.time - before.time)
        mean = sum(operation.bytes for operation in operations) / len(operations)
        rates = [f"{per_second:,.0f}", f"{per_second * mean / 1e9:.2f}"]
    late = report.lateness.get(rank.rank)
    return [
        str(rank.rank),
        str(rank.pid),
        rank.state(report.time),
        "" if late is None else f"{1e3 * late:.3f}",
        *rates,
    ]


def _title(report: Report) -> str:
    """A line about a group."""
    title = f"group of {report.size} ranks"
    if len(report.ranks) < report.size:
        title += f", of which {len(report.ranks)} have joined"
    if report.failed:
        title += ", failed"
    return title + (f", waiting for {', '.join(map(str, report.late))}" if report.late else "")


def _watch(jobs: Jobs, interval: float) -> None:
    """Shows a table per group until Ctrl-C."""
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        raise SystemExit("the table needs rich: pip install rich, or use --json") from None
    before: dict[Place, Report] = {}
    with Live(refresh_per_second=4) as live:
        while True:
            reports = jobs.reports()
            tables = []
            for place, report in reports.items():
                table = Table(title=_title(report))
                for name in ("rank", "pid", "state", "late (ms)", "ops/s", "GB/s"):
                    table.add_column(name, justify="left" if name == "state" else "right")
                for rank in report.ranks:
                    style = "red" if rank.gone or rank.rank in report.late else ""
                    table.add_row(*_row(rank, report, before.get(place)), style=style)
                tables.append(table)
            notes = [f"process {pid} uses another version" for pid in sorted(jobs.strangers)]
            live.update(Group(*tables, *notes) if tables or notes else "no groups", refresh=True)
            before = reports
            time.sleep(interval)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.top", description=__doc__)
    parser.add_argument("pid", type=int, nargs="?", help="a rank's process (default: all)")
    parser.add_argument("--json", action="store_true", help="print one report as JSON, and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between updates")
    options = parser.parse_args(arguments)
    if options.interval <= 0:
        parser.error(f"--interval must be positive, got {options.interval}")
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
    with contextlib.suppress(KeyboardInterrupt):
        _watch(jobs, options.interval)


if __name__ == "__main__":
    main(sys.argv[1:])
