"""The output of every benchmark: the lines around its table, the table, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

from pycomm import collect_env

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNREAD = 128 + signal.SIGPIPE  # the exit code if nobody reads the output


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every benchmark; see ``python -m pycomm.bench -h``.

    Attributes:
        benchmark: the command line's first word.
        iters: timed calls of each contestant; None takes as many as fit into a fixed time.
        warmup_iters: untimed calls before each round; None takes a tenth of the round's.
        json: the file to write.
        plot: the picture to draw.
        wide: shows all columns of the table, not only those that fit 80 characters.
        command: the command line.
    """

    benchmark: str = ""
    iters: int | None = None
    warmup_iters: int | None = None
    json: str | None = None
    plot: str | None = None
    wide: bool = False
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
    def line(self, wide: bool = False) -> str:
        """The line of the table, with all columns if it is `wide`."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: the first line above it.
        unit: the second line.
        width: its width; a negative one aligns to the left.
        text: makes the cell of a row.
        wide: True if only wide tables have it.
    """

    title: str
    unit: str
    width: int
    text: Callable[[Any], str]
    wide: bool = False

    def align(self, text: str) -> str:
        """The text, filled up to the width."""
        return f"{text:{'<' if self.width < 0 else '>'}{abs(self.width)}}"


def cell(name: str, form: str = "", unit: float = 1, absent: str = "") -> Callable[[Any], str]:
    """Makes the text of an attribute: in a format, in units of `unit`; `absent` for None."""

    def text(row: Any) -> str:
        value = getattr(row, name)
        return absent if value is None else format(value / unit if unit != 1 else value, form)

    return text


def spread(unit: str = "us", narrow: tuple[str, ...] = ()) -> tuple[Column, ...]:
    """The columns of the percentiles and the maximum, of which narrow tables have some."""
    size = {"us": 1.0, "ms": 1e3}[unit]
    return tuple(
        Column(name, f"({unit})", 9, cell(f"{name}_us", ".2f", size), name not in narrow)
        for name in ("p50", "p95", "p99", "max")
    )


@dataclass(frozen=True, kw_only=True)
class TimedRow(ResultRow):
    """A result with times; :class:`pycomm.bench.measure.Figures` says how they are taken.

    Attributes:
        iterations: the number of samples, each of which is the slowest rank's.
        time_us: the time that ratios are made of.
        p50_us: half of the samples take at most this time; `p95_us` and `p99_us`: 95 and 99 %.
        max_us: the longest sample, over all ranks.
    """

    columns: ClassVar[tuple[Column, ...]]

    iterations: int
    time_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float

    @abstractmethod
    def point(self) -> tuple[str, int, str]:
        """Where a plot shows the row: the contestant, the size of the case, and what it counts."""

    def line(self, wide: bool = False) -> str:
        """See :meth:`ResultRow.line`."""
        shown = (column for column in self.columns if wide or not column.wide)
        return " ".join(column.align(column.text(self)) for column in shown).rstrip()

    @classmethod
    def header(cls, wide: bool) -> str:
        """The two lines above the table."""
        shown = [column for column in cls.columns if wide or not column.wide]
        titles = " ".join(column.align(column.title) for column in shown).rstrip()
        units = " ".join(column.align(column.unit) for column in shown).rstrip()
        return f"#{titles[1:]}\n#{units[1:]}"


AnyRow = TypeVar("AnyRow", bound=ResultRow)


class Results(Generic[AnyRow]):
    """The results of a run: rank 0 prints and writes them as they come.

    Args:
        settings: gives the command and the file.
        brief: prints neither the table's header nor comments.
        facts: entries of `meta` besides the circumstances of the run.

    Attributes:
        meta: the circumstances; `complete` is False until the run has ended.
        rows: the table.
        what: what is measured, in words.
        is_first: True on the rank that prints.
    """

    def __init__(self, settings: Settings, *, brief: bool = False, **facts: Any) -> None:
        self.meta = circumstances(settings.command) | facts | {"complete": False}
        self.rows: list[AnyRow] = []
        self._path, self._brief, self._wide = settings.json, brief, settings.wide
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
        """Prints and keeps rows."""
        rows = list(rows)
        self.say(*(row.line(self._wide) for row in rows))
        self.keep(rows)

    def keep(self, rows: Iterable[AnyRow]) -> None:
        """Keeps rows, and writes them: what comes later cannot lose them."""
        self.rows += rows
        self.save()

    def end(self, *notes: str) -> None:
        """Prints what comes below the table, and writes the file, if there is one."""
        self.meta["complete"] = True
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
        """Prints lines; ends the process if nobody reads them any more."""
        if self.is_first and lines:
            try:
                print(*lines, sep="\n", flush=True)
            except BrokenPipeError:
                os._exit(UNREAD)  # before other ranks can miss this one, and without a traceback

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
    """Writes ``{"meta": ..., "rows": [...]}``, a row per line, in a folder that exists.

    A reader, or whoever interrupts the run, finds the old file or the new one, whole.
    """
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(meta, indent=2).replace("\n", "\n  ")
    text = f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n'
    if Path(path).exists() and not Path(path).is_file():  # a pipe or a device
        Path(path).write_text(text)
        return
    written = Path(f"{path}.part")
    written.write_text(text)
    written.replace(path)


def versions(meta: dict[str, Any]) -> str:
    """The software, as a line of text."""
    return ", ".join(f"{name} {version}" for name, version in meta["versions"].items())


def human_bytes(count: int) -> str:
    """Formats a size: 64 KiB, 1 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} B"


def picture(text: str) -> str:
    """Parses the name of a PNG file."""
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, got {text!r}")
    return writable(text)


def writable(text: str) -> str:
    """Parses the name of a file that can be written, in a folder that exists."""
    file = Path(text)
    folder = file.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a file in a folder that exists, got {text!r}: there is no folder "
            f"{file.parent}"
        )
    places = [folder, file] if file.exists() else [folder]
    if file.is_dir() or not all(os.access(place, os.W_OK) for place in places):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return text


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Makes a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            end = "on" if most == math.inf else f"to {most}"
            raise argparse.ArgumentTypeError(f"expected a number from {least} {end}, got {text!r}")
        return int(text)

    return parse


def number_in(low: float, high: float, what: str) -> Callable[[str], float]:
    """Makes a parser of numbers above `low` and at most `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low < value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return parse
