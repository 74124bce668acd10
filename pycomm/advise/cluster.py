"""A cluster: nodes, their ranks, and the links between nodes."""

from __future__ import annotations

from dataclasses import dataclass


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
