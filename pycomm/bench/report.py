"""Output of results: rows, the plain-text table of nccl-tests, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pycomm import collect_env
from pycomm.bench import floor
from pycomm.bench.cases import GIB, KIB, MIB, Case, Settings, bus_factor
from pycomm.bench.contestants import Contestant, Pycomm
from pycomm.bench.measure import Figures


@dataclass(frozen=True)
class Row:
    """One contestant's result in one case; the keys of the JSON file.

    Attributes:
        chosen: the algorithm that ``"auto"`` picked.
        wire_bytes: bytes that a rank reads from other ranks; None for other libraries.
        algbw_GBps: bytes of the tensor per time; with compression the effective bandwidth.
        wrong: wrong elements over all ranks; None if nothing was checked.
        over_floor: this row's time over the floor's; None if there is no floor for it.
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
    wire_bytes: int | None
    count: int
    iterations: int
    time_us: float
    p50_us: float
    p99_us: float
    algbw_GBps: float  # noqa: N815 - the unit
    busbw_GBps: float  # noqa: N815 - the unit
    wrong: int | None
    over_floor: float | None


def make_row(
    case: Case,
    contestant: Contestant,
    figures: Figures,
    wrong: int | None,
    least: dict[str, Any] | None,
) -> Row:
    """Makes a row from the measured figures; `least` is the floor."""
    bandwidth = case.nbytes / figures.time_us / 1e3
    floor_us = least["time_us"] if least and contestant.compression == "none" else None
    ours = contestant if isinstance(contestant, Pycomm) else None
    return Row(
        collective=case.collective,
        impl=contestant.impl,
        algorithm=contestant.algorithm,
        chosen=ours.chosen(case) if ours else None,
        device=case.device,
        dtype=str(case.dtype).removeprefix("torch."),
        op=case.op,
        compression=contestant.compression,
        ranks=case.ranks,
        buffer=contestant.buffer,
        bytes=case.nbytes,
        wire_bytes=ours.wire_bytes(case) if ours else None,
        count=case.count,
        iterations=figures.iterations,
        time_us=round(figures.time_us, 3),
        p50_us=round(figures.p50_us, 3),
        p99_us=round(figures.p99_us, 3),
        algbw_GBps=round(bandwidth, 3),
        busbw_GBps=round(bandwidth * bus_factor(case.collective, case.ranks), 3),
        wrong=wrong,
        over_floor=round(figures.time_us / floor_us, 2) if floor_us else None,
    )


def circumstances(command: str) -> dict[str, Any]:
    """Date, command, machine and software of a run; names neither host nor user."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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


def make_meta(
    settings: Settings, ranks: int, absent: dict[str, str], refused: list[str]
) -> dict[str, Any]:
    """The circumstances of a run of ranks."""
    return {
        **circumstances(settings.command),
        "ranks": ranks,
        "feedback": settings.feedback,
        "absent_peers": absent,
        "refused": refused,
        "floor": [],
    }


def write_json(path: str, meta: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Writes ``{"meta": ..., "rows": [...]}``, a row per line."""
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(meta, indent=2).replace("\n", "\n  ")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f'{{\n  "meta": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


HEADER = """\
#       size        count      type  redop  impl       algorithm    buffer compression         wire        time   algbw   busbw  #wrong       p50       p99   time
#        (B)   (elements)                                                                       (B)        (us)  (GB/s)  (GB/s)               (us)      (us) /floor"""  # noqa: E501


def preamble(meta: dict[str, Any], settings: Settings) -> str:
    """The lines above the table."""
    lines = [
        f"{settings.collective}, {meta['ranks']} ranks on {place(meta)}",
        versions(meta),
        f"load {meta['load_before']:.2f}, barrier {meta['barrier_us_before']:.2f} us",
    ]
    lines += [f"no {name}: {reason}" for name, reason in meta["absent_peers"].items()]
    lines += [f"not compressed: {', '.join(meta['refused'])}"] if meta["refused"] else []
    return "\n".join(f"# {line}" for line in lines) + "\n" + HEADER


def place(meta: dict[str, Any]) -> str:
    """The machine, as a line of text."""
    return f"{meta['machine']['cores']} cores of {meta['machine']['cpu']}"


def versions(meta: dict[str, Any]) -> str:
    """The software, as a line of text."""
    return ", ".join(f"{name} {version}" for name, version in meta["versions"].items())


