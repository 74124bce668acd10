"""What an all-reduce takes: latency, bandwidth and the work of cores, for every way to do it.

All formulas are derived in docs/advisor.md, by the names used here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pycomm
from pycomm import _C
from pycomm.advise.cluster import Cluster
from pycomm.advise.constants import COMPRESSIONS, Constants

MOST_RANKS = 16384  # that anybody asks about
ELEMENT_BYTES = 4  # gradients are float32
PIECE_BYTES = 64 << 10  # of a pipelined tree, before compression
PARCEL_BYTES = 256 << 10  # that one machine sends another in a round (csrc/cpu/parts.h)
AHEAD = 2  # rounds that are on the wire before one is waited for (csrc/core/between.h)


@dataclass(frozen=True)
class Exchange:
    """What an all-reduce of one tensor takes.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        compression: one of `COMPRESSIONS`.
        rank_bytes: bytes that the busiest rank sends, over memory or link; it receives as many.
        link_bytes: bytes that a machine sends to others; it receives as many.
        wire: seconds that the busiest link carries bytes, or in ring and tree the chain of hops.
        core: seconds of work of the busiest rank's core for what goes over the link.
        local: seconds inside the machine, before and after the link's part.
        latency: seconds that the first byte of all is on its way, with nothing else to do.
        rounds: parts that are pipelined.
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
        """Seconds of a rank's core altogether."""
        return self.core + self.local

    @property
    def seconds(self) -> float:
        """From the call to the result: of link and core one waits for the other, pipelined."""
        longer, shorter = max(self.wire, self.core), min(self.wire, self.core)
        return self.local + longer + shorter / self.rounds + self.latency


def compressor_of(compression: str, density: float) -> pycomm.Compressor:
    """The compressor that a name of `COMPRESSIONS` stands for."""
    return pycomm.parse_compressor(f"topk:{density}" if compression == "topk" else compression)


def encoded_bytes(elements: int, compression: str, density: float) -> int:
    """What a gradient of so many float32 elements becomes."""
    if compression == "none":
        return elements * ELEMENT_BYTES
    return compressor_of(compression, density).encoded_bytes(elements)


def two_shot_bytes(nbytes: float, parties: int) -> float:
    """Bytes that each of `parties` sends, and receives, in a two-shot or ring all-reduce."""
    return 2 * (parties - 1) / parties * nbytes


@functools.cache
def tree_bytes(ranks: int, machine_of: tuple[int, ...]) -> tuple[float, float]:
    """What the busiest rank and the busiest machine send, per byte of the tensor."""
    from_rank = [0.0] * ranks
    from_machine = [0.0] * (machine_of[-1] + 1)
    for tree in range(2):
        for rank in range(ranks):
            parent, _, _ = _C.tree_node(tree, rank, ranks)
            if parent < 0:
                continue
            for sender in (rank, parent):  # half of the tensor up, and half of the result down
                from_rank[sender] += 0.5
                if machine_of[rank] != machine_of[parent]:
                    from_machine[machine_of[sender]] += 0.5
    return max(from_rank), max(from_machine)


