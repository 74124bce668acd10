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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pycomm import _C
from pycomm.report import RankReport, Report, make_report

_FILE = "/memfd:pycomm (deleted)"
_OPERATIONS = 64  # of each rank, for rates and lateness

Place = tuple[int, int]  # a file's inode and the position of a window in it


class Jobs:
    """The groups of one process, or of all that this user may look at."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._windows: dict[Place, _C.Onlooker] = {}
        self.strangers: set[int] = set()  # processes that use another version of pycomm

    def reports(self) -> dict[Place, Report]:
        """The groups whose ranks have joined and have not all gone."""
        pids = [self._pid] if self._pid is not None else _all_pids()
        mapped: set[Place] = set()
        self.strangers.clear()
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                mapped.update(self._find(pid))
        self._windows = {place: self._windows[place] for place in mapped}
        reports = {}
        for place, window in sorted(self._windows.items()):
            report = make_report(window.states(_OPERATIONS))
            ranks = tuple(
                replace(rank, gone=rank.gone or _ended(rank.pid)) for rank in report.ranks
            )
            if not all(rank.gone for rank in ranks):
                reports[place] = replace(report, ranks=ranks)
        return reports

    def _find(self, pid: int) -> Iterator[Place]:
        """Opens the windows that a process has mapped."""
        for place in _mapped(pid):
            if place not in self._windows:
                try:
                    self._windows[place] = _open(pid, place)
                except ValueError:  # tensors, not a window
                    continue
                except RuntimeError:
                    self.strangers.add(pid)
                    continue
            yield place


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _mapped(pid: int) -> set[Place]:
    """The beginnings of a process's mappings of windows' files."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split(maxsplit=5) for line in lines if line.endswith(_FILE)]
    return {(int(inode), int(offset, 16)) for _, _, offset, _, inode, _ in fields}


def _open(pid: int, place: Place) -> _C.Onlooker:
    inode, position = place
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if link.stat().st_ino == inode and str(link.readlink()) == _FILE:
            fd = os.open(link, os.O_RDONLY)
            try:
                return _C.Onlooker(fd, position)
            finally:
                os.close(fd)
    raise OSError(f"process {pid} has closed the file of its window")


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
                late = f", waiting for {', '.join(map(str, report.late))}" if report.late else ""
                table = Table(title=f"group of {len(report.ranks)} ranks{late}")
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