def format_row(row: Row) -> str:
    """Formats a line of the table."""
    op = row.op if row.collective in ("all_reduce", "reduce_scatter") else "none"
    algorithm = f"{row.algorithm}:{row.chosen}" if row.chosen else row.algorithm
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    wire = "" if row.wire_bytes is None else str(row.wire_bytes)
    over = "" if row.over_floor is None else f"{row.over_floor:.2f}"
    return (
        f"{row.bytes:12} {row.count:12} {row.dtype:>9} {op:>6}  "
        f"{row.impl:10} {algorithm:12} {row.buffer:6} {row.compression:11} {wire:>12} "
        f"{row.time_us:11.2f} {row.algbw_GBps:7.2f} {row.busbw_GBps:7.2f} {wrong:>7} "
        f"{row.p50_us:9.2f} {row.p99_us:9.2f} {over:>6}"
    ).rstrip()


def floors(found: list[dict[str, Any]], buffers: tuple[str, ...]) -> list[str]:
    """Per size, the floor of tensors on each buffer, and the time of a call of one rank."""
    lines = []
    sizes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in found:
        sizes.setdefault((row["bytes"], row["dtype"]), []).append(row)
    for (nbytes, dtype), same in sizes.items():
        words = []
        for buffer in buffers:
            least = floor.fastest(same, buffer)
            if least is not None:
                words.append(f"{buffer} {least['time_us']:,.2f} us ({least['algorithm']})")
        words += [f"{r['impl']} {r['time_us']:,.2f} us" for r in same if r["impl"] != "floor"]
        lines.append(f"floor at {human_bytes(nbytes)} {dtype}: {', '.join(words)}")
    return lines


def human_bytes(count: int) -> str:
    """Formats a size: 64 KiB, 1 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} B"


def closing(meta: dict[str, Any], settings: Settings, rows: list[Row]) -> list[str]:
    """The lines below the table."""
    return [
        *floors(meta["floor"], settings.buffers),
        f"load {meta['load_after']:.2f}, barrier {meta['barrier_us_after']:.2f} us",
        *compare(rows),
    ]


def compare(rows: list[Row]) -> list[str]:
    """Per size, our times beside others': the best peer's, and uncompressed ones."""
    return [*_compare_peers(rows), *_compare_compressed(rows)]


def _compare_peers(rows: list[Row]) -> list[str]:
    """Per size, our uncompressed time on each buffer as a ratio to the best peer's."""
    lines = []
    for what, same in _by_case(rows).items():
        peers = [row for row in same if row.impl != "pycomm"]
        for buffer in ("tensor", "window"):
            ours = [row for row in same if (row.buffer, row.compression) == (buffer, "none")]
            ours = [row for row in ours if row.impl == "pycomm"]
            if ours and peers:
                best, peer = _best(ours), _best(peers)
                times = f"pycomm {best.p50_us:,.2f} us, {peer.impl} {peer.p50_us:,.2f} us"
                ratio = f"{peer.p50_us / best.p50_us:.2f} times as fast"
                lines.append(f"{what}, {buffer}: {times}: {ratio}")
    return lines


def _compare_compressed(rows: list[Row]) -> list[str]:
    """Per size, the time of every compression as a ratio to the uncompressed one's."""
    lines = []
    for what, same in _by_case(rows).items():
        ours = [row for row in same if (row.impl, row.buffer) == ("pycomm", "tensor")]
        plain = [row for row in ours if row.compression == "none"]
        for name in dict.fromkeys(row.compression for row in ours):
            if plain and name != "none":
                best, base = _best([row for row in ours if row.compression == name]), _best(plain)
                times = f"{name} {best.p50_us:,.2f} us, uncompressed {base.p50_us:,.2f} us"
                lines.append(f"{what}: {times}: {best.p50_us / base.p50_us:.2f} times the time")
    return lines


def _by_case(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of every size, dtype and operation, by a description of these."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(f"{human_bytes(row.bytes)} {row.dtype} {row.op}", []).append(row)
    return cases


def _best(rows: list[Row]) -> Row:
    """The row of ``algorithm="auto"``, or of the fastest algorithm if that was not measured."""
    return min([row for row in rows if row.algorithm == "auto"] or rows, key=lambda row: row.p50_us)
