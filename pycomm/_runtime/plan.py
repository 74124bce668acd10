"""Explains how an all-reduce will run: algorithm, steps and bytes (csrc/core/cost.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs import check_over_nccl, operation_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NAMED = "named by the caller"


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
            None on CUDA.
        bytes_out: bytes that this rank writes to other ranks' memory, or sends to other nodes; None
            on CUDA.
    """

    algorithm: str
    why: str
    device: str
    path: str
    steps: int | None
    bytes_in: int | None
    bytes_out: int | None


def select(nbytes: int, size: int, device: str = "cpu") -> str:
    """The algorithm that ``algorithm="auto"`` picks."""
    return _C.select_algorithm(nbytes, size, device)


def make_plan(
    core: _C.Group, nbytes: int, dtype: torch.dtype, size: int, algorithm: str, in_window: bool
) -> Plan:
    """The plan of one rank; see :meth:`pycomm.Group.explain`."""
    chosen = select(nbytes, size) if algorithm == "auto" else algorithm
    why = _NAMED
    if algorithm == "auto":
        why = f"measured best for {nbytes} bytes among {size} ranks on cpu"
    path = "window" if in_window and chosen in _C.zero_copy_algorithms else "staged"
    if size == 1:
        why, path = "a world of one", "alone"
    operation = operation_of("all_reduce", chosen, dtype)
    cost = _C.cost(core, operation, nbytes // dtype.itemsize, in_window)
    return Plan(chosen, why, "cpu", path, *cost)


def make_spanning_plan(
    core: _C.Group,
    nbytes: int,
    dtype: torch.dtype,
    nodes: Sequence[Sequence[int]],
    algorithm: str,
    table: Sequence[dict[str, Any]] | None,
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
    sent, received = _C.link_cost(core, operation, nbytes // dtype.itemsize)
    return Plan(chosen, why, "cpu", path, None, received, sent)


def make_cuda_plan(nbytes: int, size: int, algorithm: str, transport: str) -> Plan:
    """The plan of every rank on CUDA, without steps and bytes."""
    chosen = select(nbytes, size, "cuda") if algorithm == "auto" else algorithm
    why = _NAMED if chosen == algorithm else f"the table's choice for {nbytes} B"
    return Plan(chosen, why, "cuda", transport, None, None, None)


def check_bytes(nbytes: int, dtype: torch.dtype) -> None:
    """Raises ValueError for a number of bytes that no tensor of the dtype has."""
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise ValueError(
            f"nbytes must be a multiple of {dtype.itemsize}, the size of {dtype}, got {nbytes}"
        )
