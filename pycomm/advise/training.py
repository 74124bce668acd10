"""The model of a training step, in which backward hides as much of the exchange as it can."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pycomm.advise.model import ELEMENT_BYTES, Exchange, Model

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
BACKWARD = 2 / 3  # of a step's computation: two of its three multiplications per weight


@dataclass(frozen=True)
class Step:
    """A training step with one way to exchange gradients; all times in seconds.

    Attributes:
        bucket: the exchange of a bucket.
        buckets: the number of buckets, which are exchanged one after the other.
        compute: the time of a step without any exchange.
        cores: cores per rank; see :class:`pycomm.advise.cluster.Cluster`.
    """

    bucket: Exchange
    buckets: int
    compute: float
    cores: float

    @property
    def exchange(self) -> float:
        """The time of all buckets' exchanges alone."""
        return self.buckets * self.bucket.seconds

    @property
    def seconds(self) -> float:
        """The time of the whole step.

        Backward makes a bucket ready at even intervals. Either the link is busy from the first
        bucket on, or only the last bucket is left when backward ends. In any case, the cores must
        do their work.
        """
        first_ready = self.compute * (1 - BACKWARD + BACKWARD / self.buckets)
        work = self.compute + self.buckets * self.bucket.work
        return max(
            first_ready + self.exchange,
            self.compute + self.bucket.seconds,
            work / min(max(self.cores, 1.0), 2.0),
        )

    @property
    def exposed(self) -> float:
        """The time that the exchange adds to the computation."""
        return self.seconds - self.compute


def predict(
    model: Model,
    algorithm: str,
    compression: str,
    parameters: int,
    compute: float,
    bucket_bytes: int = BUCKET_BYTES,
) -> Step:
    """Predicts a step of data-parallel training with float32 gradients.

    Args:
        model: the model of the cluster.
        algorithm: see :meth:`pycomm.advise.model.Model.exchange`.
        compression: see :meth:`pycomm.advise.model.Model.exchange`.
        parameters: number of parameters of the trained model, at least one.
        compute: seconds of a step without any exchange.
        bucket_bytes: bytes of gradients that are exchanged together.

    Raises:
        ValueError: there is no such exchange, there is no parameter, or `compute` is not positive.
    """
    if parameters < 1:
        raise ValueError(f"parameters must be at least 1, got {parameters}")
    if not 0 < compute < math.inf:
        raise ValueError(f"compute must be positive and finite, got {compute}")
    cluster, buckets = model.cluster, math.ceil(parameters * ELEMENT_BYTES / bucket_bytes)
    link = replace(cluster.link, burst=cluster.link.burst / buckets)  # there is one per step
    model = Model(replace(cluster, link=link), model.constants, model.density)
    bucket = model.exchange(algorithm, compression, max(parameters // buckets, 1))
    return Step(bucket, buckets, compute, cluster.cores_per_rank)
