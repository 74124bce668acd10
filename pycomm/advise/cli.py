"""The command line: ``python -m pycomm.advise -h``."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pycomm.advise import advice, constants, measure
from pycomm.advise.advice import Question
from pycomm.advise.model import MOST_RANKS, Cluster, Link, compression_of
from pycomm.bench import launch
from pycomm.bench.report import number_in, whole, writable

DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
QUESTION = ("params", "ranks", "nodes", "step_ms")
OF_TORCHRUN = {"ranks": "WORLD_SIZE", "nodes": "GROUP_WORLD_SIZE"}  # unless they are given
MOST_MICRO_BATCHES = 1 << 20
NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


def count(text: str) -> int:
    """Parses a number of parameters: ``125M``, ``1.3B``, ``10000``."""
    match = re.fullmatch(NUMBER + "([KMGBT]?)", text.upper())
    value = float(match[1]) * DECIMAL[match[2]] if match else 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number such as 125M or 1.3B, got {text!r}")
    return round(value)


def rate(text: str) -> float:
    """Parses bits per second: ``100Mbit``, ``1Gbit``, ``25Gbit/s``, ``400G``, ``10Gbps``."""
    match = re.fullmatch(NUMBER + "([KMGTkmgt])(?:[Bb]it|bps|)(?:/s)?", text)
    value = float(match[1]) * DECIMAL[match[2].upper()] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"expected a rate such as 100Mbit or 1Gbit, in bits, got {text!r}"
        )
    return value


def density(text: str) -> float:
    """Parses a share of elements for top-k; it must take fewer bytes than all elements do."""
    value = number_in(0, 1, "a share above 0 and at most 1")(text)
    try:
        compression_of("topk", value).encoded_bytes(1 << 20)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def make_parser() -> argparse.ArgumentParser:
    """All flags, with their units."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.advise",
        description="Predicts training steps for every way to exchange gradients; says which to "
        "choose. The model and its constants: docs/how-to/advisor.md.",
        epilog="--measure --constants FILE alone needs no other flags.",
    )
    add = parser.add_argument
    add("--params", type=count, metavar="N", help="parameters of the model: 125M, 1.3B")
    add("--ranks", type=whole(1, MOST_RANKS), metavar="N",
        help="ranks of all nodes together (default: torchrun's)")  # fmt: skip
    add("--nodes", type=whole(1, MOST_RANKS), metavar="N",
        help="number of nodes (default: torchrun's)")  # fmt: skip
    add("--link", type=rate, metavar="RATE",
        help="rate of a node's link: 100Mbit, 1Gbit (default: the measured one)")  # fmt: skip
    add("--step-ms", type=number_in(0, math.inf, "milliseconds such as 400"),
        metavar="MS",
        help="computation of a step with all its micro-batches, without any exchange")  # fmt: skip
    add("--accumulate", type=whole(1, MOST_MICRO_BATCHES), default=1, metavar="N",
        help="micro-batches whose gradients a step accumulates with no_sync() (1)")  # fmt: skip
    add("--density", type=density, default=0.01, metavar="SHARE",
        help="share of the elements that top-k sends (default 0.01)")  # fmt: skip
    add("--measure", action="store_true",
        help="measure this node first (10 s); under torchrun the links, too")  # fmt: skip
    add("--constants", type=Path, metavar="FILE",
        help="read the constants from FILE; with --measure, write them to FILE")  # fmt: skip
    add("--plot", type=writable, metavar="FILE", help="draw the predictions as a PNG")
    return parser


def make_question(given: argparse.Namespace, known: constants.Constants) -> Question:
    """Makes the question from the command line and these constants."""
    latency = known["link.latency"]
    if given.link is not None:
        link = Link(given.link, latency, known["link.payload"])
    elif known.link_rate is not None:
        link = Link(known.link_rate, latency)
    else:
        raise SystemExit("--link must be given, as 1Gbit: no link between nodes was measured")
    cluster, compute = Cluster(given.ranks, given.nodes, link), given.step_ms / 1e3
    return Question(given.params, cluster, compute, given.density, known, given.accumulate)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; exits with a message if an argument is wrong."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    unknown = [name for name in QUESTION if getattr(arguments, name) is None]
    arguments.asks = len(unknown) < len(QUESTION) or arguments.plot is not None
    if os.environ.keys() >= set(OF_TORCHRUN.values()):  # other launchers count in other ways
        for name in set(unknown) & set(OF_TORCHRUN):
            setattr(arguments, name, int(os.environ[OF_TORCHRUN[name]]))
    missing = [
        f"--{name.replace('_', '-')}" for name in unknown if getattr(arguments, name) is None
    ]
    if missing and (arguments.asks or not (arguments.measure and arguments.constants)):
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    if arguments.asks and arguments.ranks < arguments.nodes:
        parser.error(f"--ranks must be at least --nodes, {arguments.nodes}, got {arguments.ranks}")
    file = arguments.constants
    if file and not arguments.measure and not file.is_file():
        parser.error(f"--constants: there is no file {file}")
    if file and arguments.measure:
        try:
            writable(str(file))
        except argparse.ArgumentTypeError as error:
            parser.error(f"--constants: {error}")
    if arguments.measure:
        launch.require("numpy")  # for torch's collectives of objects
    if arguments.plot:
        launch.require("matplotlib")
    return arguments


def constants_for(arguments: argparse.Namespace) -> constants.Constants:
    """Returns constants: measured now, read from a file, or those shipped with pycomm."""
    if not arguments.measure:
        try:
            return constants.load(arguments.constants or constants.SHIPPED)
        except ValueError as error:
            raise SystemExit(f"--constants: {error}") from None
    known = measure.measure()
    if arguments.constants and launch.is_first():
        constants.save(known, arguments.constants)
    return known


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, measures if asked to, predicts and prints; under torchrun, only rank 0 prints."""
    arguments = parse(argv)
    known = constants_for(arguments)
    if not launch.is_first():
        return
    if not arguments.asks:
        print(f"{arguments.constants}: {len(known.values)} constants")
        return
    question = make_question(arguments, known)
    advice.show(question)
    if arguments.plot:
        from pycomm.advise import plot

        plot.draw(arguments.plot, question)
