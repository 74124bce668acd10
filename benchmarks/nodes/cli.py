"""Measures exchanges between nodes, emulated by network namespaces of this machine; needs root.

``python -m benchmarks.nodes --json FILE`` measures all-reduces, training and cut links. What the
model of ``python -m pycomm.advise`` predicts for a row is in the file before the row is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.nodes.cases import (
    BUCKET_MIB,
    HEADER,
    PEER,
    RATES,
    SHARDED_CASES,
    TRAINEES,
    Layout,
    NodeRow,
    algorithm_cases,
    algorithm_rows,
    all_reduce_rows,
    sharded_rows,
    training_rows,
)
from benchmarks.nodes.namespaces import INTERFACE, Nodes, address, missing
from benchmarks.nodes.ranks import POLL_S, write
from benchmarks.nodes.sharded import BASE, STEPPERS
from pycomm import collect_env
from pycomm.advise import constants
from pycomm.bench.report import MIB, Results, Settings

PORT = 29500
ROOT = Path(__file__).resolve().parents[2]
STUCK_S = 900.0  # seconds without a question after which the run is stuck
START_S = 120.0  # seconds that processes have to start, on a busy machine
CUT_TIMEOUT = 3.0  # the group's timeout in the trials, in seconds
ALLOWED_S = 1.0  # seconds after the timeout in which errors must come
CUT_BYTES = 16 * MIB


def layouts(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses the ranks of each node: ``2x1`` are two nodes of a rank, ``1+2+3`` differ in size."""
    found = []
    for part in text.split(","):
        nodes, is_even, ranks = part.partition("x")
        numbers = [nodes, ranks] if is_even else part.split("+")
        values = [int(number) if number.isdecimal() else 0 for number in numbers]
        counts = (values[1],) * values[0] if is_even else tuple(values)
        if not (2 <= len(counts) <= 8 and all(counts)):
            raise argparse.ArgumentTypeError(
                "expected 2 to 8 nodes x ranks on each, or the ranks of each, such as 2x1,1+2+3, "
                f"got {text!r}"
            )
        found.append(counts)
    return tuple(found)


def rates(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of rates."""
    names = tuple(text.split(","))
    for name in names:
        if name not in RATES:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(RATES)}, got {name!r}")
    return names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options from a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nodes",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    add = parser.add_argument
    add(
        "--layouts",
        type=layouts,
        default="2x1,2x2",
        help="nodes x ranks, or 1+2+3 (default 2x1,2x2)",
    )
    add("--rates", type=rates, default="1gbit,100mbit,10gbit", help="rates of links (default: all)")
    add("--mib", type=int, default=64, help="MiB of the tensor (default 64)")
    add("--rounds", type=int, default=5, help="rounds per case (default 5)")
    add(
        "--parameters",
        type=int,
        default=10_000_000,
        help="parameters of the trained model (default 10M)",
    )
    add("--no-training", action="store_true", help="measure no training steps")
    add("--sharded", action="store_true", help="measure only steps of sharded wrappers")
    add("--algorithms", action="store_true", help="measure only two-shot, ring and tree")
    add("--cuts", type=int, default=50, help="number of times to cut the link (default 50)")
    add("--json", metavar="FILE", help="write results")
    options = parser.parse_args(argv)
    for name in ("mib", "rounds", "parameters"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not options.algorithms and any(len(set(ranks)) > 1 for ranks in options.layouts):
        parser.error("--layouts must have as many ranks on each node but with --algorithms")
    return options


class NodeResults(Results[NodeRow]):
    """Rows that are in the file before they are measured, and on the screen afterwards."""

    def __init__(self, options: argparse.Namespace, known: constants.Constants) -> None:
        command = shlex.join(["python", "-m", "benchmarks.nodes", *sys.argv[1:]])
        links = {name: asdict(c) for name, c in known.values.items() if "link." in name}
        super().__init__(
            Settings(json=options.json, command=command),
            constants={"date": known.machine["date"], "links": links},
        )
        self.begin(f"nodes on {self.place}", HEADER)

    def predict(self, rows: list[NodeRow]) -> None:
        """Writes predictions to the file."""
        self.rows += rows
        self.save()

    def fill(self, answered: dict[str, Any], layout: Layout) -> None:
        """Adds figures to rows and prints them; also keeps figures that belong to no row."""
        figures, case = answered["figures"], answered["case"]
        meant = (case, layout.nodes, layout.ranks_per_node)
        for row in self.rows:
            here = (row.case, row.nodes, row.ranks_per_node)
            if row.bytes != answered.get("bytes", row.bytes):
                continue
            if here == meant and row.rate == answered["rate"] and row.time_us is None:
                base = BASE if row.case in SHARDED_CASES else answered.get("base", PEER)
                row.fill(base_us=figures[base]["time_us"], **figures[row.contestant])
                self.say(row.line())
        if answered["case"] == "training":
            self._note_training(answered)
        if "late_us" in answered:
            kept = ("case", "bytes", "late_us")
            noted = {"ranks": list(layout.ranks)} | {name: answered[name] for name in kept}
            self.meta.setdefault("lateness", []).append(noted)
        self.save()

    def _note_training(self, answered: dict[str, Any]) -> None:
        figures, losses = answered["figures"], answered["losses"]
        compute_ms = figures["compute"]["time_us"] / 1e3
        for name in TRAINEES:
            if (alone := figures.get(f"{name}, exchange alone")) is not None:
                alone_ms, step_ms = alone["time_us"] / 1e3, figures[name]["time_us"] / 1e3
                share = step_ms / max(compute_ms, alone_ms)
                print(
                    f"# {name}: compute {compute_ms:.1f} ms, exchange {alone_ms:.1f} ms, "
                    f"step {step_ms:.1f} ms: {share:.2f} of the longer (goal 1.15)"
                )
        off = 100 * (losses["pycomm int8_hook"] / losses[PEER] - 1)
        print(f"# loss after {answered['steps']} steps: int8 {off:+.3f} % of plain DDP's")
        self.meta.setdefault("training", []).append(answered)


def environment() -> dict[str, str]:
    """The ranks' environment: this pycomm, one thread each, and the right interface."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": ":".join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # no node here has a name to look up
    }


