"""Statistics of a group for Prometheus, OpenTelemetry, TensorBoard, MLflow, W&B and logs.

.. code-block:: python

    stats = group.stats()
    exporters.write_prometheus(stats, "/var/lib/node_exporter/pycomm_{rank}.prom")
    exporters.add_to_tensorboard(stats, writer, step)  # a SummaryWriter
    exporters.log_to_mlflow(stats, step)
    exporters.log_to_wandb(stats, step)
    exporters.set_opentelemetry(stats, meter)  # an opentelemetry.metrics.Meter
    exporters.log(stats, logging.getLogger("train"))

Each rank exports its own numbers, in at most 321 series. :func:`samples_of` makes them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm._runtime.rendezvous import node_identity
from pycomm.stats import OperationStats, Stats

_MOST_ROWS = 32
_RANK = "{rank}"  # in a file's name

_HELP = {
    "operations_total": "operations that have succeeded",
    "bytes_total": "bytes of their tensors",
    "p50_seconds": "median time of an operation",
    "p99_seconds": "time that 99 % of the operations do not exceed",
    "late_seconds": "mean wait of an operation for the last rank to come",
    "transfer_seconds": "time of the fastest tenth of the exchanges",
    "contention_seconds": "what the mean exchange takes beyond the fastest tenth",
    "gb_per_second": "bytes of the tensors per second of the exchange, in 1e9",
    "own_seconds_total": "time outside of operations",
    "blocked_seconds_total": "time in operations",
    "skew_score": "own time of the node's fastest rank, divided by this rank's",
    "slowest_rank": "the rank of this node with the lowest score",
    "lowest_skew_score": "its score",
    "memory_bytes": "peak of memory in a phase of a step, by kind",
}


@dataclass(frozen=True)
class Sample:
    """One number.

    Attributes:
        name: such as ``"p99_seconds"``. If it ends in ``_total``, the number only grows.
        value: the number.
        labels: what it is about: `rank`, and for operations also `operation`, `codec`,
            `device` and `size`, for memory `phase` and `kind`.
    """

    name: str
    value: float
    labels: Mapping[str, str]

    @property
    def path(self) -> str:
        """Labels and name in one: ``"pycomm/rank0/all_reduce/int8/cpu/4096/p99_seconds"``, say."""
        rank, *others = self.labels.values()
        return "/".join(["pycomm", f"rank{rank}", *others, self.name])


def samples_of(stats: Stats) -> Iterator[Sample]:
    """The numbers of a rank's statistics; times only of operations that were timed.

    If there are more than 32 kinds and sizes of operations, only the 32 that have taken the most
    time are included.
    """
    rank = {"rank": str(stats.rank)}
    for row in sorted(stats.operations, key=_time, reverse=True)[:_MOST_ROWS]:
        what = {"operation": row.operation, "codec": row.codec, "device": row.device}
        kind = {**what, "size": str(row.size)}
        for name, value in {
            "operations_total": row.count,
            "bytes_total": row.bytes,
            "p50_seconds": row.p50,
            "p99_seconds": row.p99,
            "late_seconds": row.late,
            "transfer_seconds": row.transfer,
            "contention_seconds": row.contention,
            "gb_per_second": row.gb_per_s,
        }.items():
            if not math.isnan(value):
                yield Sample(name, value, {**rank, **kind})
    if stats.rank in stats.ranks:
        times = stats.ranks[stats.rank]
        yield Sample("own_seconds_total", times.own, rank)
        yield Sample("blocked_seconds_total", times.blocked, rank)
    if stats.skew:
        slowest = min(stats.skew, key=stats.skew.__getitem__)
        yield Sample("skew_score", stats.skew[stats.rank], rank)
        yield Sample("slowest_rank", slowest, rank)
        yield Sample("lowest_skew_score", stats.skew[slowest], rank)
    for phase, peak in stats.memory.items():
        for name, size in {**peak.bytes, **peak.gauges}.items():
            yield Sample("memory_bytes", size, {**rank, "phase": phase, "kind": name})


def write_prometheus(stats: Stats, path: str | os.PathLike[str]) -> None:
    """Writes a file for the textfile collector of Prometheus' node exporter.

    A reader sees the old file or the new one. `stats` should begin with the group, not be a result
    of :meth:`pycomm.stats.Stats.since`, because Prometheus takes differences itself.

    Args:
        stats: from :meth:`pycomm.Group.stats`.
        path: the file, whose name must end in ``.prom``. ``{rank}`` in the name stands for this
            rank's number, so that each rank has its own file. Then this also removes the files
            that this node has written for ranks that the group no longer has here, for example
            since it has shrunk. Nodes may share a directory; several groups need names of their
            own. A file's first line tells its node.

    Raises:
        OSError: the file cannot be written, or an old file cannot be removed.
    """
    families: dict[str, list[str]] = {}
    for sample in samples_of(stats):
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        lines = families.setdefault(sample.name, [])
        lines.append(f"pycomm_{sample.name}{{{labels}}} {float(sample.value)!r}\n")
    text = first_line = f"# node {node_identity()}\n"
    for name, lines in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += f"# HELP pycomm_{name} {_HELP[name]}\n# TYPE pycomm_{name} {kind}\n"
        text += "".join(lines)
    pattern = Path(path)
    file = pattern.with_name(pattern.name.replace(_RANK, str(stats.rank)))
    temporary = Path(f"{file}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    if _RANK in pattern.name:
        _remove_others(pattern, stats.ranks, first_line)


def _remove_others(pattern: Path, ranks: Container[int], first_line: str) -> None:
    """Removes the files of ranks other than these that begin with this line."""
    form = re.escape(pattern.name).replace(re.escape(_RANK), "([0-9]+)")
    for file in pattern.parent.iterdir():
        found = re.fullmatch(form, file.name)
        if found is not None and int(found.group(1)) not in ranks:
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                with file.open(errors="replace") as other:
                    own = other.readline() == first_line
                if own:
                    file.unlink()


def add_to_tensorboard(stats: Stats, writer: Any, step: int) -> None:
    """Adds scalars to `writer`, a :class:`torch.utils.tensorboard.SummaryWriter`."""
    for sample in samples_of(stats):
        writer.add_scalar(sample.path, sample.value, step)


def log_to_mlflow(stats: Stats, step: int) -> None:
    """Logs metrics to MLflow's active run."""
    import mlflow

    mlflow.log_metrics(_by_path(stats), step)


def log_to_wandb(stats: Stats, step: int) -> None:
    """Logs metrics to the process's run of Weights & Biases, which ``wandb.init()`` has begun."""
    import wandb

    wandb.log(_by_path(stats), step)


def set_opentelemetry(stats: Stats, meter: Any) -> None:
    """Sets gauges of `meter`, an :class:`opentelemetry.metrics.Meter`; totals are gauges, too."""
    for sample in samples_of(stats):
        gauge = meter.create_gauge(f"pycomm.{sample.name}", description=_HELP[sample.name])
        gauge.set(float(sample.value), dict(sample.labels))


def log(stats: Stats, logger: logging.Logger, level: int = logging.INFO) -> None:
    """Logs the table of the statistics."""
    logger.log(level, "%s", stats)


def _by_path(stats: Stats) -> dict[str, float]:
    return {sample.path: float(sample.value) for sample in samples_of(stats)}


def _time(row: OperationStats) -> float:
    return row.whole.mean * row.count if row.whole.count else 0.0
