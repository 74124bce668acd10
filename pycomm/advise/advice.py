"""Which exchange to choose, and where compression stops paying."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pycomm.advise.cluster import Cluster, Link
from pycomm.advise.constants import COMPRESSIONS, Constants
from pycomm.advise.model import ALGORITHMS, Model, possible
from pycomm.advise.training import Step, predict

OURS = "stripes"  # what pycomm does between nodes
WORTH = 0.98  # of the time: a compression that saves less than a fiftieth is not worth its error
SLOWEST, FASTEST = 1e6, 1e13  # bits per second, between which a break-even is looked for


@dataclass(frozen=True)
class Question:
    """What is trained, on what.

    Attributes:
        parameters: of the model.
        cluster: whose ranks train it.
        compute: seconds of a step without any exchange.
        density: of top-k.
        constants: of the nodes.
    """

    parameters: int
    cluster: Cluster
    compute: float
    density: float
    constants: Constants

    def step(self, algorithm: str, compression: str) -> Step:
        """The prediction for one way to exchange."""
        model = Model(self.cluster, self.constants, self.density)
        return predict(model, algorithm, compression, self.parameters, self.compute)

    def with_rate(self, rate: float) -> Question:
        """The same over links of another rate, in bits per second."""
        link: Link = replace(self.cluster.link, rate=rate)
        return replace(self, cluster=replace(self.cluster, link=link))

    def steps(self) -> list[Step]:
        """The predictions for every algorithm and compression that exist together."""
        return [
            self.step(algorithm, compression)
            for algorithm in ALGORITHMS
            for compression in COMPRESSIONS
            if possible(algorithm, compression)
        ]


def choose(question: Question) -> Step:
    """The fastest of ours; of nearly equal ones that which changes gradients least."""
    steps = [question.step(OURS, compression) for compression in COMPRESSIONS]
    fastest = min(step.seconds for step in steps)
    return next(step for step in steps if WORTH * step.seconds <= fastest)


def break_even(question: Question, compression: str) -> float | None:
    """The rate of links, in bits per second, above which a less lossy compression does as well.

    Returns:
        None where it pays at no rate; infinity where it pays even at the fastest looked at.
    """

    def pays(rate: float) -> bool:
        steps = {name: question.with_rate(rate).step(OURS, name).seconds for name in COMPRESSIONS}
        less_lossy = COMPRESSIONS[: COMPRESSIONS.index(compression)]
        return steps[compression] < WORTH * min(steps[name] for name in less_lossy)

    if question.cluster.nodes == 1 or not pays(SLOWEST):
        return None
    if pays(FASTEST):
        return float("inf")
    low, high = SLOWEST, FASTEST
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