def shared_folder() -> tempfile.TemporaryDirectory[str]:
    """The folder for questions and answers; the nodes share one file system."""
    return tempfile.TemporaryDirectory(prefix="pycomm-nodes-")


def torchrun(nodes: Nodes, ranks: Sequence[int], arguments: list[str]) -> list[Any]:
    """Starts torchrun on every node, with as many ranks as the node has."""
    started = []
    for node, count in enumerate(ranks):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes.count),
            "--node-rank", str(node), "--nproc-per-node", str(count),
            "--master-addr", address(0), "--master-port", str(PORT), *arguments,
        ]  # fmt: skip
        started.append(nodes.start(node, command, environment()))
    return started


def start(nodes: Nodes, ranks: Sequence[int], plan: dict[str, Any], folder: Path) -> list[Any]:
    """Starts the ranks with a plan."""
    write(folder / "plan", plan)
    module = ["-m", "benchmarks.nodes.ranks"]
    return torchrun(nodes, ranks, [*module, str(folder / "plan"), str(folder)])


def with_links(known: constants.Constants) -> constants.Constants:
    """Constants of messages between two nodes, which replace those of one node."""
    with shared_folder() as name, Nodes(2, "10gbit") as nodes:
        path = Path(name, "constants.json")
        command = ["-m", "pycomm.advise", "--measure", "--constants", str(path)]
        codes = [process.wait() for process in torchrun(nodes, (1, 1), command)]
        if any(codes):
            raise SystemExit(f"measuring the links failed: exit codes {codes}")
        measured = constants.load(path)
    of_links = {name: c for name, c in measured.values.items() if name.startswith("link.")}
    of_links.pop("link.rate")
    return constants.Constants(known.machine, known.values | of_links)


