"""The predictions as a table, and in words which one to choose."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from pycomm.advise.advice import OURS, Question, break_even, choose
from pycomm.advise.constants import COMPRESSIONS
from pycomm.advise.model import MOST_RANKS, Model, crossing
from pycomm.advise.training import Step

COLUMNS = ("algorithm", "compressor", "exchange (ms)", "exposed (ms)", "step (ms)",
           "rank sends (MB)", "link carries (MB)")  # fmt: skip
WHO = {
    "ring": "Gloo and NCCL",
    "tree": "NCCL",
    "hierarchical": "one rank per machine exchanges",
    OURS: "pycomm: every rank of a machine exchanges its part",
}


def show(question: Question) -> None:
    """Prints everything; with colours where rich is installed."""
    print(headline(question))
    steps, best = question.steps(), choose(question)
    if importlib.util.find_spec("rich"):
        _print_rich(steps, best)
    else:
        print(plain(steps, best))
    print("\n".join([*legend(), *advice(question, best)]))


def headline(question: Question) -> str:
    """The question, and whose constants answer it."""
    cluster, machine = question.cluster, question.constants.machine
    return (
        f"{human_count(question.parameters)} parameters, {cluster.ranks} ranks on {cluster.nodes} "
        f"machines, links of {human_rate(cluster.link.rate)}, {question.compute * 1e3:g} ms of "
        f"computation per step\nconstants measured on {machine['machine']['cores']} cores of "
        f"{machine['machine']['cpu']}, {machine['date']}"
    )


def cells(step: Step) -> tuple[str, ...]:
    """A line of the table; bytes are those of a whole step."""
    bucket = step.bucket
    times = (step.exchange, step.exposed, step.seconds)
    traffic = (bucket.rank_bytes * step.buckets, bucket.link_bytes * step.buckets)
    return (
        bucket.algorithm,
        bucket.compression,
        *(f"{1e3 * seconds:,.1f}" for seconds in times),
        *(f"{nbytes / 1e6:,.1f}" for nbytes in traffic),
    )


def plain(steps: list[Step], best: Step) -> str:
    """The table as text; an asterisk marks the choice."""
    lines = [COLUMNS, *map(cells, steps)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = [" ", *("*" if step == best else " " for step in steps)]
    return "\n".join(
        f"{mark} " + "  ".join(
            f"{cell:<{width}}" if index < 2 else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for mark, line in zip(marks, lines, strict=True)
    )  # fmt: skip


def _print_rich(steps: list[Step], best: Step) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=index < 2)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        last = following is None or following.bucket.algorithm != step.bucket.algorithm
        style = "bold green" if step == best else None
        table.add_row(*cells(step), style=style, end_section=last)
    Console().print(table)


def legend() -> list[str]:
    """Whose algorithms these are."""
    return [f"{name}: {who}" for name, who in WHO.items()]


def advice(question: Question, best: Step) -> list[str]:
    """What to do, in words."""
    compression, none = best.bucket.compression, question.step(OURS, "none")
    lines = [f"choose: {OURS}, {compression}: {best.seconds * 1e3:,.1f} ms per step, "
             f"{none.seconds / best.seconds:.2f} times as fast as uncompressed"]  # fmt: skip
    if compression == "none":
        lines = [f"choose: {OURS}, uncompressed: nothing else saves 2 % of a step's time"]
    if compression == "topk":
        lines.append("top-k changes training more than int8 does: see docs/data-parallel.md")
    lines += [_paying(question, name) for name in COMPRESSIONS[1:]]
    return [*lines, _crossing(question)]


def _paying(question: Question, compression: str) -> str:
    limit = break_even(question, compression)
    if limit is None:
        return f"{compression} does not pay here at any rate"
    if limit == float("inf"):
        return f"{compression} pays at every rate"
    return f"{compression} pays on links below {human_rate(limit)}"


def _crossing(question: Question) -> str:
    """Where ring and tree cross for one bucket, with as many ranks per machine as here."""
    per_node = question.cluster.most_ranks
    bucket = question.step("ring", "none")
    elements = max(question.parameters // bucket.buckets, 1)

    def model(ranks: int) -> Model:
        nodes = max(ranks // per_node, 1)
        cluster = replace(question.cluster, ranks=max(ranks, nodes), nodes=nodes)
        return Model(cluster, question.constants)

    found = crossing(model, elements)
    size = f"for {elements * 4 / 1e6:,.1f} MB, uncompressed"
    if found is None:
        return f"a ring is faster than a tree up to {MOST_RANKS:,} ranks ({size})"
    return f"a tree is faster than a ring from {found:,} ranks on ({size})"


def human_rate(rate: float) -> str:
    """Bits per second as people say them: 100 Mbit/s, 2.5 Gbit/s."""
    unit, name = (1e9, "Gbit/s") if rate >= 1e9 else (1e6, "Mbit/s")
    return f"{rate / unit:.3g} {name}"


def human_count(number: int) -> str:
    """A count as people say it: 125M, 1.3B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