class Model:
    """Predicts all-reduces of a cluster.

    Args:
        cluster: whose.
        constants: of its machines.
        density: of top-k.
    """

    def __init__(self, cluster: Cluster, constants: Constants, density: float = 0.01) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {density}")
        self.cluster, self.constants, self.density = cluster, constants, density

    def exchange(self, algorithm: str, compression: str, elements: int) -> Exchange:
        """An all-reduce of float32 elements.

        Args:
            algorithm: one of `ALGORITHMS`.
            compression: one of `COMPRESSIONS`; top-k not by ring or tree.
            elements: of the tensor, at least one.

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
            raise ValueError(f"compression by {algorithm} must not be topk")
        return ALGORITHMS[algorithm](self, compression, elements)

    def _encoded(self, elements: int, compression: str) -> int:
        return encoded_bytes(elements, compression, self.density)

    def _coding(self, compression: str, elements: float, owners: int) -> float:
        """Seconds to encode, add, encode again what is owned, and decode."""
        encode, decode, decode_add = (
            self.constants[f"{compression}.{operation}"]
            for operation in ("encode", "decode", "decode_add")
        )
        return elements * (encode * (1 + 1 / owners) + decode_add + decode)

    def _sending(self, nbytes: float, messages: float) -> float:
        """Seconds of a core to send so many bytes over the link, and receive as many."""
        return nbytes * self.constants["link.core"] + messages * self.constants["link.message"]

    def _local(self, elements: int) -> float:
        """Seconds that the ranks of one machine take to reduce a tensor and share the result."""
        ranks = self.cluster.most_ranks
        if ranks == 1:
            return 0.0
        share = ranks / self.constants["local.ranks"]  # all ranks' bytes go through one memory
        per_byte = self.constants["local.all_reduce"] * share * self.cluster.slowdown
        return self.constants["local.latency"] + elements * ELEMENT_BYTES * per_byte

    def _ring(self, compression: str, elements: int) -> Exchange:
        """All ranks in one ring, neighbours on one machine where they can be."""
        cluster, link = self.cluster, self.cluster.link
        n, between = cluster.ranks, cluster.nodes if cluster.nodes > 1 else 0
        sent = two_shot_bytes(self._encoded(elements, compression), n)
        steps, chunk = 2 * (n - 1), sent / max(2 * (n - 1), 1)
        far, near = chunk * link.seconds_per_byte, chunk * self.constants["local.all_reduce"]
        around = between * (link.latency + far)
        around += (n - between) * (self.constants["local.latency"] + near)
        core = self._coding(compression, elements, n) if n > 1 else 0.0
        core += self._sending(sent, steps) if between else 0.0
        return Exchange(
            algorithm="ring",
            compression=compression,
            rank_bytes=sent,
            link_bytes=sent if between else 0.0,
            wire=steps * max(far if between else near, around / n),
            core=core * cluster.slowdown,
            local=0.0,
            latency=0.0,
            rounds=max(steps, 1),
        )

    def _tree(self, compression: str, elements: int) -> Exchange:
        """A double binary tree of all ranks, in pieces."""
        cluster, link = self.cluster, self.cluster.link
        n, nbytes = cluster.ranks, self._encoded(elements, compression)
        by_rank, by_machine = tree_bytes(n, cluster.machine_of)
        pieces = max(math.ceil(elements * ELEMENT_BYTES / 2 / PIECE_BYTES), 1)
        piece = nbytes / 2 / pieces
        far_levels = math.ceil(math.log2(cluster.nodes))
        near_levels = max(math.floor(math.log2(n)) - far_levels, 0)
        near = self.constants["local.latency"] + piece * self.constants["local.all_reduce"]
        far = link.latency + 2 * piece * link.seconds_per_byte
        busiest = by_machine * nbytes * link.seconds_per_byte
        if cluster.nodes == 1:
            busiest = by_rank * nbytes * self.constants["local.all_reduce"]
        core = self._coding(compression, elements, n) if n > 1 else 0.0
        core += self._sending(by_rank * nbytes, 4 * pieces) if cluster.nodes > 1 else 0.0
        return Exchange(
            algorithm="tree",
            compression=compression,
            rank_bytes=by_rank * nbytes,
            link_bytes=by_machine * nbytes,
            wire=busiest,
            core=core * cluster.slowdown,
            local=0.0,
            latency=2 * (far_levels * far + near_levels * near),
            rounds=pieces,
        )

    def _hierarchical(self, compression: str, elements: int) -> Exchange:
        """Reduced inside each machine, of which one rank exchanges with those of the others."""
        return self._between("hierarchical", compression, elements, 1)

    def _stripes(self, compression: str, elements: int) -> Exchange:
        """The same, where each rank exchanges a part: what pycomm does."""
        return self._between("stripes", compression, elements, self.cluster.stripes)

    def _between(self, name: str, compression: str, elements: int, stripes: int) -> Exchange:
        cluster, link = self.cluster, self.cluster.link
        machines, nbytes = cluster.nodes, self._encoded(elements, compression)
        local = self._local(elements)
        inside = two_shot_bytes(elements * ELEMENT_BYTES, cluster.most_ranks)
        if machines == 1:
            return Exchange(name, compression, inside, 0.0, 0.0, 0.0, local, 0.0, 1)
        sent = two_shot_bytes(nbytes, machines)
        rounds = 1  # of top-k: a selection is of the whole
        if compression != "topk":
            rounds = math.ceil(nbytes / stripes / machines / PARCEL_BYTES)
        core = self._coding(compression, elements / stripes, machines)
        core += self._sending(sent / stripes, rounds * 2 * (machines - 1))
        wire = max(sent - link.burst, 0) * link.seconds_per_byte
        return Exchange(
            algorithm=name,
            compression=compression,
            rank_bytes=inside + sent / stripes,
            link_bytes=sent,
            wire=max(wire, rounds * link.latency / AHEAD),
            core=core * cluster.slowdown,
            local=local,
            latency=2 * link.latency,
            rounds=rounds,
        )


ALGORITHMS: dict[str, Callable[[Model, str, int], Exchange]] = {
    "ring": Model._ring,
    "tree": Model._tree,
    "hierarchical": Model._hierarchical,
    "stripes": Model._stripes,
}


def possible(algorithm: str, compression: str) -> bool:
    """Top-k needs an owner who selects again."""
    return compression != "topk" or algorithm in ("hierarchical", "stripes")


def crossing(model: Callable[[int], Model], elements: int, largest: int = MOST_RANKS) -> int | None:
    """The fewest ranks, of powers of two, from which on a tree is faster than a ring.

    Args:
        model: of a cluster of so many ranks.
        elements: of the tensor, uncompressed.
        largest: where to stop looking.

    Returns:
        None where the ring is the faster one up to the largest.
    """
    found = None
    ranks = largest
    while ranks >= 2:
        this = model(ranks)
        ring, tree = (this.exchange(name, "none", elements).seconds for name in ("ring", "tree"))
        if tree >= ring:
            break
        found, ranks = ranks, ranks // 2
    return found
