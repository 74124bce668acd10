"""Predicts times on GPUs from the figures of hot loops: ``python -m sass.model`` in tests/cpp.

A pass takes the longest of three: its bytes at the speed of a copy, its instructions at the rate at
which multiprocessors issue them, and its waits for memory. That is a lower bound of the time, so a
share is an upper bound. It knows nothing of caches, of conflicts, or of what else a kernel does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sass import limits
from sass.hot import HOT_LOOPS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "cuda_predicted.json"
PAGE = ROOT / "docs/lab/performance.md"
BEGIN, END = "<!-- predicted: made by python -m sass.model -->\n", "<!-- end of predicted -->\n"

ISSUED = 4 * 32  # threads' instructions that a multiprocessor issues in a cycle
COPY = 4.3 / 4.8  # of the data sheet's bandwidth, by docs/lab/performance.md's figure of an H200
LATENCY_US = 0.7  # of a load from memory under load, an assumption
# Assumptions for a device that does little else.
TRIP_US = 0.3  # from a load or a fence to the L2 cache and back
HOST_US = 1.0  # the same to memory of the host
LAUNCH_US = 1.3  # from one kernel of a graph to the next
LANES, RANKS = 32, 4  # blocks of a rank, by default; ranks of the benchmark


@dataclass(frozen=True)
class Gpu:
    """What data sheets say: bandwidth in TB/s, multiprocessors, clock in GHz."""

    architecture: str
    bandwidth: float
    multiprocessors: int
    clock: float
    source: str


# Clocks are FP32 rates divided by units: 64 per multiprocessor on the A100, else 128.
GPUS = {
    "A100": Gpu("80", 2.039, 108, 1.41, "NVIDIA A100 80GB SXM data sheet, 19.5 TFLOPS; 108 SMs"),
    "H100": Gpu("90", 3.35, 132, 1.98, "NVIDIA H100 SXM data sheet, 67 TFLOPS; 132 SMs"),
    "H200": Gpu("90", 4.8, 132, 1.98, "NVIDIA H200 data sheet, 67 TFLOPS; 132 SMs"),
    "B200": Gpu("100", 8.0, 148, 1.98, "NVIDIA HGX B200 data sheet, 75 TFLOPS; 148 SMs"),
}


@dataclass(frozen=True)
class Row:
    """A row of docs/lab/performance.md.

    Attributes:
        passes: its hot loops, and how often each goes over all elements.
        ideal: bytes per element that the row must move.
        goal: the least share of a copy's speed; 0 if there is none.
        blocks: of a launch; 0 if the host launches for all multiprocessors.
        base: the row that this one may take `times` as long as.
    """

    passes: Mapping[str, int]
    ideal: float
    goal: float = 0.0
    blocks: int = 0
    base: str = ""
    times: float = 0.0


@dataclass(frozen=True)
class Chain:
    """A row that consists of waits, each of which needs the one before; counted by hand.

    Attributes:
        trips: to the L2 cache.
        beside: trips to memory of the host, at the same time.
        goal: in microseconds.
    """

    trips: int
    beside: int
    goal: float

    @property
    def time(self) -> float:
        """Microseconds."""
        return LAUNCH_US + max(self.trips * TRIP_US, self.beside * HOST_US)

    def cell(self) -> str:
        """What a table says of the row."""
        text = f"{self.time:.1f} us"
        return text if self.time <= self.goal else f"{text}, **missed**: waits"


def _full(step: str, norm: str, ideal: float) -> Row:
    return Row({norm: 1, step: 1}, ideal, base=step, times=1.15)


ROWS = {
    "adamw_fp32": Row({"adamw_fp32": 1}, 28, 0.9),
    "adamw_bf16_remainder": Row({"adamw_bf16_remainder": 1}, 26, 0.9),
    "adamw_bf16_remainder_bf16_states": Row({"adamw_bf16_remainder_bf16_states": 1}, 18, 0.9),
    "adamw_8bit_states": Row({"adamw_8bit_states": 1}, 14.06, 0.8),
    "adamw_fp32_full": _full("adamw_fp32", "grad_norm_fp32", 32),
    "adamw_bf16_remainder_full": _full("adamw_bf16_remainder", "grad_norm_bf16", 28),
    "adamw_bf16_remainder_bf16_states_full": _full(
        "adamw_bf16_remainder_bf16_states", "grad_norm_bf16", 20
    ),
    "adamw_8bit_states_full": _full("adamw_8bit_states", "grad_norm_bf16", 16.06),
    "int8_encode": Row({"int8_encode": 1}, 5.02, 0.85),
    "int8_decode": Row({"int8_decode": 1}, 5.02),
    "int8_decode_add": Row({"int8_decode_add": RANKS}, 36.06, 0.85),
    "topk_select": Row({"topk_collect": 1}, 4, 0.7),
    "all_reduce_loopback": Row({"reduce_4_ranks": 1}, 32, 0.8, blocks=LANES * RANKS),
}
# The lane's state, the tensor and the windows' addresses; the packets' way to the other ranks; the
# load that finds theirs; the announcement's release. Beside them, the look for an abort.
PACKETS = Chain(trips=4, beside=1, goal=5.0)
CHAINS = {"all_reduce_1KiB": PACKETS, "all_reduce_1KiB_replay": PACKETS}
HOT = {one.name: one for one in HOT_LOOPS}


@dataclass
class Prediction:
    """How long a row of the table takes on one GPU.

    Attributes:
        time: picoseconds per element.
        parts: the same by what limits each pass.
    """

    time: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, times: Mapping[str, float], often: int) -> None:
        """Adds a pass, of which the longest counts."""
        longest = max(times, key=lambda part: times[part])
        self.parts[longest] = self.parts.get(longest, 0) + often * times[longest]
        self.time += often * times[longest]

    @property
    def limited_by(self) -> str:
        """What takes most of the time."""
        return max(self.parts, key=lambda part: self.parts[part])


def predict(row: Row, gpu: Gpu, figures: limits.Limits) -> Prediction:
    """The prediction for a row on a GPU."""
    prediction = Prediction()
    for name, often in row.passes.items():
        hot, one = HOT[name], figures[name]
        per_device = min(hot.launched or one["blocks"], one["blocks"]) * gpu.multiprocessors
        blocks = min(row.blocks or per_device, one["blocks"] * gpu.multiprocessors)
        busy = min(blocks, gpu.multiprocessors)
        moved = row.ideal if len(row.passes) == often == 1 else hot.reads + hot.writes
        at_once = hot.elements * one["threads"] * blocks
        prediction.add(
            {
                "memory": moved / (gpu.bandwidth * COPY),
                "instructions": 1e3 * one["instructions"] / (busy * ISSUED * gpu.clock),
                "waits": 1e6 * one["rounds"] * LATENCY_US / at_once,
            },
            often,
        )
    return prediction


def predictions() -> dict[str, dict[str, dict[str, float | str]]]:
    """All rows on all GPUs, from the limits' files."""
    made: dict[str, dict[str, dict[str, float | str]]] = {}
    for name, row in ROWS.items():
        made[name] = {}
        for gpu_name, gpu in GPUS.items():
            _, figures = limits.read(gpu.architecture)
            found = predict(row, gpu, figures)
            share = row.ideal / (gpu.bandwidth * COPY) / found.time
            made[name][gpu_name] = {
                "ps_per_element": round(found.time, 3),
                "share": round(share, 3),
                "limited_by": found.limited_by,
            }
            if row.base:
                over = found.time / predict(ROWS[row.base], gpu, figures).time
                made[name][gpu_name]["over"] = round(over, 3)
    return made


