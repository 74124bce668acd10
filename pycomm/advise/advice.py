"""The advice: an exchange to choose, and the rates at which compressions stop paying; in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pycomm.advise.constants import COMPRESSIONS, Constants
from pycomm.advise.model import (
    ALGORITHMS,
    Cluster,
    Link,
    Model,
    PredictedStep,
    possible,
    predict,
)

OURS = "stripes"  # pycomm's algorithm between nodes
PLAIN = ("ring", "none")  # DDP without a hook, over Gloo or NCCL
RECOMMENDED = ("none", "bf16", "int8")  # top-k costs accuracy
WORTH = 0.98  # what saves less than a fiftieth of the time is not worth a change
SLOWEST, FASTEST = 1e6, 1e13  # bits per second; the search for a break-even stays between them
COLUMNS = (
    ("", "algorithm"),
    ("", "compression"),
    ("step", "ms"),
    ("exposed", "ms"),
    ("exchange", "ms"),
    ("rank sends", "MB"),
    ("link carries", "MB"),
)
NOTES = """\
exchange: all gradients, with nothing else to do; exposed: the part that the step waits for
ring, none: plain DDP over Gloo or NCCL; ring, bf16: with torch's bf16_compress_hook
stripes: pycomm, every rank of a node exchanges its part"""


@dataclass(frozen=True)
class Question:
    """The model to train and the cluster to train it on.

    Attributes:
        parameters: number of parameters of the model.
        cluster: the cluster.
        compute: seconds of a step without any exchange.
        density: top-k's share of elements.
        constants: the constants of the nodes.
        accumulate: micro-batches of a step.
    """

    parameters: int
    cluster: Cluster
    compute: float
    density: float
    constants: Constants
    accumulate: int = 1

    def step(self, algorithm: str, compression: str) -> PredictedStep:
        """The prediction for one way to exchange."""
        model = Model(self.cluster, self.constants, self.density)
        asked = self.parameters, self.compute
        return predict(model, algorithm, compression, *asked, accumulate=self.accumulate)

    def with_rate(self, rate: float) -> Question:
        """The same question with another rate of links, in bits per second."""
        link: Link = replace(self.cluster.link, rate=rate)
        return replace(self, cluster=replace(self.cluster, link=link))

    def steps(self) -> list[PredictedStep]:
        """The predictions for every combination of algorithm and compression that exists."""
        return [
            self.step(algorithm, compression)
            for algorithm in ALGORITHMS
            for compression in COMPRESSIONS
            if possible(algorithm, compression)
        ]


def candidates(question: Question) -> list[PredictedStep]:
    """Plain DDP, then our exchanges, which change gradients more and more.

    On one node plain DDP is left out: Gloo is slower there than a ring in shared memory.
    """
    ours = [question.step(OURS, compression) for compression in COMPRESSIONS]
    return ours if question.cluster.nodes == 1 else [question.step(*PLAIN), *ours]


def choose(question: Question) -> PredictedStep:
    """The fastest recommended exchange; of nearly equal ones, the one that changes least."""
    steps = [step for step in candidates(question) if step.bucket.compression in RECOMMENDED]
    fastest = min(step.seconds for step in steps)
    return next(step for step in steps if WORTH * step.seconds <= fastest)


def break_even(question: Question, compression: str) -> float | None:
    """The rate of links, in bits per second, above which a less lossy compression is as fast.

    Returns:
        None if the compression pays at no rate; infinity if it pays even at the fastest rate tried.
    """

    def pays(rate: float) -> bool:
        *less_lossy, step = candidates(question.with_rate(rate))[: place + 1]
        return step.seconds < WORTH * min(each.seconds for each in less_lossy)

    place = 1 + COMPRESSIONS.index(compression)  # behind plain DDP
    if question.cluster.nodes == 1 or not pays(SLOWEST):
        return None
    if pays(FASTEST):
        return float("inf")
    low, high = SLOWEST, FASTEST
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def show(question: Question) -> None:
    """Prints everything; the answer comes last."""
    steps, best = question.steps(), choose(question)
    print(headline(question), "", table(steps, best), "", NOTES, provenance(question), "", sep="\n")
    print("\n".join(recommend(question, best)))


def headline(question: Question) -> str:
    """The question as a line of text."""
    cluster, batches = question.cluster, question.accumulate
    return (
        f"{human_count(question.parameters)} parameters, {cluster.ranks:,} ranks on "
        f"{cluster.nodes:,} nodes, links of {human_rate(cluster.link.rate)}, "
        f"{question.compute * 1e3:g} ms of computation per step"
        + (f" in {batches:,} micro-batches" if batches > 1 else "")
    )


def provenance(question: Question) -> str:
    """The source of the constants."""
    machine = question.constants.machine
    cores, cpu = machine["machine"]["cores"], machine["machine"]["cpu"]
    return f"constants: {cores} cores of {cpu}, {machine['date'][:10]}; yours: --measure"


def cells(step: PredictedStep) -> tuple[str, ...]:
    """A line of the table; bytes are those of a whole step."""
    bucket = step.bucket
    figures = (
        *(1e3 * seconds for seconds in (step.seconds, step.exposed, step.exchange)),
        *(1e-6 * nbytes * step.buckets for nbytes in (bucket.rank_bytes, bucket.link_bytes)),
    )
    return (bucket.algorithm, bucket.compression, *map(human_figure, figures))


def table(steps: list[PredictedStep], best: PredictedStep) -> str:
    """A line for every step, in a block for each algorithm; an asterisk marks the choice."""
    header = list(zip(*COLUMNS, strict=True))
    widths = [max(map(len, c)) for c in zip(*header, *map(cells, steps), strict=True)]
    lines = [_line(" ", part, widths) for part in header]
    algorithm = None
    for step in steps:
        if step.bucket.algorithm != algorithm:
            algorithm = step.bucket.algorithm
            lines.append("-" * len(lines[1]))
        lines.append(_line("*" if step == best else " ", cells(step), widths))
    return "\n".join(lines)


def _line(mark: str, texts: tuple[str, ...], widths: list[int]) -> str:
    padded = [
        f"{text:<{width}}" if index < 2 else f"{text:>{width}}"
        for index, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return f"{mark} {'  '.join(padded)}"


def recommend(question: Question, best: PredictedStep) -> list[str]:
    """The advice, as lines of text."""
    lines = _choice(question, best)
    if question.cluster.nodes > 1:
        bf16 = question.step("ring", "bf16")
        if bf16.seconds < WORTH * best.seconds:
            lines.append(f"Faster, but not pycomm's: {_said(bf16)}.")
    sparse = question.step(OURS, "topk")
    if sparse.seconds < WORTH * best.seconds:
        lines += [
            f"Faster, but read docs/how-to/data-parallel.md first: {_said(sparse)}. With AdamW,",
            "top-k of 1 % ended with a loss 13 % higher, and 110 % higher on another model.",
        ]
    return lines + [f"{name} {_paying(question, name)}" for name in COMPRESSIONS[1:]]


def _choice(question: Question, best: PredictedStep) -> list[str]:
    """The choice, compared with plain DDP and with our uncompressed exchange."""
    if (best.bucket.algorithm, best.bucket.compression) == PLAIN:
        forms = f"{', '.join(RECOMMENDED[:-1])} or {RECOMMENDED[-1]}"
        return [f"Keep plain DDP: * {_said(best)} a step. pycomm's {forms} saves less than 2 %."]
    others = {"plain DDP": PLAIN, f"{OURS}, none": (OURS, "none")}
    told = [
        f"{question.step(*pair).seconds / best.seconds:.3g} times as fast as {name}"
        for name, pair in others.items()
        if best.bucket.compression != "none" or pair == PLAIN
    ]
    lines = [f"Choose * {_said(best)} a step."]
    return lines if question.cluster.nodes == 1 else [*lines, f"That is {', '.join(told)}."]


def _said(step: PredictedStep) -> str:
    bucket = step.bucket
    return f"{bucket.algorithm}, {bucket.compression}, {human_figure(1e3 * step.seconds)} ms"


def _paying(question: Question, compression: str) -> str:
    limit = break_even(question, compression)
    less = " or ".join(reversed(COMPRESSIONS[: COMPRESSIONS.index(compression)]))
    if limit is None:
        return f"does not pay here: {less} takes as long on every link."
    if limit == float("inf"):
        return "pays on every link."
    return f"pays on links below {human_rate(limit)}; above, {less} takes as long."


def human_figure(value: float) -> str:
    """Formats a number with its significant digits: 12,409, 86.4, 0.25."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def human_rate(rate: float) -> str:
    """Formats bits per second: 100 Mbit/s, 2.5 Gbit/s."""
    unit, name = (1e9, "Gbit/s") if rate >= 1e9 else (1e6, "Mbit/s")
    return f"{rate / unit:.3g} {name}"


def human_count(number: int) -> str:
    """Formats a count: 125M, 1.3B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
