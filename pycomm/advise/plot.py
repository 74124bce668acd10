"""The predictions as a picture: a step over the links' rate, an all-reduce over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pycomm.advise.advice import OURS, Question, human_count, human_figure, human_rate
from pycomm.advise.constants import COMPRESSIONS
from pycomm.advise.model import ALGORITHMS, MOST_RANKS, Model
from pycomm.bench.plot import add_grid, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, as in pycomm.bench.plot.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73")
RATES = [10 ** (8 + tenth / 10) for tenth in range(31)]  # 100 Mbit/s to 100 Gbit/s


def draw(path: str, question: Question) -> None:
    """Writes a PNG with a panel for rates and one for ranks.

    Args:
        path: the file; its folder is created.
        question: the question to answer.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    for panel in (left, right):
        panel.set(xscale="log", yscale="log")  # first, because it resets ticks
    _draw_rates(left, question)
    _draw_ranks(right, question)
    for panel in (left, right):
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: _human_time(ms)))
        panel.yaxis.set_minor_formatter(NullFormatter())
        add_grid(panel)
        panel.legend(frameon=False)
    cluster = question.cluster
    title = f"{human_count(question.parameters)} parameters on {cluster.nodes} nodes"
    figure.suptitle(f"Predicted: {title}", fontsize=14, fontweight="bold")
    save(figure, path)


def _draw_rates(panel: Axes, question: Question) -> None:
    """Draws a step's time over the links' rate, for every compression."""
    for compression, colour in zip(COMPRESSIONS, COLOURS, strict=True):
        steps = [question.with_rate(rate).step(OURS, compression).seconds for rate in RATES]
        panel.plot(RATES, [1e3 * s for s in steps], label=compression, color=colour, linewidth=2.2)
    panel.axvline(question.cluster.link.rate, color="#999999", linestyle=":", label="this link")
    panel.axhline(1e3 * question.compute, color="#999999", linestyle="--", label="computation")
    panel.set_title(f"A step of pycomm, {question.cluster.ranks:,} ranks")
    panel.set(xlabel="rate of a node's link", ylabel="a step's time")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_rate(value)))


def _draw_ranks(panel: Axes, question: Question) -> None:
    """Draws the time of an uncompressed bucket's all-reduce over ranks."""
    per_node = question.cluster.most_ranks
    bucket = question.step(OURS, "none")
    elements = max(question.parameters // bucket.buckets, 1)
    nodes = [n for n in (1 << power for power in range(1, 15)) if n * per_node <= MOST_RANKS]
    for algorithm, colour in zip(ALGORITHMS, COLOURS, strict=False):
        times = []
        for count in nodes:
            cluster = replace(question.cluster, ranks=count * per_node, nodes=count)
            model = Model(cluster, question.constants)
            times.append(1e3 * model.exchange(algorithm, "none", elements).seconds)
        ranks = [count * per_node for count in nodes]
        panel.plot(ranks, times, label=algorithm, color=colour, linewidth=2.2)
    panel.axvline(question.cluster.ranks, color="#999999", linestyle=":", label="these ranks")
    panel.set_title(f"All-reduce of {elements * 4 / 1e6:,.3g} MB, {per_node} ranks to a node")
    panel.set(xlabel="ranks", ylabel="time, uncompressed")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _human_time(milliseconds: float) -> str:
    """Formats a time: 20 ms, 5 s."""
    if milliseconds >= 1e3:
        return f"{human_figure(milliseconds / 1e3)} s"
    return f"{human_figure(milliseconds)} ms"