def questions(folder: Path, started: list[Any]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Rank 0's questions, and the files for the answers, until all ranks have ended well."""
    number, since = 1, time.monotonic()
    while True:
        path = folder / f"question-{number}"
        if path.exists():
            yield json.loads(path.read_text()), folder / f"answer-{number}"
            number, since = number + 1, time.monotonic()
            continue
        codes = [process.poll() for process in started]
        if all(code == 0 for code in codes):
            return
        if any(codes) or time.monotonic() - since > STUCK_S:
            raise SystemExit(f"ranks failed, or asked nothing for {STUCK_S} s: exit codes {codes}")
        time.sleep(POLL_S)


def exchange(
    ranks: tuple[int, ...],
    options: argparse.Namespace,
    known: constants.Constants,
    to: NodeResults,
) -> None:
    """Measures all-reduces and training on nodes with so many ranks each."""
    cores, nbytes = collect_env.usable_cores(), options.mib * MIB
    cases = [{"rate": rate, "bytes": nbytes, "rounds": options.rounds} for rate in options.rates]
    trains = ranks == (1, 1) and not options.no_training and "1gbit" in options.rates
    training = [{"rate": "1gbit", "parameters": options.parameters, "batch": 128,
                 "bucket_cap_mb": BUCKET_MIB, "rounds": options.rounds, "steps": 10}]  # fmt: skip
    plan: dict[str, Any] = {"what": "exchange"}
    plan |= {"all_reduce": [], "algorithms": [], "training": [], "step": []}
    for rate in options.rates:
        layout = Layout(ranks, rate)
        if options.sharded:
            case = {"rate": rate, "parameters": options.parameters, "rounds": options.rounds}
            plan["step"].append(case)
            to.predict(sharded_rows(layout, options.parameters, STEPPERS))
        elif options.algorithms:
            plan["algorithms"] += (own := algorithm_cases(rate, options.rounds))
            to.predict(algorithm_rows(layout, own))
        else:
            to.predict(all_reduce_rows(layout, nbytes, known, cores))
    if not (options.sharded or options.algorithms):
        plan |= {"all_reduce": cases, "training": training if trains else []}
    with (
        shared_folder() as name,
        Nodes(len(ranks), "1gbit") as nodes,
    ):
        folder = Path(name)
        started = start(nodes, ranks, plan, folder)
        for question, answer in questions(folder, started):
            layout = Layout(ranks, question.get("rate", ""))
            if question["what"] == "nodes" and tuple(map(len, question["nodes"])) != ranks:
                raise SystemExit(f"pycomm sees {question['nodes']}, not nodes of {ranks} ranks")
            if question["what"] == "rate":
                nodes.set_rate(question["rate"])
            if question["what"] == "predict":
                parameters, compute = question["parameters"], question["compute_us"] / 1e6
                to.predict(training_rows(layout, parameters, compute, known, cores))
            if question["what"] == "result":
                to.fill(question, layout)
            write(answer, None)


def cut_links(trials: int, to: NodeResults) -> None:
    """Two nodes whose link is cut while they exchange; every rank must raise in time."""
    plan = {"what": "cut", "trials": trials, "timeout": CUT_TIMEOUT, "bytes": CUT_BYTES}
    rng, cuts = random.Random(0), []
    with shared_folder() as name, Nodes(2, "1gbit") as nodes:
        folder = Path(name)
        start(nodes, (1, 1), plan, folder)
        for trial in range(trials):
            exchanging = [folder / f"exchanging-{trial}-{rank}" for rank in range(2)]
            if not wait_until_all(exchanging, START_S):
                raise SystemExit(f"trial {trial}: ranks did not begin within {START_S} s")
            time.sleep(rng.uniform(0, 0.5))
            began = time.monotonic()
            nodes.set_link(1, "down")
            outcomes = [folder / f"outcome-{trial}-{rank}" for rank in range(2)]
            wait_until_all(outcomes, CUT_TIMEOUT + 5)
            found = [json.loads(path.read_text()) if path.exists() else None for path in outcomes]
            compression = json.loads(exchanging[0].read_text())["compression"]
            cuts.append(judge(trial, compression, began, found))
            nodes.set_link(1, "up")
            write(folder / f"mended-{trial}", None)
    summary = to.meta["cuts"] = summarise(cuts)
    to.save()
    print(f"# {trials} cuts, timeout {CUT_TIMEOUT} s: {len(summary['broken_promises'])} broken "
          f"promises; the last error came after {summary['seconds']['max']:.2f} s")  # fmt: skip
    for cut in summary["broken_promises"]:
        print(f"# cut {cut}")


def wait_until_all(paths: list[Path], seconds: float) -> bool:
    """Whether all files came in time."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def judge(
    trial: int, compression: str, began: float, outcomes: list[dict[str, Any] | None]
) -> dict[str, Any]:
    """A cut, and every way in which it breaks the promises."""
    complaints, errors, seconds = [], [], []
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            complaints.append(f"rank {rank} hung")
            continue
        errors.append(outcome["error"])
        seconds.append(round(outcome["at"] - began, 3))
        if outcome["error"] not in ("PeerDied", "Timeout"):
            complaints.append(f"rank {rank} raised {outcome['error']}: {outcome['message']}")
        if seconds[-1] > CUT_TIMEOUT + ALLOWED_S:
            complaints.append(f"rank {rank} took {seconds[-1]} s")
    return {"trial": trial, "compression": compression, "errors": errors, "seconds": seconds,
            "complaints": complaints}  # fmt: skip


def summarise(cuts: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all ranks and seconds to them; cuts that break a promise are in it whole."""
    seconds = [s for cut in cuts for s in cut["seconds"]] or [float("nan")]
    return {
        "trials": len(cuts),
        "errors": Counter(error for cut in cuts for error in cut["errors"]),
        "seconds": {
            "min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)
        },
        "broken_promises": [cut for cut in cuts if cut["complaints"]],
    }  # fmt: skip


def main() -> None:
    """Measures all that was asked for."""
    options = parse()
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    known = constants.load()
    if not (options.sharded or options.algorithms):
        known = with_links(known)
    results = NodeResults(options, known)
    for ranks in options.layouts:
        exchange(ranks, options, known, results)
    if options.cuts and not (options.sharded or options.algorithms):
        cut_links(options.cuts, results)
    results.end()