def cell(row: Row, found: Mapping[str, float | str]) -> str:
    """What a table says of a row: its figure, and what is in the way of its goal."""
    if row.base:
        text, met = f"{found['over']:.2f} times", float(found["over"]) <= row.times
    else:
        text, met = f"{float(found['share']):.0%}", float(found["share"]) >= row.goal
    text = text.replace("%", " %")
    return text if met else f"{text}, **missed**: {found['limited_by']}"


def table(made: Mapping[str, Mapping[str, Mapping[str, float | str]]]) -> str:
    """The table of all GPUs."""
    lines = [f"| predicted | goal | {' | '.join(GPUS)} |", "|---" * (2 + len(GPUS)) + "|"]
    for name, row in ROWS.items():
        goal = f"{row.times} times" if row.base else f"{row.goal:.0%}".replace("%", " %")
        cells = [cell(row, made[name][gpu]) for gpu in GPUS]
        goal = goal if row.base or row.goal else "-"
        lines.append(f"| `{name}` | {goal} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_predictions(page: str, made: Mapping[str, Mapping[str, Mapping[str, float | str]]]) -> str:
    """A page with the table of all GPUs, and with the H200's predictions beside the rows."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)

    def beside(line: re.Match[str]) -> str:
        cells = line[0].split(" | ")
        name = cells[0].strip("| `")
        if name in ROWS:
            cells[5] = cell(ROWS[name], made[name]["H200"])
        elif name in CHAINS:
            cells[5] = CHAINS[name].cell()
        return " | ".join(cells)

    head = re.sub(r"^\| `.*$", beside, head, flags=re.MULTILINE)
    return head + BEGIN + table(made) + END + tail


def main() -> None:
    """Writes the predictions and the tables."""
    made = predictions()
    sources = {name: gpu.source for name, gpu in GPUS.items()}
    waits = {name: round(chain.time, 3) for name, chain in CHAINS.items()}
    stored = {"predicted": made, "waits_us": waits, "gpus": sources, "latency_us": LATENCY_US}
    RESULTS.write_text(json.dumps(stored, indent=2) + "\n")
    PAGE.write_text(with_predictions(PAGE.read_text(), made))
    print(table(made), end="")


if __name__ == "__main__":
    main()
