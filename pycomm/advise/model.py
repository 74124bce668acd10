"""Predicts all-reduces from latency, bandwidth and the work of cores: pycomm's, and a ring.

docs/advisor.md derives all formulas, with the names used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pycomm
from pycomm import _C
from pycomm.advise.cluster import Cluster
from pycomm.advise.constants import COMPRESSIONS, OPERATIONS, Constants

MOST_RANKS = 16384  # the largest number that the command line accepts
ELEMENT_BYTES = 4  # gradients are float32
SEGMENT_BYTES = 1 << 20  # the most that Gloo's ring sends at a time; a part has at least two
TILED = ("bf16", "int8")  # reduced inside a node tile by tile, while others are on the wire
UNDER_WAY = _C.pipeline_depth + 1  # tiles in each phase: one is waited for, others follow


@dataclass(frozen=True)
class Exchange:
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
        latency: seconds until the very first byte arrives, with nothing else to do.
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

    def exchange(self, algorithm: str, compression: str, elements: int) -> Exchange:
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
            raise ValueError(f"compression by a ring must be none or bf16, got {compression!r}")
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
        """Seconds of a link for this number of bytes in a row."""
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

    def _ring(self, compression: str, elements: int) -> Exchange:
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
        return Exchange(
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

    def _stripes(self, compression: str, elements: int) -> Exchange:
        """Reduces inside each node, where each rank exchanges a part with the other nodes."""
        cluster, latency, stripes = self.cluster, self.cluster.link.latency, self.cluster.stripes
        nodes, nbytes = cluster.nodes, self._encoded(elements, compression)
        local = self._local(elements)
        inside = two_shot_bytes(elements * ELEMENT_BYTES, cluster.most_ranks)
        if nodes == 1:
            return Exchange("stripes", compression, inside, 0.0, 0.0, 0.0, local, 0.0, 1)
        sent = two_shot_bytes(nbytes, nodes)
        # A handshake, contributions, results; top-k sends each list after its length.
        rounds, trips, messages = 1, 5, 5
        if compression == "none" and (nodes - 1) * nbytes / stripes <= _C.sent_whole_bytes:
            sent, trips, messages = (nodes - 1) * nbytes, 1, 2
        elif compression != "topk":  # which selects from the whole
            owned = nbytes / stripes / nodes
            most = max(_C.most_tile_bytes / nodes, _C.least_transfer_bytes)
            transfer = min(max(owned / _C.internode_tiles, _C.least_transfer_bytes), most)
            rounds = math.ceil(owned / transfer)
            # Without compression, contributions do not wait for the handshake.
            trips, messages = 2 if compression == "none" else 3, 1 + 2 * rounds
        core = self._coding(compression, elements / stripes, nodes)
        core += self._sending(sent / stripes, messages * (nodes - 1))
        core *= cluster.slowdown
        if compression in TILED:
            core, local = core + local, 0.0
        # A tile's slot is free again once the tile has arrived and has been added.
        turn = latency + core / rounds
        return Exchange(
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


ALGORITHMS: dict[str, Callable[[Model, str, int], Exchange]] = {
    "ring": Model._ring,
    "stripes": Model._stripes,
}


def possible(algorithm: str, compression: str) -> bool:
    """True if the algorithm is ours, or if DDP has a hook for the compression."""
    return algorithm == "stripes" or compression in ("none", "bf16")
