"""The model: a cluster, its all-reduces, and training steps that hide as much of them as they can.

All-reduces, pycomm's and a ring, are predicted from latency, bandwidth and the work of cores.
docs/explanation/prediction.md derives all formulas, with the names used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pycomm
from pycomm import _C
from pycomm.advise.constants import COMPRESSIONS, OPERATIONS, Constants

MOST_RANKS = 16384  # the largest number that the command line accepts
ELEMENT_BYTES = 4  # gradients are float32
SEGMENT_BYTES = 1 << 20  # the most that Gloo's ring sends at a time; a part has at least two
TILED = ("bf16", "int8")  # reduced inside a node tile by tile, while others are on the wire
BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
BACKWARD = 2 / 3  # of a step's computation: two of its three multiplications per weight
UNDER_WAY = _C.pipeline_depth + 1  # tiles in each phase: one is waited for, others follow


@dataclass(frozen=True)
class Link:
    """A node's connection to the others, with the same rate in both directions at once.

    Attributes:
        rate: bits per second on the wire.
        latency: seconds from the sending of a small message to its arrival.
        payload: bytes of messages per byte on the wire.
        burst: bytes that pass at once after a pause: 0 except with a token bucket (``tc ... tbf``).
    """

    rate: float
    latency: float
    payload: float = 1.0
    burst: float = 0.0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate must be positive, got {self.rate}")
        if self.latency < 0 or self.burst < 0:
            raise ValueError(
                f"latency and burst must not be negative, got {self.latency}, {self.burst}"
            )
        if not 0 < self.payload <= 1:
            raise ValueError(f"payload must be above 0 and at most 1, got {self.payload}")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of a message, without latency."""
        return 8 / (self.rate * self.payload)


