"""The cases measured between nodes, their predictions, and the table of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.nodes.namespaces import BURST_BYTES
from pycomm.advise.constants import Constants
from pycomm.advise.model import Cluster, Link, Model, predict
from pycomm.bench.report import MIB, ResultRow

RATES = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
COMPRESSIONS = ("none", "bf16", "int8", "topk:0.01")
DENSITY = 0.01
PEER = "gloo"
FEEDBACK = " feedback"  # ends the name of the contestant with a residual, which has WITH_FEEDBACK
WITH_FEEDBACK = "topk:0.01"  # it loses most, so training needs a residual
# DDP's ways to average gradients, with the model's names; None if the model lacks them.
TRAINEES = {
    "gloo": ("ring", "none"),
    "gloo bf16 hook": ("ring", "bf16"),
    "gloo PowerSGD hook": None,
    "pycomm all_reduce_hook": ("stripes", "none"),
    "pycomm int8_hook": ("stripes", "int8"),
}
# Goals: Gloo's time over ours at 1 Gbit, by ranks per node (2 nodes) and contestant.
GOALS = {
    (1, "pycomm none"): 0.95,
    (1, "pycomm int8"): 3.6,
    (1, "pycomm topk:0.01"): 15.0,
    (1, "pycomm topk:0.01" + FEEDBACK): 12.0,
    (2, "pycomm none"): 1.3,
    (2, "pycomm int8"): 5.0,
}
TRAINING_GOAL = 2.5
# The step of the wrapper without shards over this one's.
SHARDED_GOALS = {"sharded": 1.05, "sharded int8": 3.5}
ALGORITHMS = ("two_shot", "ring", "tree")
LATENCIES_MS = (0, 0.1, 2)  # added to that of the emulated links
SIZES = (16 << 10, 256 << 10, 4 * MIB, 64 * MIB)
BUCKET_MIB = 4  # of DDP: a parameter each, so that there is something to overlap


@dataclass(frozen=True)
class Layout:
    """The ranks on each node, and the rate of the nodes' links."""

    ranks: tuple[int, ...]
    rate: str

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.ranks)

    @property
    def ranks_per_node(self) -> int | str:
        """A number if it is the same on all nodes; else all numbers: ``"1+2+3"``."""
        return self.ranks[0] if len(set(self.ranks)) == 1 else "+".join(map(str, self.ranks))

    def cluster(self, constants: Constants, cores: int) -> Cluster:
        """The cluster for the model; all nodes share the cores of this one machine."""
        link = Link(
            RATES[self.rate], constants["link.latency"], constants["link.payload"], BURST_BYTES
        )
        ranks = sum(self.ranks)
        return Cluster(ranks, self.nodes, link, cores / ranks)


@dataclass
class NodeRow(ResultRow):
    """One contestant in one case. It is written before it is measured.

    Attributes:
        case: ``"all_reduce"``, with an added latency, ``"training"``, or one of `SHARDED_CASES`.
        ranks_per_node: as a layout has it.
        bytes: of the tensor, or of all gradients.
        predicted_us: the model's prediction; None if it does not know the contestant.
        predicted_link_bytes: that a node sends, as well.
        time_us: the median of rounds, of each the slowest rank's.
        link_bytes: by the counters of the interfaces, the busiest node's.
        ratio: in the same rounds, the time of Gloo, of a step without shards, or of two-shot among
            algorithms, over this one.
        goal: what the ratio should be at least.
    """

    case: str
    nodes: int
    ranks_per_node: int | str
    rate: str
    contestant: str
    bytes: int
    predicted_us: float | None
    predicted_link_bytes: float | None
    time_us: float | None = None
    link_bytes: int | None = None
    rounds: int | None = None
    ratio: float | None = None
    goal: float | None = None

    def fill(self, time_us: float, base_us: float, link_bytes: int, rounds: int) -> None:
        """Adds the measured figures."""
        self.time_us, self.link_bytes, self.rounds = round(time_us, 1), link_bytes, rounds
        self.ratio = round(base_us / time_us, 3)

    def line(self, wide: bool = False) -> str:  # noqa: ARG002
        """The line of the table, whose columns are always the same."""
        what = f"{self.case:>22}  {self.nodes} x {self.ranks_per_node}  {self.rate:>8} "
        times = (_number(value, 1e-3, 10) for value in (self.time_us, self.predicted_us))
        sent = (_number(value, 1e-6, 9) for value in (self.link_bytes, self.predicted_link_bytes))
        return " ".join(
            [
                f"{what}{self.bytes / 1e6:10.2f}  {self.contestant:22}",
                *times,
                _off(self.time_us, self.predicted_us),
                *sent,
                _off(self.link_bytes, self.predicted_link_bytes),
                _number(self.ratio, 1, 6),
                _number(self.goal, 1, 6),
            ]
        ).rstrip()


