"""The output of every benchmark: the lines around its table, the table, and JSON."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from pycomm import collect_env

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every benchmark; see ``python -m pycomm.bench -h``.

    Attributes:
        benchmark: the command line's first word.
        iters: timed calls of each contestant; None takes as many as fit into a fixed time.
        warmup_iters: untimed calls before each round; None takes a tenth of the round's.
        json: the file to write.
        plot: the picture to draw.
        command: the command line.
    """

    benchmark: str = ""
    iters: int | None = None
    warmup_iters: int | None = None
    json: str | None = None
    plot: str | None = None
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class RankSettings(Settings):
    """The settings of a benchmark of several ranks.

    Attributes:
        ranks: processes to start.
        timeout: seconds to wait for a rank.
    """

    ranks: int
    timeout: float = 60.0


class ResultRow(ABC):
    """A contestant's result; its attributes are the keys of the JSON file."""

    @abstractmethod
    def line(self) -> str:
        """The line of the table."""


SPREAD = "      p50       p95       p99       max"  # above the columns of TimedRow.spread


@dataclass(frozen=True, kw_only=True)
class TimedRow(ResultRow):
    """A result with times; :class:`pycomm.bench.measure.Figures` says how they are taken.

    Attributes:
        iterations: the number of samples, each of which is the slowest rank's.
        time_us: the time that ratios are made of.
        p50_us: half of the samples take at most this time; `p95_us` and `p99_us`: 95 and 99 %.
        max_us: the longest sample, over all ranks.
    """

    iterations: int
    time_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float

    @abstractmethod
    def point(self) -> tuple[str, int, str]:
        """Where a plot shows the row: the contestant, the size of the case, and what it counts."""

    def spread(self, unit_us: float = 1.0) -> str:
        """The columns of the percentiles and the maximum."""
        times = (self.p50_us, self.p95_us, self.p99_us, self.max_us)
        return " ".join(f"{time_us / unit_us:9.2f}" for time_us in times)


AnyRow = TypeVar("AnyRow", bound=ResultRow)


class Results(Generic[AnyRow]):
    """The results of a run: rank 0 prints and writes them as they come.

    Args:
        settings: gives the command and the file.
        brief: prints neither the table's header nor comments.
        facts: entries of `meta` besides the circumstances of the run.

    Attributes:
        meta: the circumstances.
        rows: the table.
        what: what is measured, in words.
        is_first: True on the rank that prints.
    """

    def __init__(self, settings: Settings, *, brief: bool = False, **facts: Any) -> None:
        self.meta = circumstances(settings.command) | facts
        self.rows: list[AnyRow] = []
        self._path, self._brief = settings.json, brief
        self.what = ""
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0

    @property
    def place(self) -> str:
        """The machine, as a line of text."""
        return f"{self.meta['machine']['cores']} cores of {self.meta['machine']['cpu']}"

    def begin(self, what: str, header: str, *notes: str) -> None:
        """Prints what is measured, and the header of the table."""
        self.what = what
        self.comment(what, versions(self.meta), self._load("before"), *notes)
        if not self._brief:
            self.say(header)

    def add(self, rows: Iterable[AnyRow]) -> None:
        """Prints and keeps rows; what comes later cannot lose them."""
        for row in rows:
            self.rows.append(row)
            self.say(row.line())
        self.save()

    def end(self, *notes: str) -> None:
        """Prints what comes below the table, and writes the file, if there is one."""
        self.save()
        self.comment(self._load("after"), *notes)

    def save(self) -> None:
        """Writes the file, if there is one."""
        self.meta["load_after"] = os.getloadavg()[0]
        if self.is_first and self._path is not None:
            write_json(self._path, self.meta, map(vars, self.rows))

    def comment(self, *lines: str) -> None:
        """Prints lines that do not belong to the table."""
        if not self._brief:
            self.say(*(f"# {line}" for line in lines))

    def say(self, *lines: str) -> None:
        """Prints lines."""
        if self.is_first and lines:
            print(*lines, sep="\n", flush=True)

    def _load(self, moment: str) -> str:
        """The machine's load before or after the run, and the time of a barrier if measured."""
        barrier = self.meta.get(f"barrier_us_{moment}")
        suffix = "" if barrier is None else f", barrier {barrier:.2f} us"
        return f"load {self.meta[f'load_{moment}']:.2f}{suffix}"


def circumstances(command: str) -> dict[str, Any]:
    """Date, command, machine and software of a run; names neither host nor user."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {
            "cpu": collect_env.cpu_model(),
            "cores": os.cpu_count(),
            "cores_per_rank": collect_env.usable_cores(),
            "memory_GiB": collect_env.memory_gib(),
            "kernel": os.uname().release,
        },
        "versions": collect_env.versions(),
        "load_before": os.getloadavg()[0],
    }


def write_json(path: str, meta: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Writes ``{"meta": ..., "rows": [...]}``, a row per line."""
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(meta, indent=2).replace("\n", "\n  ")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def versions(meta: dict[str, Any]) -> str:
    """The software, as a line of text."""
    return ", ".join(f"{name} {version}" for name, version in meta["versions"].items())


def human_bytes(count: int) -> str:
    """Formats a size: 64 KiB, 1 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} B"