@dataclass(frozen=True)
class Cluster:
    """Ranks that are spread over nodes as evenly as possible.

    Attributes:
        ranks: the number of ranks of all nodes together.
        nodes: the number of nodes.
        link: the link of each node.
        cores_per_rank: 2 or more if an exchange does not slow down computation, 1 if both share a
            core, less if ranks take turns on cores.
    """

    ranks: int
    nodes: int
    link: Link
    cores_per_rank: float = 2.0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes}")
        if self.ranks < self.nodes:
            raise ValueError(f"ranks must be at least nodes, {self.nodes}, got {self.ranks}")
        if self.cores_per_rank <= 0:
            raise ValueError(f"cores_per_rank must be positive, got {self.cores_per_rank}")

    @property
    def stripes(self) -> int:
        """Ranks of a node that exchange with other nodes: as many as the smallest node has."""
        return self.ranks // self.nodes

    @property
    def most_ranks(self) -> int:
        """The number of ranks of the fullest node."""
        return -(-self.ranks // self.nodes)

    @property
    def slowdown(self) -> float:
        """The factor by which a rank's work takes longer because ranks take turns on cores."""
        return max(1.0, 1.0 / self.cores_per_rank)


@dataclass(frozen=True)
class PredictedExchange:
    """The predicted cost of an all-reduce of one tensor.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        compression: one of `COMPRESSIONS`.
        rank_bytes: bytes that the busiest rank sends, over memory or link; it receives as many.
        link_bytes: bytes that a node sends to others; it receives as many.
        wire: seconds for which the busiest link carries bytes; in a ring, of the longest chain of
            hops.
        core: seconds of work of the busiest rank's core while the link is in use.
        local: seconds inside the node, before and after the link is in use.
        latency: seconds until the first byte arrives, in which nothing else happens.
        rounds: the number of parts that are pipelined.
    """

    algorithm: str
    compression: str
    rank_bytes: float
    link_bytes: float
    wire: float
    core: float
    local: float
    latency: float
    rounds: int

    @property
    def work(self) -> float:
        """Seconds of work of a rank's core in total."""
        return self.core + self.local

    @property
    def seconds(self) -> float:
        """Seconds from the call to the result; link and core work in a pipeline."""
        longer, shorter = max(self.wire, self.core), min(self.wire, self.core)
        return self.local + longer + shorter / self.rounds + self.latency


def compression_of(name: str, density: float) -> pycomm.Compression:
    """The compression with a name of `COMPRESSIONS`."""
    return pycomm.parse_compression(f"topk:{density}" if name == "topk" else name)


def encoded_bytes(elements: int, compression: str, density: float) -> int:
    """The encoded bytes of a gradient with this number of float32 elements."""
    if compression == "none":
        return elements * ELEMENT_BYTES
    return compression_of(compression, density).encoded_bytes(elements)


def two_shot_bytes(nbytes: float, parties: int) -> float:
    """Bytes that each of `parties` sends, and receives, in a two-shot or ring all-reduce."""
    return 2 * (parties - 1) / parties * nbytes


class Model:
    """Predicts all-reduces of a cluster.

    Args:
        cluster: the cluster.
        constants: the constants of its nodes.
        density: top-k's share of elements.
    """

    def __init__(self, cluster: Cluster, constants: Constants, density: float = 0.01) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {density}")
        self.cluster, self.constants, self.density = cluster, constants, density

    def exchange(self, algorithm: str, compression: str, elements: int) -> PredictedExchange:
        """Predicts an all-reduce of float32 elements.

        Args:
            algorithm: one of `ALGORITHMS`.
            compression: one of `COMPRESSIONS`; a ring has none or bf16.
            elements: number of elements of the tensor, at least one.

        Raises:
            ValueError: there is no such all-reduce.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        if compression not in COMPRESSIONS:
            allowed = ", ".join(COMPRESSIONS)
            raise ValueError(f"compression must be one of {allowed}, got {compression!r}")
        if elements < 1:
            raise ValueError(f"elements must be at least 1, got {elements}")
        if not possible(algorithm, compression):
            raise ValueError(f"compression must be none or bf16 for the ring, got {compression!r}")
        return ALGORITHMS[algorithm](self, compression, elements)

    def _encoded(self, elements: int, compression: str) -> int:
        return encoded_bytes(elements, compression, self.density)

    def _coding(self, compression: str, elements: float, parties: int) -> float:
        """Seconds to encode, add all contributions, encode the owned part again, and decode."""
        if compression == "none":  # sent from where it is, received in place
            return elements * (1 - 1 / parties) * self.constants["none.add"]
        encode, decode, decode_add = (
            self.constants[f"{compression}.{operation}"] for operation in OPERATIONS
        )
        return elements * (encode * (1 + 1 / parties) + decode_add + decode)

    def _sending(self, nbytes: float, messages: float) -> float:
        """Seconds of a core to send this number of bytes over the link and receive as many."""
        return nbytes * self.constants["link.core"] + messages * self.constants["link.message"]

    def _carrying(self, nbytes: float) -> float:
        """Seconds for which a link carries this number of bytes."""
        link = self.cluster.link
        return max(nbytes - link.burst, 0.0) * link.seconds_per_byte

    def _local(self, elements: int) -> float:
        """Seconds that the ranks of one node take to reduce a tensor and share the result."""
        ranks = self.cluster.most_ranks
        if ranks == 1:
            return 0.0
        share = ranks / self.constants["local.ranks"]  # all ranks' bytes go through one memory
        per_byte = self.constants["local.all_reduce"] * share * self.cluster.slowdown
        return self.constants["local.latency"] + elements * ELEMENT_BYTES * per_byte

    def _ring(self, compression: str, elements: int) -> PredictedExchange:
        """All ranks in one ring; neighbours share a node if possible."""
        cluster = self.cluster
        n, far = cluster.ranks, cluster.nodes if cluster.nodes > 1 else 0
        sent = two_shot_bytes(self._encoded(elements, compression), n)
        steps = max(2 * (n - 1), 1)
        segments = max(math.ceil(sent / steps / SEGMENT_BYTES), 2)
        memory = sent * self.constants["local.all_reduce"]
        link = self._carrying(sent) if far else memory
        around = far * (cluster.link.latency * steps + link / segments)
        around += (n - far) * (self.constants["local.latency"] * steps + memory / segments)
        core = self._coding(compression, elements, n)
        core += self._sending(sent, steps * segments) if far else 0.0
        return PredictedExchange(
            algorithm="ring",
            compression=compression,
            rank_bytes=sent,
            link_bytes=sent if far else 0.0,
            wire=max(link, around / n) if n > 1 else 0.0,
            core=core * cluster.slowdown if n > 1 else 0.0,
            local=0.0,
            latency=0.0,
            rounds=steps * segments,
        )

    def _stripes(self, compression: str, elements: int) -> PredictedExchange:
        """Reduces inside each node, where each rank exchanges a part with the other nodes."""
        cluster, latency, stripes = self.cluster, self.cluster.link.latency, self.cluster.stripes
        nodes, nbytes = cluster.nodes, self._encoded(elements, compression)
        local = self._local(elements)
        inside = two_shot_bytes(elements * ELEMENT_BYTES, cluster.most_ranks)
        if nodes == 1:
            return PredictedExchange("stripes", compression, inside, 0.0, 0.0, 0.0, local, 0.0, 1)
        sent = two_shot_bytes(nbytes, nodes)
        # A handshake, contributions, results; top-k sends each list after its length.
        rounds, trips, messages = 1, 5, 5 * (nodes - 1)
        if compression == "none" and (nodes - 1) * nbytes / stripes <= _C.sent_whole_bytes:
            sent = (nodes - 1) * nbytes
            messages, trips = _C.messages_of_whole_stripe(nodes)
        elif compression != "topk":  # top-k selects from the whole tensor
            owned = nbytes / stripes / nodes
            most = max(_C.most_tile_bytes / nodes, _C.least_transfer_bytes)
            transfer = min(max(owned / _C.internode_tiles, _C.least_transfer_bytes), most)
            rounds = math.ceil(owned / transfer)
            # Without compression, contributions do not wait for the handshake.
            trips = 2 if compression == "none" else 3
            messages = (1 + 2 * rounds) * (nodes - 1)
        core = self._coding(compression, elements / stripes, nodes)
        core += self._sending(sent / stripes, messages)
        core *= cluster.slowdown
        if compression in TILED:
            core, local = core + local, 0.0
        # A tile's slot is free again once the tile has arrived and has been added.
        turn = latency + core / rounds
        return PredictedExchange(
            algorithm="stripes",
            compression=compression,
            rank_bytes=inside + sent / stripes,
            link_bytes=sent,
            wire=max(self._carrying(sent), (rounds - 1) * turn / UNDER_WAY),
            core=core,
            local=local,
            latency=trips * latency,
            rounds=rounds,
        )


ALGORITHMS: dict[str, Callable[[Model, str, int], PredictedExchange]] = {
    "ring": Model._ring,
    "stripes": Model._stripes,
}


def possible(algorithm: str, compression: str) -> bool:
    """True if the algorithm is pycomm's, or if DDP has a hook for the compression."""
    return algorithm == "stripes" or compression in ("none", "bf16")


@dataclass(frozen=True)
class PredictedStep:
    """A training step with one way to exchange gradients; all times in seconds.

    Attributes:
        bucket: the exchange of a bucket.
        slower: the exchange of a bucket while backward uses the same core; equal to `bucket` if
            the exchange has a core of its own.
        buckets: the number of buckets, which are exchanged one after the other.
        compute: the time of a step without any exchange.
        cores: cores per rank; see :class:`Cluster`.
        accumulate: the number of micro-batches in `compute`; the last one's backward exchanges.
    """

    bucket: PredictedExchange
    slower: PredictedExchange
    buckets: int
    compute: float
    cores: float
    accumulate: int

    @property
    def exchange(self) -> float:
        """The time of all buckets' exchanges alone."""
        return self.buckets * self.bucket.seconds

    @property
    def seconds(self) -> float:
        """The time of the whole step.

        The last backward makes a bucket ready at even intervals. Until it ends, as many of them are
        exchanged as there is time for, but not the last one. In any case, the cores must do their
        work.
        """
        interval = self.compute * BACKWARD / self.accumulate / self.buckets
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
    accumulate: int = 1,
) -> PredictedStep:
    """Predicts a step of data-parallel training with float32 gradients.

    Args:
        model: the model of the cluster.
        algorithm: see :meth:`Model.exchange`.
        compression: see :meth:`Model.exchange`.
        parameters: number of parameters of the trained model, at least one.
        compute: seconds of a step without any exchange.
        bucket_bytes: bytes of gradients that are exchanged together.
        accumulate: the number of micro-batches, alike, whose gradients a step adds up before it
            exchanges them.

    Raises:
        ValueError: there is no such exchange, no parameter or no micro-batch, or `compute` is not
            positive.
    """
    if parameters < 1:
        raise ValueError(f"parameters must be at least 1, got {parameters}")
    if not 0 < compute < math.inf:
        raise ValueError(f"compute must be positive and finite, got {compute}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    cluster, buckets = model.cluster, math.ceil(parameters * ELEMENT_BYTES / bucket_bytes)
    link = replace(cluster.link, burst=cluster.link.burst / buckets)  # one burst per step
    model = Model(replace(cluster, link=link), model.constants, model.density)
    elements = max(parameters // buckets, 1)
    bucket = slower = model.exchange(algorithm, compression, elements)
    if cluster.cores_per_rank < 2:
        slower = _busy(model).exchange(algorithm, compression, elements)
    return PredictedStep(bucket, slower, buckets, compute, cluster.cores_per_rank, accumulate)


def _busy(model: Model) -> Model:
    """The same cluster while its cores compute: a message waits until it is handled."""
    wait = max(model.constants["link.busy"] - model.constants["link.latency"], 0.0)
    link = replace(model.cluster.link, latency=model.cluster.link.latency + wait)
    return Model(replace(model.cluster, link=link), model.constants, model.density)