def split(contestant: str) -> tuple[str, str]:
    """The model's algorithm and compression of ``"gloo"``, ``"pycomm int8"``."""
    if contestant == PEER:
        return "ring", "none"
    compression = contestant.removeprefix("pycomm ").partition(" ")[0]
    return "stripes", compression.partition(":")[0]


def all_reduce_rows(layout: Layout, nbytes: int, constants: Constants, cores: int) -> list[NodeRow]:
    """Predictions of an all-reduce of float32 by every contestant.

    The model knows no residuals.
    """
    model = Model(layout.cluster(constants, cores), constants, DENSITY)
    rows = []
    ours = [f"pycomm {compression}" for compression in COMPRESSIONS]
    unknown = f"pycomm {WITH_FEEDBACK}{FEEDBACK}"
    for contestant in (PEER, *ours, unknown):
        exchange = model.exchange(*split(contestant), nbytes // 4)
        is_goal = layout.nodes == 2 and layout.rate == "1gbit" and nbytes == 64 * MIB
        rows.append(
            NodeRow(
                "all_reduce", layout.nodes, layout.ranks_per_node, layout.rate, contestant, nbytes,
                None if contestant == unknown else round(1e6 * exchange.seconds, 1),
                round(exchange.link_bytes),
                goal=GOALS.get((layout.ranks[0], contestant)) if is_goal else None,
            )
        )  # fmt: skip
    return rows


def algorithm_cases(rate: str, rounds: int) -> list[dict[str, Any]]:
    """All-reduces of every size at every latency; the shorter ones more often."""
    return [
        {
            "case": f"all_reduce +{latency:g} ms",
            "rate": rate,
            "latency_ms": latency,
            "bytes": size,
            "rounds": rounds if size > 16 * MIB else 4 * rounds,
        }
        for latency in LATENCIES_MS
        for size in SIZES
    ]


def algorithm_rows(layout: Layout, cases: list[dict[str, Any]]) -> list[NodeRow]:
    """Bytes of every algorithm in every case; the model predicts no times for them."""
    share = 2 * (layout.nodes - 1) / layout.nodes
    return [
        NodeRow(
            case["case"], layout.nodes, layout.ranks_per_node, layout.rate, name, case["bytes"],
            None, None if name == "tree" else round(share * case["bytes"]),
        )
        for case in cases
        for name in ALGORITHMS
    ]  # fmt: skip


def training_rows(
    layout: Layout, parameters: int, compute: float, constants: Constants, cores: int
) -> list[NodeRow]:
    """Predictions of a training step that computes for `compute` seconds."""
    model = Model(layout.cluster(constants, cores), constants, DENSITY)
    rows = []
    for contestant, what in TRAINEES.items():
        step = what and predict(model, *what, parameters, compute, BUCKET_MIB * MIB)
        rows.append(
            NodeRow(
                "training", layout.nodes, layout.ranks_per_node, layout.rate, contestant,
                4 * parameters,
                round(1e6 * step.seconds, 1) if step else None,
                round(step.bucket.link_bytes * step.buckets) if step else None,
                goal=TRAINING_GOAL if contestant == "pycomm int8_hook" else None,
            )
        )  # fmt: skip
    return rows


SHARDED_CASES = ("step", "exchange and optimizer")


def sharded_rows(layout: Layout, parameters: int, names: Iterable[str]) -> list[NodeRow]:
    """Steps of wrappers, which the model does not predict."""
    goals = SHARDED_GOALS if layout == Layout((1, 1), "1gbit") else {}
    return [
        NodeRow(
            case, layout.nodes, layout.ranks_per_node, layout.rate, name, 4 * parameters,
            None, None, goal=goals.get(name) if case != "step" else None,
        )
        for case in SHARDED_CASES
        for name in names
    ]  # fmt: skip


HEADER = """\
#                 case  nodes      rate       size  contestant                   time  predicted    off     sends   formula    off   base   goal
#                     x ranks                 (MB)                               (ms)       (ms)    (%)      (MB)      (MB)    (%) / this"""  # noqa: E501


def _number(value: float | None, scale: float, width: int) -> str:
    return f"{value * scale:{width},.2f}" if value is not None else " " * width


def _off(measured: float | None, predicted: float | None) -> str:
    """The relative difference of measurement and prediction, in percent."""
    if not measured or not predicted:
        return " " * 6
    return f"{100 * (measured / predicted - 1):+6.1f}"
