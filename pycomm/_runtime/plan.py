"""Explains how an all-reduce will run: algorithm, steps, bytes and links (csrc/core/cost.h)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs import (
    ALGORITHMS,
    check_choice,
    check_dtype,
    operation_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMED = "named by the caller"


@dataclass(frozen=True)
class PeerLink:
    """A rank with which this one exchanges in an all-reduce, and the link between the two.

    Attributes:
        rank: the other rank.
        link: what carries the bytes, such as ``"shared memory, across NUMA nodes 0 and 1"``,
            ``"CUDA IPC over NVLink"`` or ``"TCP to 10.0.0.2"``.
        bytes_in: bytes that this rank reads from the other one's memory, or receives from it; None
            if they are not counted: on CUDA and, between nodes, among the ranks of a node.
        bytes_out: bytes that this rank writes to the other one's memory, or sends to it.
    """

    rank: int
    link: str
    bytes_in: int | None
    bytes_out: int | None

    def __str__(self) -> str:
        counted = f": {self.bytes_in} bytes in, {self.bytes_out} out"
        return f"rank {self.rank}, {self.link}{'' if self.bytes_in is None else counted}"


@dataclass(frozen=True)
class Plan:
    """One rank's part in an all-reduce.

    Attributes:
        algorithm: the algorithm that runs.
        why: the reason for the choice.
        device: ``"cpu"`` or ``"cuda"``.
        path: on the CPU, ``"staged"`` (through staging areas), ``"window"`` (zero copy: tensors lie
            in the window), ``"alone"`` (a single rank), or the numbers of nodes and stripes; on
            CUDA, ``"threads"``, ``"peer memory"`` or ``"pinned host memory"``.
        steps: signals that this rank sends; None on CUDA and between nodes.
        bytes_in: bytes that this rank reads from other ranks' memory, or receives from other nodes;
            None on CUDA within a node.
        bytes_out: bytes that this rank writes to other ranks' memory, or sends to other nodes; None
            on CUDA within a node.
        links: the ranks with which this one exchanges, each with its link. They do not count when
            plans are compared.
    """

    algorithm: str
    why: str
    device: str
    path: str
    steps: int | None
    bytes_in: int | None
    bytes_out: int | None
    links: tuple[PeerLink, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        counted = ""
        if self.bytes_in is not None:
            steps = "" if self.steps is None else f"{self.steps} steps, "
            counted = f": {steps}{self.bytes_in} bytes in, {self.bytes_out} out"
        first = f"{self.algorithm} on {self.device}, {self.path}{counted} ({self.why})"
        return "\n".join([first, *map(str, self.links)])


def select(nbytes: int, size: int, device: str = "cpu") -> str:
    """The algorithm that ``algorithm="auto"`` picks."""
    return _C.select_algorithm(nbytes, size, device)


def explain(
    group: Any, nbytes: int, dtype: torch.dtype, algorithm: str, in_window: bool, device: str
) -> Plan:
    """The plan of a rank of a :class:`pycomm.Group`; see :meth:`pycomm.Group.explain`."""
    check_dtype("dtype", dtype)
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_bytes(nbytes, dtype)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    spans = group._spans(torch.device(device))
    links, core = _links_of(group, device, spans), group._core
    if len(group.nodes) > 1:
        table = None if spans else group._algorithms
        of = group.nodes, algorithm, table, links, group.rank
        return make_spanning_plan(core, nbytes, dtype, device, *of)
    if device == "cuda":
        return make_cuda_plan(group, nbytes, dtype, algorithm, links)
    return make_plan(core, nbytes, dtype, group.size, algorithm, in_window, links)


def _links_of(group: Any, device: str, spans: bool) -> dict[int, str]:
    """The links to the ranks with which a rank exchanges tensors on a device, by rank."""
    from pycomm._runtime.topology import links_of

    node = group._span.node if spans else group  # None: no other rank is on this node
    side = None if node is None else node._cuda
    if side is None:
        return links_of(group, device, over_nccl=spans)
    return links_of(group, device, side.transport, side.devices, spans)


def make_plan(
    core: _C.Group,
    nbytes: int,
    dtype: torch.dtype,
    size: int,
    algorithm: str,
    in_window: bool,
    links: Mapping[int, str],
) -> Plan:
    """The plan of one rank; see :meth:`pycomm.Group.explain`.

    It has a link to every other rank.
    """
    chosen = select(nbytes, size) if algorithm == "auto" else algorithm
    why = _NAMED
    if algorithm == "auto":
        why = f"measured best for {nbytes} bytes among {size} ranks on cpu"
    path = "window" if in_window and chosen in _C.zero_copy_algorithms else "staged"
    if size == 1:
        why, path = "a world of one", "alone"
    operation = operation_of("all_reduce", chosen, dtype)
    count = nbytes // dtype.itemsize
    cost = _C.cost(core, operation, count, in_window)
    partners = _C.cost_by_rank(core, operation, count, in_window)
    return Plan(chosen, why, "cpu", path, *cost, _links(range(size), partners, links))


def make_spanning_plan(
    core: _C.Group,
    nbytes: int,
    dtype: torch.dtype,
    device: str,
    nodes: Sequence[Sequence[int]],
    algorithm: str,
    table: Sequence[dict[str, Any]] | None,
    links: Mapping[int, str],
    rank: int,
) -> Plan:
    """The plan of one rank of a group that spans nodes; it counts bytes between nodes.

    Without a table, also an empty one, the tensor goes over NCCL.
    """
    if table is None:
        check_over_nccl(algorithm)
    stripes = _C.stripes(nodes)
    path = f"{len(nodes)} nodes, {stripes} stripe{'s' if stripes > 1 else ''}"
    chosen, why = algorithm, _NAMED
    if algorithm == "auto":
        chosen, why = "two_shot", "over NCCL there is no other, whatever the table says"
        if table is not None:
            from pycomm._runtime.algorithm_table import reason

            row = core.matching_row(nbytes)
            chosen = "two_shot" if row < 0 else table[row]["algorithm"]
            why = reason(table, row)
    operation = operation_of("all_reduce", chosen, dtype)
    by_node = _C.link_cost_by_node(core, operation, nbytes // dtype.itemsize)
    received, sent = map(sum, zip(*by_node, strict=True))
    local = next(ranks for ranks in nodes if rank in ranks)
    inside = [PeerLink(r, links[r], None, None) for r in local if r != rank and nbytes > 0]
    index = local.index(rank)
    carriers = [ranks[index] for ranks in nodes] if index < stripes else []
    between = _links(carriers, by_node, links)
    return Plan(chosen, why, device, path, None, received, sent, (*inside, *between))


def make_cuda_plan(
    group: Any, nbytes: int, dtype: torch.dtype, algorithm: str, links: Mapping[int, str]
) -> Plan:
    """The plan of one rank on CUDA, without steps and bytes."""
    size, side = group.size, group._cuda
    chosen = select(nbytes, size, "cuda") if algorithm == "auto" else algorithm
    why = _NAMED if chosen == algorithm else f"the table's choice for {nbytes} B"
    name = str(dtype).removeprefix("torch.")
    operation = _C.Operation(collective="all_reduce", algorithm=chosen, dtype=name, device="cuda")
    if side is not None:
        side.check_operation(operation)
    partners = _C.cost_by_rank(group._core, operation, nbytes // dtype.itemsize, False)
    uncounted = tuple(
        PeerLink(each.rank, each.link, None, None) for each in _links(range(size), partners, links)
    )
    transport = "not connected yet" if side is None else side.transport
    return Plan(chosen, why, "cuda", transport, None, None, None, uncounted)


def _links(
    ranks: Sequence[int], partners: Sequence[tuple[int, int]], links: Mapping[int, str]
) -> tuple[PeerLink, ...]:
    """The ranks with which bytes are exchanged; `partners` has the bytes of each of them."""
    pairs = zip(ranks, partners, strict=False)  # a rank that carries no stripe has no carriers
    return tuple(PeerLink(rank, links[rank], *moved) for rank, moved in pairs if any(moved))


def check_over_nccl(algorithm: str) -> None:
    """Raises ValueError for an algorithm that does not run between nodes over NCCL."""
    if algorithm not in ("auto", "two_shot"):
        raise ValueError(
            f"algorithm must be auto or two_shot between nodes over NCCL, got {algorithm}"
        )


def check_bytes(nbytes: int, dtype: torch.dtype) -> None:
    """Raises ValueError for a number of bytes that no tensor of the dtype has."""
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise ValueError(
            f"nbytes must be a multiple of {dtype.itemsize}, the size of {dtype}, got {nbytes}"
        )
