"""Measures where one-shot and two-shot cross over, and how many blocks two-shot should have.

``python -m pycomm.bench.gpu.sweep --json FILE`` measures ranks that are threads on one GPU:
one-shot (small tensors in packets) beside two-shot, and both with several ``max_blocks``.

``python -m pycomm.bench.gpu.sweep --choose FILE`` needs no GPU. It reads such a file and prints the
CUDA rows of the table in csrc/core/algorithms/select.h; with ``--write`` it rewrites them there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pycomm
from pycomm.bench import report
from pycomm.bench.cases import KIB, MIB
from pycomm.bench.gpu.cli import interleave
from pycomm.bench.gpu.machine import gpu, missing
from pycomm.bench.gpu.ranks import Loopback

SIZES = tuple(KIB << power for power in range(13))
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
        {"ranks": ranks, "bytes": nbytes, "max_blocks": max_blocks, "algorithm": algorithm,
         "time_us": round(statistics.median(taken) / REPEATS, 3)}
        for algorithm, taken in samples.items()
    ]  # fmt: skip


def run(path: str, device: str = "cuda") -> None:
    """Measures everything, and writes the file after each size."""
    meta = report.circumstances("python -m pycomm.bench.gpu.sweep") | {"gpu": gpu()}
    rows: list[Row] = []
    cases = [(ranks, nbytes, max(BLOCKS)) for ranks in RANKS for nbytes in SIZES]
    cases += [(4, LARGE, blocks) for blocks in BLOCKS]
    for case in cases:
        rows += measure(*case, device)
        for row in rows[-len(ALGORITHMS) :]:
            print(
                "{ranks} {bytes:10} {max_blocks:3} {algorithm:9} {time_us:10.2f} us".format(**row)
            )
        report.write_json(path, meta, rows)


def crossovers(rows: list[Row]) -> dict[int, int]:
    """By number of ranks, the largest size up to which one-shot is never slower; 0 if none is."""
    times: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["bytes"] != LARGE:
            times[row["ranks"]][row["bytes"]][row["algorithm"]] = row["time_us"]
    found = {}
    for ranks, by_size in sorted(times.items()):
        found[ranks] = 0
        for nbytes, of in sorted(by_size.items()):
            if of["one_shot"] > of["two_shot"]:
                break
            found[ranks] = nbytes
    return found


def table(found: dict[int, int]) -> list[tuple[str, str, str]]:
    """The table's rows: the most ranks, the most bytes, the algorithm; the first match counts."""
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
    """The CUDA rows as they stand in the source, after a line that says where they come from."""
    lines = [f"    // CUDA: measured in the memory of one {stored['meta']['gpu']['name']}."]
    lines += [
        f"    {{Device::cuda, {ranks}, {nbytes}, Algorithm::{algorithm}}},"
        for ranks, nbytes, algorithm in table(crossovers(stored["rows"]))
    ]
    return "\n".join(lines) + "\n"


def rewrite(text: str, rows: str) -> str:
    """The source with other CUDA rows."""
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
    what.add_argument("--json", metavar="FILE", help="measure, and write results")
    what.add_argument("--choose", metavar="FILE", help="print the table that results suggest")
    parser.add_argument("--write", action="store_true", help=f"rewrite it in {TABLE.name}, too")
    options = parser.parse_args(argv)
    if options.choose:
        stored = json.loads(Path(options.choose).read_text())
        rows = source(stored)
        print(f"{rows}max_blocks of a large two-shot: {best_blocks(stored['rows'])}")
        if options.write:
            TABLE.write_text(rewrite(TABLE.read_text(), rows))
        return 0
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    run(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
