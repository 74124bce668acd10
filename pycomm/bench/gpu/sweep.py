"""Measures where one-shot and two-shot cross over, and how many blocks two-shot should have.

``python -m pycomm.bench.gpu.sweep --json FILE`` measures ranks that are threads on one GPU:
one-shot (small tensors in packets) beside two-shot, and both with several ``max_blocks``. If there
are several GPUs, it also measures a process on each.

``python -m pycomm.bench.gpu.sweep --choose FILE`` needs no GPU. It reads such a file and prints the
CUDA rows of the table in csrc/core/algorithms/select.h; with ``--write`` it rewrites them there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm.bench import cli, report
from pycomm.bench.gpu.machine import gpu, missing
from pycomm.bench.gpu.ranks import Loopback
from pycomm.bench.gpu.session import interleave
from pycomm.bench.report import KIB, MIB

PACKETS = 2 * KIB  # the largest tensor in packets: kPacketBytes of csrc/cuda/layout.h
SIZES = tuple(sorted([*(KIB << power for power in range(13)), PACKETS + 128]))
RANKS = (2, 4, 8)
ALGORITHMS = ("one_shot", "two_shot")
LARGE = 64 * MIB
BLOCKS = (4, 8, 16, 32)
ROUNDS = 11
REPEATS = 10
TABLE = Path(__file__).parents[3] / "csrc/core/algorithms/select.h"

Row = dict[str, Any]


def measure(ranks: int, nbytes: int, max_blocks: int, device: str = "cuda") -> list[Row]:
    """A row for each algorithm; their calls take turns."""
    with pycomm.LocalWorld(ranks, max_blocks=max_blocks) as world:
        calls = {
            algorithm: Loopback(world, nbytes // 4, device, repeats=REPEATS, algorithm=algorithm)
            .capture()
            .call
            for algorithm in ALGORITHMS
        }
        samples = interleave(calls, ROUNDS)
    return [
        {"among": "threads", "ranks": ranks, "bytes": nbytes, "max_blocks": max_blocks,
         "algorithm": algorithm, "time_us": round(statistics.median(taken) / REPEATS, 3)}
        for algorithm, taken in samples.items()
    ]  # fmt: skip


def measure_processes(ranks: int, least: int, most: int) -> list[Row]:
    """Rows for each algorithm and the sizes from `least`, doubled up to `most`; a GPU per rank."""
    with tempfile.TemporaryDirectory(prefix="pycomm-sweep-") as folder:
        path = Path(folder, "times.json")
        what = f"all_reduce --device cuda --ranks {ranks} -b {least} -e {most} -J {path}"
        cli.main([*what.split(), "-a", ",".join(ALGORITHMS)])
        measured = json.loads(path.read_text())["rows"]
    names = ("ranks", "bytes", "algorithm", "time_us")
    return [{"among": "processes"} | {name: row[name] for name in names} for row in measured]


def run(path: str, device: str = "cuda") -> bool:
    """Measures everything, and writes the file after each case; True if none has failed."""
    failed: dict[str, str] = {}
    meta = report.circumstances("python -m pycomm.bench.gpu.sweep") | {
        "gpu": gpu(),
        "failed": failed,
    }
    rows: list[Row] = []
    measured: list[tuple[Callable[..., list[Row]], tuple[Any, ...]]] = [
        (measure, (ranks, nbytes, max(BLOCKS), device)) for ranks in RANKS for nbytes in SIZES
    ]
    measured += [(measure, (4, LARGE, blocks, device)) for blocks in BLOCKS]
    if (gpus := torch.cuda.device_count()) > 1:
        sizes = (SIZES[0], SIZES[-1]), (PACKETS + 128, PACKETS + 128)
        measured += [(measure_processes, (min(gpus, 8), *both)) for both in sizes]
    for function, case in measured:
        try:
            found = function(*case)
        except Exception as error:
            failed[str(case)] = f"{type(error).__name__}: {error}"
            found = []
            print(f"{case} FAILED: {error}")
        for row in found:
            print("{among} {ranks} {bytes:10} {algorithm:9} {time_us:10.2f} us".format(**row))
        rows += found
        report.write_json(path, meta, rows)
    return not failed


def times_of(rows: list[Row]) -> dict[int, dict[int, dict[str, float]]]:
    """Times by ranks, bytes and algorithm; times of processes replace times of threads.

    Raises:
        ValueError: a time is missing.
    """
    times: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["among"] == "processes"):
        if row["bytes"] != LARGE:
            times[row["ranks"]][row["bytes"]][row["algorithm"]] = row["time_us"]
    for ranks, by_size in times.items():
        missing = [n for n in SIZES if by_size[n].keys() != set(ALGORITHMS)]
        if missing:
            raise ValueError(f"the results for {ranks} ranks lack tensors of {missing} bytes")
    return times


def crossovers(rows: list[Row]) -> dict[int, int]:
    """By number of ranks, the largest size up to which one-shot is never slower; 0 if none is.

    Raises:
        ValueError: a time is missing.
    """
    found = {}
    for ranks, by_size in sorted(times_of(rows).items()):
        found[ranks] = 0
        for nbytes, of in sorted(by_size.items()):
            if of["one_shot"] > of["two_shot"]:
                break
            found[ranks] = nbytes
    return found


def packet_times(rows: list[Row]) -> dict[int, tuple[float, float]]:
    """By number of ranks, one-shot's time for the largest tensor in packets, and just above."""
    return {
        ranks: (by_size[PACKETS]["one_shot"], by_size[PACKETS + 128]["one_shot"])
        for ranks, by_size in sorted(times_of(rows).items())
    }


