"""Training steps of more and more ranks: ``python -m pycomm.bench scaling``.

Every rank computes the same at any number of ranks (weak scaling), so a step would ideally always
take the same time. Steps without communication run in the same rounds: the time by which a step is
longer is that of its communication. Ranks that share a core or a GPU take turns, so there is an
efficiency only up to as many ranks as cores or GPUs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import pycomm
from pycomm import collect_env
from pycomm.bench import launch, measure, training, verify
from pycomm.bench.report import MIB, Column, Results, Settings, TimedRow, cell, spread

ALONE = "none"  # steps without communication


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(Settings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench scaling -h``.

    Attributes:
        counts: the numbers of ranks, from the smallest on.
        parameters: approximate parameters of the model.
        batch: rows of each rank.
        modes: some of `training.MODES`.
        device: where the model is.
        timeout: seconds to wait for a rank.
    """

    counts: tuple[int, ...]
    parameters: int
    batch: int
    modes: tuple[str, ...]
    device: str
    timeout: float


@dataclass(frozen=True)
class ScalingRow(TimedRow):
    """Steps of one number of ranks with one way to exchange gradients.

    Attributes:
        name: as in a row of ``step``, or ``"none"`` without communication.
        speedup: the work of all ranks per time, over that of one rank without communication.
        efficiency_percent: `speedup` per rank; None if several ranks share a core or a GPU.
        communication_percent: the part of a step by which it is longer than without communication.
        memory_MiB: what the rank that uses most holds for this way, with the model, between steps:
            resident memory of its process, or its part of the memory in use on its GPU.
        wrong: the number of wrong gradients, over all ranks.
    """

    name: str
    ranks: int
    parameters: int
    batch: int
    device: str
    speedup: float
    efficiency_percent: float | None
    communication_percent: float
    memory_MiB: float  # noqa: N815 - the unit
    wrong: int

    columns: ClassVar[tuple[Column, ...]] = (
        Column("ranks", "", 7, cell("ranks")),
        Column("name", "", 8, cell("name")),
        Column("step", "(ms)", 10, cell("time_us", ".2f", 1e3)),
        Column("speed-up", "", 8, cell("speedup", ".2f")),
        Column("efficiency", "(%)", 10, cell("efficiency_percent", ".1f", absent="-")),
        Column("communication", "(%)", 13, cell("communication_percent", ".1f")),
        Column("memory", "(MiB)", 8, cell("memory_MiB", ".1f")),
        Column("#wrong", "", 6, cell("wrong")),
        *spread("ms"),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return training.IN_PLOTS.get(self.name, "without communication"), self.ranks, "ranks"


def run(settings: ScalingSettings) -> Results[ScalingRow]:
    """Starts each number of ranks in turn, prints and writes."""
    if launch.under_torchrun() or launch.under_mpi():
        raise SystemExit("scaling starts its ranks itself: run it without torchrun and mpirun")
    places = collect_env.usable_cores() if settings.device == "cpu" else torch.cuda.device_count()
    results: Results[ScalingRow] = Results(settings, places=places, absent_peers={})
    gpus = f" on {places} GPUs" if settings.device == "cuda" else ""
    results.begin(
        f"scaling of training steps{gpus}; {results.place}",
        ScalingRow.header(settings.wide),
        f"{settings.parameters / MIB:g}M parameters, {settings.batch} rows per rank",
    )
    base_us = 0.0
    for count in settings.counts:
        found = _measure(settings, count)
        for name, reason in found["absent"].items():
            results.meta["absent_peers"].setdefault(name, reason)
        base_us = base_us or found["figures"][ALONE]["time_us"]
        results.add(_rows(settings, count, found, base_us, places))
    results.end(*(f"no {name}: {why}" for name, why in results.meta["absent_peers"].items()))
    return results


def _rows(
    settings: ScalingSettings, ranks: int, found: dict[str, Any], base_us: float, places: int
) -> list[ScalingRow]:
    alone_us = found["figures"][ALONE]["time_us"]
    rows = []
    for name, columns in found["figures"].items():
        time_us = columns["time_us"]
        share = base_us / time_us
        rows.append(
            ScalingRow(
                name=name,
                ranks=ranks,
                parameters=found["parameters"],
                batch=settings.batch,
                device=settings.device,
                speedup=round(ranks * share, 3),
                efficiency_percent=round(100 * share, 1) if ranks <= places else None,
                communication_percent=round(100 * (time_us - alone_us) / time_us, 1),
                memory_MiB=round(found["memory"][name] / MIB, 1),
                wrong=found["wrong"][name],
                **columns,
            )
        )
    return rows


def _measure(settings: ScalingSettings, ranks: int) -> dict[str, Any]:
    """What :func:`time_steps` finds with so many ranks."""
    with tempfile.TemporaryDirectory(prefix="pycomm-scaling-") as folder:
        path = Path(folder, "found.json")
        options: dict[str, Any] = {"timeout": settings.timeout, "device": settings.device}
        launch.run(time_steps, settings, str(path), ranks=ranks, **options)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def time_steps(settings: ScalingSettings, path: str) -> None:
    """Times all ways to exchange in the same rounds; rank 0 writes what it finds."""
    with pycomm.init(timeout=settings.timeout) as group:
        each = training.TrainingSettings(
            ranks=group.size,
            parameters=settings.parameters,
            batch=settings.batch,
            device=settings.device,
        )
        peer, absent = training.find_peer(each, group)
        names = {ALONE: "plain"} | {name: name for name in (*settings.modes, *peer)}
        training.make("plain", each, group)  # loads what all of them need
        trainees, memory = {}, {}
        for name, trainee in names.items():
            before = _memory_in_use(settings.device, group)
            trainees[name] = training.make(trainee, each, group)
            memory[name] = _largest(_memory_in_use(settings.device, group) - before)
        alone = trainees[ALONE]
        wrong = {
            name: 0 if name == ALONE else verify.count_wrong_gradients(one.model, alone.model)
            for name, one in trainees.items()
        }
        calls = {name: one.step for name, one in trainees.items()}
        figures = measure.compete(group, calls, settings, settings.device)
        if group.rank == 0:
            found = {
                "figures": {name: one.columns() for name, one in figures.items()},
                "memory": memory,
                "wrong": wrong,
                "absent": absent,
                "parameters": alone.parameters,
            }
            Path(path).write_text(json.dumps(found))


def _memory_in_use(device: str, group: pycomm.Group) -> float:
    """Bytes of this process, or of its GPU per rank on it, when no rank is at work.

    What torch and libc have kept of freed memory does not count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if device == "cuda":
        torch.cuda.empty_cache()
    pycomm.barrier(group=group)
    if device == "cpu":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used: float = pages * os.sysconf("SC_PAGE_SIZE")
    else:
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / -(-group.size // torch.cuda.device_count())
    pycomm.barrier(group=group)
    return used


def _largest(value: float) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
