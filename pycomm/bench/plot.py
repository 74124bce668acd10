"""Draws results: latency and bandwidth of collectives, lines over size, or bars of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pycomm.bench.contestants import CollectiveRow
from pycomm.bench.report import MIB, TimedRow, human_bytes
from pycomm.bench.scaling import ScalingRow
from pycomm.bench.training import IN_PLOTS, OverlapRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, told apart by every kind of eye; the marks tell lines apart in print.
OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
THEIRS = {
    "gloo": "#666666",
    "mpi": "#E69F00",
    "deepspeed": "#000000",
    "nccl": "#999999",
    "symm_mem": "#F0E442",
}
MARKS = {"pycomm": "o", "gloo": "s", "mpi": "D", "deepspeed": "^", "nccl": "v", "symm_mem": "P"}
MOST_TICKS = 9
FEW = 50  # times the shortest bar, the others need a logarithmic axis

Key = tuple[str, str, str, str, str, str]


FORMS: dict[str, Callable[[int], str]] = {
    "bytes": human_bytes,
    "parameters": lambda count: f"{count / MIB:g}M",
    "ranks": str,
}


def draw(path: str, title: str, rows: Sequence[TimedRow]) -> None:
    """Writes a PNG of a table.

    Args:
        path: the file, in a folder that exists.
        title: what was measured, and where.
        rows: the results.
    """
    labels, sizes = {row.point()[0] for row in rows}, [row.point()[1] for row in rows]
    if collectives := [row for row in rows if isinstance(row, CollectiveRow)]:
        figure = _draw_collectives(collectives)
    elif overlapped := [row for row in rows if isinstance(row, OverlapRow)]:
        figure = _draw_timelines(overlapped)
    elif scaled := [row for row in rows if isinstance(row, ScalingRow)]:
        figure = _draw_scaling(scaled)
    elif all(size > 0 for size in sizes) and len(set(sizes)) > 1 and len(labels) < len(rows):
        figure = _draw_lines(rows)
    else:
        figure = _draw_bars(rows)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    save(figure, path)


def _draw_lines(rows: Sequence[TimedRow]) -> Figure:
    """The median time of every contestant over the size."""
    figure, panel = plt.subplots(figsize=(9, 5.6), layout="constrained")
    lines: dict[str, list[TimedRow]] = {}
    for row in rows:
        lines.setdefault(row.point()[0], []).append(row)
    for number, (label, line) in enumerate(lines.items()):
        sizes = [row.point()[1] for row in line]
        colour, mark = OURS[number % len(OURS)], "osD^v"[number // len(OURS) % 5]
        times = [row.p50_us for row in line]
        panel.plot(sizes, times, label=label, color=colour, marker=mark, markersize=4.5)
    panel.set(ylabel="median time in µs (lower is better)", yscale="log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    unit = rows[0].point()[2]
    _finish_panel(panel, sorted({row.point()[1] for row in rows}), FORMS[unit], unit)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw_bars(rows: Sequence[TimedRow]) -> Figure:
    """A bar as long as the median of each row, and a line from there to the 99th percentile."""
    height = 1.6 + 0.28 * len(rows)
    figure, panel = plt.subplots(figsize=(9, height), layout="constrained")
    at, medians = range(len(rows)), [row.p50_us for row in rows]
    late = [row.p99_us - row.p50_us for row in rows]
    panel.barh(at, medians, color=OURS[0], height=0.6)
    panel.errorbar(medians, at, xerr=[[0.0] * len(rows), late], fmt="none", ecolor="#666666")
    panel.set_yticks(at, _bar_labels(rows))
    panel.invert_yaxis()
    if max(medians) > FEW * min(medians) > 0:
        panel.set_xscale("log")
    panel.set_xlabel("median time in µs, and the 99th percentile (lower is better)")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    add_grid(panel)
    return figure


def _bar_labels(rows: Sequence[TimedRow]) -> list[str]:
    """The contestants, with the size where one has several."""
    points = [row.point() for row in rows]
    if len({label for label, *_ in points}) == len(rows):
        return [label for label, *_ in points]
    return [f"{label}, {FORMS[unit](size)}" for label, size, unit in points]


def _draw_scaling(rows: Sequence[ScalingRow]) -> Figure:
    """A panel for speed-up and one for efficiency, with the ideal lines."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    counts = sorted({row.ranks for row in rows})
    efficient = [row for row in rows if row.efficiency_percent is not None]
    left.plot(counts, counts, label="ideal", color="#AAAAAA", linestyle="--")
    right.axhline(100, color="#AAAAAA", linestyle="--")
    for number, label in enumerate(dict.fromkeys(row.point()[0] for row in rows)):
        colour, mark = OURS[number % len(OURS)], "osD^v"[number % 5]
        style: dict[str, Any] = {"label": label, "color": colour, "marker": mark}
        for panel, shown, figure_of in (
            (left, rows, "speedup"),
            (right, efficient, "efficiency_percent"),
        ):
            line = [row for row in shown if row.point()[0] == label]
            values = [getattr(row, figure_of) for row in line]
            panel.plot([row.ranks for row in line], values, **style)
    left.set(title="Speed-up at the same work per rank", ylabel="times one rank's work per time")
    right.set(title="Efficiency up to a rank per core or GPU", ylabel="efficiency in %")
    for panel in (left, right):
        panel.set_ylim(bottom=0)
        panel.set_xlabel("ranks")
        panel.set_xticks(counts)
        add_grid(panel)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _draw_timelines(rows: Sequence[OverlapRow]) -> Figure:
    """A panel per mode with two lanes: backward, with its gradients, and the buckets' exchanges."""
    size = (10, 1.2 + 1.9 * len(rows))
    figure, panels = plt.subplots(
        len(rows), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for row, panel in zip(rows, panels[:, 0], strict=True):
        step = row.timeline
        begin, end = step["backward_ms"]
        panel.barh("backward", end - begin, left=begin, color=OURS[0], height=0.6)
        panel.plot(step["gradients_ms"], ["backward"] * len(step["gradients_ms"]), "|k")
        for number, bucket in enumerate(step["buckets"]):
            begin, end = bucket["begin_ms"], bucket["end_ms"]
            colour = OURS[1 + number % (len(OURS) - 1)]
            panel.barh("exchange", end - begin, left=begin, color=colour, height=0.6)
            panel.plot(bucket["ready_ms"], "exchange", ">k", markersize=4)
        panel.axvline(step["end_ms"], color="#666666", linestyle="--")
        panel.set_title(f"{IN_PLOTS[row.mode]}: {row.exposed_percent:g} % exposed", fontsize=10)
        panel.invert_yaxis()
        add_grid(panel)
    panels[-1, 0].set_xlim(left=0)
    panels[-1, 0].set_xlabel("ms since the step began; | a gradient, > a bucket is handed over")
    return figure


def _draw_collectives(rows: Sequence[CollectiveRow]) -> Figure:
    """A panel for latency and one for bandwidth."""
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
        _finish_panel(panel, sorted({row.bytes for row in rows}), human_bytes, "size")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=3.2, fontsize=9)
    return figure


def save(figure: Figure, path: str) -> None:
    """Writes a figure as a PNG, in a folder that exists."""
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


def _finish_panel(panel: Axes, sizes: list[int], form: Callable[[int], str], label: str) -> None:
    """Sets up the axis of sizes, and the grid."""
    panel.set_xscale("log", base=2)
    step = -(-len(sizes) // MOST_TICKS)
    panel.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes[::-1][::step]]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(int(value))))
    panel.tick_params(axis="x", rotation=35)
    panel.set_xlabel(label)
    add_grid(panel)