def table(found: dict[int, int]) -> list[tuple[str, str, str]]:
    """The table's rows: most ranks, most bytes, algorithm; the first row that matches counts."""
    rows = []
    ranks = sorted(found)
    for at, most in enumerate(ranks):
        largest, last = found[most], at == len(ranks) - 1
        following = None if last else found[ranks[at + 1]]
        if largest == following:
            continue  # the next row says the same
        limit = "kAnyRanks" if last else str(most)
        if largest:
            rows.append((limit, f"{largest >> 10} << 10", "one_shot"))
        if last or (following is not None and following > largest):
            rows.append((limit, "kAnySize", "two_shot"))  # or a later row would match
    return rows


def best_blocks(rows: list[Row]) -> int | None:
    """The ``max_blocks`` with which two-shot was fastest on large tensors."""
    large = [row for row in rows if row["bytes"] == LARGE and row["algorithm"] == "two_shot"]
    return min(large, key=lambda row: row["time_us"])["max_blocks"] if large else None


def source(stored: dict[str, Any]) -> str:
    """The source text of the CUDA rows, after a line that says where they come from."""
    lines = [f"    // CUDA: measured in the memory of one {stored['meta']['gpu']['name']}."]
    lines += [
        f"    {{Device::cuda, {ranks}, {nbytes}, Algorithm::{algorithm}}},"
        for ranks, nbytes, algorithm in table(crossovers(stored["rows"]))
    ]
    return "\n".join(lines) + "\n"


def rewrite(text: str, rows: str) -> str:
    """The source text with its CUDA rows replaced."""
    changed, count = re.subn(
        r"    // CUDA: [^\n]*\n(    \{Device::cuda, [^\n]*\n)+", lambda _: rows, text
    )
    if count != 1:
        raise ValueError("the source must have one block of CUDA rows, after a line '// CUDA: ...'")
    return changed


def main(argv: list[str] | None = None) -> int:
    """Measures or prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.gpu.sweep")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--json", type=report.writable, metavar="FILE", help="measure, and write results"
    )
    what.add_argument("--choose", metavar="FILE", help="print the table that results suggest")
    parser.add_argument("--write", action="store_true", help=f"rewrite it in {TABLE.name}, too")
    options = parser.parse_args(argv)
    if options.choose:
        stored = json.loads(Path(options.choose).read_text())
        rows = source(stored)
        print(f"{rows}max_blocks of a large two-shot: {best_blocks(stored['rows'])}")
        for ranks, (packets, flags) in packet_times(stored["rows"]).items():
            print(f"{ranks} ranks, {PACKETS} bytes: {packets} us in packets, {flags} with flags")
        if options.write:
            TABLE.write_text(rewrite(TABLE.read_text(), rows))
        return 0
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    return 0 if run(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
