"""Counts all-reduces between 2 to 512 nodes, and draws which algorithm takes least time in a model.

``python -m benchmarks.nodes.counted JSON PNG``. Nothing is measured: counted.cpp runs the core's
own schedules for every node and plays them in the order of time. In the model, a node's core takes
half of the advisor's ``link.message`` to send a message and half to receive one. A message arrives
a latency after its last byte has been sent, and a node's link carries one message at a time in each
direction. Sums take no time. Handshakes are counted.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch, Rectangle

from pycomm.advise import constants
from pycomm.bench.report import human_bytes

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("counted.cpp")
NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZES = tuple(4**power for power in range(3, 14))  # 64 bytes to 64 MiB
LATENCIES_MS = (0.1, 2)
GBITS = (1, 25)
COLORS = {"two_shot": "#56B4E9", "ring": "#E69F00", "tree": "#009E73"}
NAMES = {"two_shot": "two-shot", "ring": "ring", "tree": "tree"}


@dataclass(frozen=True)
class Row:
    """An all-reduce of one size, with one rank per node.

    Attributes:
        nodes: the number of nodes.
        nbytes: the tensor's size.
        latency_ms, gbit: of every link.
        algorithm: its name.
        ms: the time in the model, until the last node has the result.
        messages: the most that a node sends.
        in_sequence: the longest chain of messages of which each waits for the one before it.
        sent: the most bytes that a node sends.
    """

    nodes: int
    nbytes: int
    latency_ms: float
    gbit: float
    algorithm: str
    ms: float
    messages: int
    in_sequence: int
    sent: int


def count(message: float) -> list[Row]:
    """All rows; `message` is the seconds of cores that a message takes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/counted"
        compiler = ["c++", "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", str(SOURCE), "-o", program]
        subprocess.run(compiler, check=True)
        networks = [(latency, gbit) for latency in LATENCIES_MS for gbit in GBITS]
        costs = [cost for ms, gbit in networks for cost in (ms / 1e3, 8 / gbit / 1e9)]
        for nodes, nbytes in itertools.product(NODES, SIZES):
            command = [program, *map(str, (nodes, nbytes, message, *costs))]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for name, network, seconds, *counts in map(str.split, output.splitlines()):
                case = (nodes, nbytes, *networks[int(network)], name)
                rows.append(Row(*case, round(1e3 * float(seconds), 4), *map(int, counts)))
    return rows


def draw(path: str, rows: list[Row]) -> None:
    """Writes a PNG: which algorithm takes least time, and how much longer two-shot takes."""
    times = {(r.latency_ms, r.gbit, r.nodes, r.nbytes, r.algorithm): r.ms for r in rows}
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained")
    cases = [(latency, gbit) for latency in LATENCIES_MS for gbit in GBITS]
    for axis, (latency, gbit) in zip(axes.flat, cases, strict=True):
        for y, nodes in enumerate(NODES):
            for x, nbytes in enumerate(SIZES):
                found = {name: times[latency, gbit, nodes, nbytes, name] for name in COLORS}
                best = min(found, key=lambda name: found[name])
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLORS[best], lw=0))
                ratio = found["two_shot"] / found[best]
                if ratio >= 1.05:
                    label = f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
                    axis.text(x, y, label, ha="center", va="center", fontsize=8)
        axis.set_xlim(-0.5, len(SIZES) - 0.5)
        axis.set_ylim(-0.5, len(NODES) - 0.5)
        axis.set_xticks(range(len(SIZES)), [human_bytes(n) for n in SIZES], rotation=45, fontsize=8)
        axis.set_yticks(range(len(NODES)), [str(n) for n in NODES], fontsize=8)
        axis.set_title(f"{latency:g} ms, {gbit} Gbit/s", loc="left", fontsize=11)
        axis.set_ylabel("nodes, one rank each")
    handles = [Patch(color=color, label=NAMES[name]) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        "Which all-reduce takes least time between nodes: counted in a model, not measured\n"
        "The number says how many times longer two-shot takes there, if at least 1.05",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Writes the file, and then the picture."""
    file, picture = sys.argv[1:]
    message = constants.load()["link.message"]
    rows = count(message)
    what = "counted in the model that benchmarks/nodes/counted.py describes; nothing is measured"
    meta = {"what": what, "message_us": round(1e6 * message, 2)}
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    Path(file).write_text(f'{{"meta": {json.dumps(meta)},\n"rows": [\n{lines}\n]}}\n')
    draw(picture, rows)


if __name__ == "__main__":
    main()
