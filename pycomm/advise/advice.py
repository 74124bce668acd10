"""Chooses an exchange, and finds the link's rate at which a compression stops paying."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pycomm.advise.cluster import Cluster, Link
from pycomm.advise.constants import COMPRESSIONS, Constants
from pycomm.advise.model import ALGORITHMS, Model, possible
from pycomm.advise.training import Step, predict

OURS = "stripes"  # pycomm's algorithm between nodes
WORTH = 0.98  # a compression that saves less than a fiftieth of the time is not worth its error
SLOWEST, FASTEST = 1e6, 1e13  # bits per second; the search for a break-even stays between them


@dataclass(frozen=True)
class Question:
    """The model to train and the cluster to train it on.

    Attributes:
        parameters: number of parameters of the model.
        cluster: the cluster.
        compute: seconds of a step without any exchange.
        density: top-k's share of elements.
        constants: the constants of the nodes.
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
        """The same question with another rate of links, in bits per second."""
        link: Link = replace(self.cluster.link, rate=rate)
        return replace(self, cluster=replace(self.cluster, link=link))

    def steps(self) -> list[Step]:
        """The predictions for every combination of algorithm and compression that exists."""
        return [
            self.step(algorithm, compression)
            for algorithm in ALGORITHMS
            for compression in COMPRESSIONS
            if possible(algorithm, compression)
        ]


def choose(question: Question) -> Step:
    """The fastest of our exchanges; of nearly equal ones, the one that changes gradients least."""
    steps = [question.step(OURS, compression) for compression in COMPRESSIONS]
    fastest = min(step.seconds for step in steps)
    return next(step for step in steps if WORTH * step.seconds <= fastest)


def break_even(question: Question, compression: str) -> float | None:
    """The rate of links, in bits per second, above which a less lossy compression does as well.

    Returns:
        None if the compression pays at no rate; infinity if it pays even at the fastest rate tried.
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
