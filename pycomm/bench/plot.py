"""Draws results: latency and bus bandwidth over size, with a line per contestant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pycomm.bench.report import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pycomm.bench.contestants import CollectiveRow

# Okabe and Ito's colours, told apart by every kind of eye; the marks tell lines apart in print.
OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
THEIRS = {"gloo": "#666666", "mpi": "#E69F00", "deepspeed": "#000000", "nccl": "#999999"}
MARKS = {"pycomm": "o", "gloo": "s", "mpi": "D", "deepspeed": "^", "nccl": "v"}
MOST_TICKS = 9

Key = tuple[str, str, str, str, str, str]


def draw(path: str, meta: dict[str, Any], rows: Sequence[CollectiveRow]) -> None:
    """Writes a PNG with a panel for latency and one for bandwidth.

    Args:
        path: the file; its folder is created.
        meta: the circumstances of the run.
        rows: its results.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    lines = _lines(rows)
    styles = _styles(list(lines))
    for key, line in lines.items():
        sizes = [row.bytes for row in line]
        left.plot(sizes, [row.p50_us for row in line], label=_label(key, lines), **styles[key])
        right.plot(sizes, [row.busbw_GBps for row in line], **styles[key])
    left.set(title="Latency, median (lower is better)", ylabel="time in µs", yscale="log")
    right.set(title="Bus bandwidth (higher is better)", ylabel="bus bandwidth in GB/s")
    right.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for panel in (left, right):
        _finish_panel(panel, sorted({row.bytes for row in rows}))
    figure.suptitle(_title(meta, rows), fontsize=14, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=3.2, fontsize=9)
    save(figure, path)


def save(figure: Figure, path: str) -> None:
    """Writes a figure as a PNG, in a folder that is made if necessary."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def add_grid(panel: Axes) -> None:
    """Adds a light grid, and removes the lines above and to the right."""
    panel.grid(color="#DDDDDD", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _lines(rows: Sequence[CollectiveRow]) -> dict[Key, list[CollectiveRow]]:
    """The rows of every contestant, compression, dtype and operation."""
    lines: dict[Key, list[CollectiveRow]] = {}
    for row in rows:
        key = (row.impl, row.algorithm, row.buffer, row.compression, row.dtype, row.op)
        lines.setdefault(key, []).append(row)
    return lines


def _label(key: Key, lines: dict[Key, list[CollectiveRow]]) -> str:
    """The label of a line: the properties in which it differs from others."""
    impl, algorithm, buffer, compression, dtype, op = key
    words = [impl]
    if sum(other[0] == impl and other[2:] == key[2:] for other in lines) > 1:
        words.append(algorithm.replace("_", "-" if impl == "pycomm" else " "))
    if len({other[2] for other in lines if other[0] == "pycomm"}) > 1 and impl == "pycomm":
        words.append("in the window" if buffer == "window" else "ordinary tensors")
    words += [compression] if compression != "none" else []
    words += [dtype] if len({other[4] for other in lines}) > 1 else []
    words += [op] if len({other[5] for other in lines}) > 1 else []
    return ", ".join(words)


def _styles(keys: list[Key]) -> dict[Key, dict[str, Any]]:
    """A colour per algorithm of pycomm or per peer; dashes for the window, marks per library."""
    ours = list(dict.fromkeys((key[1], *key[3:]) for key in keys if key[0] == "pycomm"))
    styles: dict[Key, dict[str, Any]] = {}
    for key in keys:
        impl, algorithm, buffer = key[:3]
        if impl == "pycomm":
            colour = OURS[ours.index((algorithm, *key[3:])) % len(OURS)]
        else:
            colour = THEIRS[impl]
        dashed = buffer == "window" or algorithm == "two_buffers"
        styles[key] = {
            "color": colour,
            "marker": MARKS[impl],
            "markersize": 4.5,
            "linewidth": 2.2 if impl == "pycomm" else 1.6,
            "linestyle": "--" if dashed else "-",
        }
    return styles


def _finish_panel(panel: Axes, sizes: list[int]) -> None:
    """Sets up the axis of sizes, and the grid."""
    panel.set_xscale("log", base=2)
    step = -(-len(sizes) // MOST_TICKS)
    panel.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes[::-1][::step]]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(int(value))))
    panel.tick_params(axis="x", rotation=35)
    panel.set_xlabel("size")
    add_grid(panel)


def _title(meta: dict[str, Any], rows: Sequence[CollectiveRow]) -> str:
    collective = rows[0].collective.replace("_", "-")
    dtypes = " and ".join(dict.fromkeys(row.dtype for row in rows))
    machine = meta["machine"]
    return (
        f"{collective}, {meta['ranks']} ranks, {dtypes}: {machine['cpu']}, {machine['cores']} cores"
    )
