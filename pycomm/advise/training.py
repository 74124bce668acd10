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
        slower: the same while backward computes on the core that it needs; `bucket` if it has
            another core.
        buckets: the number of buckets, which are exchanged one after the other.
        compute: the time of a step without any exchange.
        cores: cores per rank; see :class:`pycomm.advise.cluster.Cluster`.
    """

    bucket: Exchange
    slower: Exchange
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

        Backward makes a bucket ready at even intervals. Until it ends, as many of them are
        exchanged as there is time for, but not the last one. In any case, the cores must do their
        work.
        """
        interval = self.compute * BACKWARD / self.buckets
        hidden = (self.buckets - 1) * interval / max(interval, self.slower.seconds)
        work = self.compute + self.buckets * self.bucket.work
        return max(
            self.compute + (self.buckets - hidden) * self.bucket.seconds,
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
    elements = max(parameters // buckets, 1)
    bucket = slower = model.exchange(algorithm, compression, elements)
    if cluster.cores_per_rank < 2:
        slower = _busy(model).exchange(algorithm, compression, elements)
    return Step(bucket, slower, buckets, compute, cluster.cores_per_rank)


def _busy(model: Model) -> Model:
    """The same cluster while its cores compute: a message waits until it is handled."""
    wait = max(model.constants["link.busy"] - model.constants["link.latency"], 0.0)
    link = replace(model.cluster.link, latency=model.cluster.link.latency + wait)
    return Model(replace(model.cluster, link=link), model.constants, model.density)
