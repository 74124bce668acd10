"""Draws the picture of the first page from results: ``python benchmarks/overview.py FILE``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS = "#0072b2", "#9a9a9a"


def rows(file: str, **wanted: object) -> list[dict[str, Any]]:
    """The rows of a file of results that have these values."""
    found = json.loads((RESULTS / file).read_text())["rows"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def all_reduces() -> dict[str, float]:
    """Milliseconds of an all-reduce of 64 MiB on one node, medians."""
    names = {
        ("pycomm", "window"): "pycomm, in its window",
        ("pycomm", "tensor"): "pycomm",
        ("deepspeed", "tensor"): "DeepSpeed, shared memory",
        ("mpi", "tensor"): "Open MPI",
        ("gloo", "tensor"): "Gloo",
    }
    times: dict[str, float] = {}
    for row in rows("cpu_2ranks_mpi.json", bytes=64 << 20):
        name = names[row["impl"], row["buffer"]]
        times[name] = min(times.get(name, float("inf")), row["p50_us"] / 1e3)
    return {name: times[name] for name in names.values()}


def steps() -> dict[str, float]:
    """Milliseconds of a step of DistributedDataParallel between two nodes at 1 Gbit/s."""
    names = {
        "gloo PowerSGD hook": "Gloo, PowerSGD rank 1",
        "pycomm int8_hook": "pycomm, int8",
        "gloo bf16 hook": "Gloo, bf16",
        "gloo": "Gloo",
    }
    found = rows("nodes.json", case="training", rate="1gbit", nodes=2)
    times = {row["contestant"]: row["time_us"] / 1e3 for row in found}
    return {name: times[contestant] for contestant, name in names.items()}


def main() -> None:
    """Draws both tables as bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", help="the picture, as a PNG")
    file = parser.parse_args().file
    panels = {
        "All-reduce of 64 MiB in ms\n2 ranks on one node, float32": all_reduces(),
        "Training step in ms, 10M parameters\n2 nodes at 1 Gbit/s": steps(),
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 2.9), layout="constrained")
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        names = list(times)[::-1]
        colors = [OURS if name.startswith("pycomm") else OTHERS for name in names]
        bars = axis.barh(names, [times[name] for name in names], color=colors)
        axis.bar_label(bars, fmt="{:.3g}", padding=3)
        axis.set_title(title, fontsize=11, loc="left")
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.xaxis.set_visible(False)
        axis.margins(x=0.12)
    figure.savefig(file, dpi=160)


if __name__ == "__main__":
    main()
