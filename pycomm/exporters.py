"""Statistics of a group for Prometheus, TensorBoard, MLflow and logs.

.. code-block:: python

    stats = group.stats()
    exporters.write_prometheus(stats, f"/var/lib/node_exporter/pycomm_{group.rank}.prom")
    exporters.add_to_tensorboard(stats, writer, step)  # a SummaryWriter
    exporters.log_to_mlflow(stats, step)
    exporters.log(stats, logging.getLogger("train"))

Each rank exports its own numbers, in at most 261 series. :func:`samples_of` makes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.stats import OperationStats, Stats

_MOST_ROWS = 32

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
}


@dataclass(frozen=True)
class Sample:
    """One number.

    Attributes:
        name: such as ``"p99_seconds"``. If it ends in ``_total``, the number only grows.
        value: the number.
        labels: what it is about: `rank`, and for operations also `operation`, `codec` and `size`.
    """

    name: str
    value: float
    labels: Mapping[str, str]

    @property
    def path(self) -> str:
        """Labels and name in one, such as ``"pycomm/rank0/all_reduce/int8/4096/p99_seconds"``."""
        rank, *others = self.labels.values()
        return "/".join(["pycomm", f"rank{rank}", *others, self.name])


def samples_of(stats: Stats) -> Iterator[Sample]:
    """The numbers of a rank's statistics.

    Of more than 32 kinds and sizes of operations, those come that have taken the most time.
    """
    rank = {"rank": str(stats.rank)}
    for row in sorted(stats.operations, key=_time, reverse=True)[:_MOST_ROWS]:
        kind = {"operation": row.operation, "codec": row.codec, "size": str(row.size)}
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


def write_prometheus(stats: Stats, path: str | os.PathLike[str]) -> None:
    """Writes a file for the textfile collector of Prometheus' node exporter.

    A reader sees the old file or the new one. The name must end in ``.prom``, and each rank needs a
    file of its own. Let `stats` begin with the group, as Prometheus takes differences itself.

    Raises:
        OSError: the file cannot be written.
    """
    families: dict[str, list[str]] = {}
    for sample in samples_of(stats):
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        lines = families.setdefault(sample.name, [])
        lines.append(f"pycomm_{sample.name}{{{labels}}} {float(sample.value)!r}\n")
    text = ""
    for name, lines in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += f"# HELP pycomm_{name} {_HELP[name]}\n# TYPE pycomm_{name} {kind}\n"
        text += "".join(lines)
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def add_to_tensorboard(stats: Stats, writer: Any, step: int) -> None:
    """Adds scalars to `writer`, a :class:`torch.utils.tensorboard.SummaryWriter`."""
    for sample in samples_of(stats):
        writer.add_scalar(sample.path, sample.value, step)


def log_to_mlflow(stats: Stats, step: int) -> None:
    """Logs metrics to MLflow's active run."""
    import mlflow

    mlflow.log_metrics({sample.path: float(sample.value) for sample in samples_of(stats)}, step)


def log(stats: Stats, logger: logging.Logger, level: int = logging.INFO) -> None:
    """Logs the table of the statistics."""
    logger.log(level, "%s", stats)


def _time(row: OperationStats) -> float:
    return row.whole.mean * row.count
