"""Makes a table of algorithms from times between nodes: ``python -m pycomm.bench choose``.

``pycomm.init(algorithms=...)`` reads the table (pycomm/_runtime/algorithm_table.py).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycomm._runtime.algorithm_table import ALGORITHMS, Row
from pycomm.bench.report import Settings

# A ring or tree must be faster than two-shot by more than this. Where they send the same bytes,
# measurements differ by up to 4 % (benchmarks/results/nodes_algorithms.json).
MARGIN = 1.05

Times = dict[int, dict[str, float]]  # by bytes and algorithm


@dataclass(frozen=True, kw_only=True)
class ChooseSettings(Settings):
    """What ``python -m pycomm.bench choose -h`` describes.

    Attributes:
        results: files that ``python -m pycomm.bench all_reduce -J`` has written.
        write: the table's file.
    """

    results: tuple[str, ...]
    write: str | None = None


def run(settings: ChooseSettings) -> None:
    """Prints the times and the table, and writes it if asked."""
    try:
        measured = read(settings.results)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    for (nodes, ranks), times in measured.items():
        print(f"# {nodes} nodes, {ranks} ranks: times in us")
        print("#     bytes", *(f"{algorithm:>12}" for algorithm in ALGORITHMS))
        for (nbytes, of), chosen in zip(times.items(), choices(times), strict=True):
            print(f"{nbytes:11}", *(f"{of[name]:12.2f}" for name in ALGORITHMS), f"  {chosen}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table(measured))
    text = f"[\n{lines}\n]\n"
    print(text, end="")
    if settings.write is not None:
        Path(settings.write).write_text(text, encoding="utf-8")


def read(paths: tuple[str, ...]) -> dict[tuple[int, int], Times]:
    """Times by the numbers of nodes and ranks, in ascending order.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file lacks something, or has wrong results.
    """
    found = {}
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        try:
            stored = json.loads(text)
            nodes, ranks = stored["meta"].get("nodes", 1), stored["meta"]["ranks"]
            rows = stored["rows"]
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"{path} must be a file that -J has written") from None
        if nodes < 2:
            raise ValueError(f"{path} must have times between nodes, got those of one node")
        if (nodes, ranks) in found:
            raise ValueError(f"{path} is the second file of {nodes} nodes with {ranks} ranks")
        found[nodes, ranks] = times_of(path, rows)
    return dict(sorted(found.items()))


def times_of(path: str, rows: list[dict[str, Any]]) -> Times:
    """Times of uncompressed all-reduces of CPU tensors, added up over dtypes, ops and buffers."""
    times: defaultdict[int, defaultdict[str, dict[Any, float]]]
    times = defaultdict(lambda: defaultdict(dict))
    ours = {"collective": "all_reduce", "impl": "pycomm", "compression": "none", "device": "cpu"}
    for row in rows:
        if row["algorithm"] in ALGORITHMS and ours.items() <= row.items():
            if row["wrong"]:
                raise ValueError(f"{path} has wrong results: {row}")
            case = row["dtype"], row["op"], row["buffer"]
            times[row["bytes"]][row["algorithm"]][case] = row["time_us"]
    if len(times) < 2:
        raise ValueError(f"{path} must have all-reduces of at least two sizes, got {len(times)}")
    for nbytes, by_algorithm in times.items():
        lacking = [
            name
            for name in ALGORITHMS
            if by_algorithm[name].keys() != by_algorithm["two_shot"].keys()
        ]
        if lacking or not by_algorithm["two_shot"]:
            raise ValueError(
                f"{path} must have the same cases of {', '.join(ALGORITHMS)}, "
                f"but differs at {nbytes} bytes"
            )
    return {
        nbytes: {name: sum(cases.values()) for name, cases in by_algorithm.items()}
        for nbytes, by_algorithm in sorted(times.items())
    }


def choices(times: Times) -> list[str]:
    """The algorithm for each size, in ascending order.

    A ring or tree is chosen only if it wins at the next smaller or larger size, too. Between the
    two, the choice of a size changes at the next one only by the margin.
    """
    of_sizes = [times[nbytes] for nbytes in sorted(times)]
    wins = [
        {name for name, time in of.items() if time * MARGIN < of["two_shot"]} for of in of_sizes
    ]
    chosen = ["two_shot"]
    for i, of in enumerate(of_sizes):
        beside = set().union(*wins[max(i - 1, 0) : i], *wins[i + 1 : i + 2])
        able = (wins[i] & beside) or {"two_shot"}
        best, before = min(able, key=of.__getitem__), chosen[-1]
        stays = before in able and of[before] <= of[best] * MARGIN
        chosen.append(before if stays else best)
    return chosen[1:]


def table(measured: dict[tuple[int, int], Times]) -> list[Row]:
    """The table's rows, in which a range ends at the geometric mean of two measured sizes.

    Sizes beyond the measured ones have the algorithm of the smallest or the largest, and groups
    larger than the measured ones have no row.
    """
    rows: list[Row] = []
    for (nodes, ranks), times in measured.items():
        limits = {"nodes": nodes, "ranks": ranks}
        chosen = choices(times)
        for (size, algorithm), (larger, following) in pairwise(zip(times, chosen, strict=True)):
            if algorithm != following:
                rows.append({**limits, "bytes": math.isqrt(size * larger), "algorithm": algorithm})
        rows.append({**limits, "algorithm": chosen[-1]})
    return rows
