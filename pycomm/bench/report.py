"""How results are shown: rows, the plain-text table of nccl-tests, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pycomm import collect_env
from pycomm.bench.cases import GIB, KIB, MIB, Case, Settings, bus_factor
from pycomm.bench.contestants import Contestant, Pycomm
from pycomm.bench.measure import Figures


@dataclass(frozen=True)
class Row:
    """One contestant's result in one case; the keys of the JSON file.

    Attributes:
        chosen: what ``algorithm="auto"`` picked.
        wrong: wrong elements over all ranks; None where nothing was checked.
        floor_percent: the floor's time over this row's; None where the floor was not measured.
    """

    collective: str
    impl: str
    algorithm: str
    chosen: str | None
    device: str
    dtype: str
    op: str
    compression: str
    ranks: int
    buffer: str
    bytes: int
    count: int
    iterations: int
    time_us: float
    p50_us: float
    p99_us: float
    algbw_GBps: float  # noqa: N815 - the unit
    busbw_GBps: float  # noqa: N815 - the unit
    wrong: int | None
    floor_percent: float | None


def make_row(
    case: Case, contestant: Contestant, figures: Figures, wrong: int | None, floor_us: float | None
) -> Row:
    """Adds what follows from the measured figures."""
    bandwidth = case.nbytes / figures.time_us / 1e3
    in_window = contestant.buffer == "window"
    return Row(
        collective=case.collective,
        impl=contestant.impl,
        algorithm=contestant.algorithm,
        chosen=contestant.chosen(case) if isinstance(contestant, Pycomm) else None,
        device=case.device,
        dtype=str(case.dtype).removeprefix("torch."),
        op=case.op,
        compression="none",
        ranks=case.ranks,
        buffer=contestant.buffer,
        bytes=case.nbytes,
        count=case.count,
        iterations=figures.iterations,
        time_us=round(figures.time_us, 3),
        p50_us=round(figures.p50_us, 3),
        p99_us=round(figures.p99_us, 3),
        algbw_GBps=round(bandwidth, 3),
        busbw_GBps=round(bandwidth * bus_factor(case.collective, case.ranks), 3),
        wrong=wrong,
        floor_percent=round(100 * floor_us / figures.time_us, 1)
        if in_window and floor_us
        else None,
    )


def make_meta(settings: Settings, ranks: int, absent: dict[str, str]) -> dict[str, Any]:
    """The circumstances of a run; names neither host nor user."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": settings.command,
        "ranks": ranks,
        "machine": {
            "cpu": collect_env.cpu_model(),
            "cores": os.cpu_count(),
            "cores_per_rank": collect_env.usable_cores(),
            "memory_GiB": collect_env.memory_gib(),
            "kernel": os.uname().release,
        },
        "versions": collect_env.versions(),
        "absent_peers": absent,
        "load_before": os.getloadavg()[0],
        "floor": [],
    }


def write_json(path: str, meta: dict[str, Any], rows: Iterable[Row]) -> None:
    """Writes ``{"meta": ..., "rows": [...]}``, a row per line."""
    lines = ",\n".join("    " + json.dumps(asdict(row)) for row in rows)
    head = json.dumps(meta, indent=2).replace("\n", "\n  ")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


HEADER = """\
#       size        count      type  redop  impl       algorithm    buffer        time   algbw   busbw  #wrong       p50       p99  floor
#        (B)   (elements)                                                        (us)  (GB/s)  (GB/s)               (us)      (us)    (%)"""  # noqa: E501


def preamble(meta: dict[str, Any], settings: Settings) -> str:
    """The lines above the table."""
    machine = meta["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    where = f"{machine['cores']} cores of {machine['cpu']}"
    lines = [
        f"{settings.collective}, {meta['ranks']} ranks on {where}",
        versions,
        f"load {meta['load_before']:.2f}, barrier {meta['barrier_us_before']:.2f} us",
    ]
    lines += [f"no {name}: {reason}" for name, reason in meta["absent_peers"].items()]
    return "\n".join(f"# {line}" for line in lines) + "\n" + HEADER


def format_row(row: Row) -> str:
    """A line of the table."""
    op = row.op if row.collective in ("all_reduce", "reduce_scatter") else "none"
    algorithm = f"{row.algorithm}:{row.chosen}" if row.chosen else row.algorithm
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    floor = "" if row.floor_percent is None else f"{row.floor_percent:.0f}"
    return (
        f"{row.bytes:12} {row.count:12} {row.dtype:>9} {op:>6}  "
        f"{row.impl:10} {algorithm:12} {row.buffer:6} "
        f"{row.time_us:11.2f} {row.algbw_GBps:7.2f} {row.busbw_GBps:7.2f} {wrong:>7} "
        f"{row.p50_us:9.2f} {row.p99_us:9.2f} {floor:>6}"
    ).rstrip()


def human_bytes(count: int) -> str:
    """A size as people say it: 64 KiB, 1 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} B"


def compare(rows: list[Row]) -> list[str]:
    """Per size, our time on each buffer as a ratio to the best peer's of the same run.

    Ours is what ``algorithm="auto"`` takes, or the best algorithm where that was not measured.
    """
    lines = []
    for key in dict.fromkeys((row.bytes, row.dtype, row.op) for row in rows):
        same = [row for row in rows if (row.bytes, row.dtype, row.op) == key]
        peers = [row for row in same if row.impl != "pycomm"]
        for buffer in ("tensor", "window"):
            ours = [row for row in same if row.impl == "pycomm" and row.buffer == buffer]
            ours = [row for row in ours if row.algorithm == "auto"] or ours
            if ours and peers:
                best, peer = (min(group, key=lambda row: row.p50_us) for group in (ours, peers))
                what = f"{human_bytes(key[0])} {key[1]} {key[2]}, {buffer}"
                times = f"pycomm {best.p50_us:,.2f} us, {peer.impl} {peer.p50_us:,.2f} us"
                lines.append(f"{what}: {times}: {peer.p50_us / best.p50_us:.2f} times as fast")
    return lines
