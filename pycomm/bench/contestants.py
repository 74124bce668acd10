"""Who competes: the interface of every contestant, and pycomm's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

import pycomm
from pycomm.bench.cases import Case


@dataclass(frozen=True)
class Prepared:
    """A case made ready by a contestant.

    Attributes:
        source: takes the input.
        result: holds the output after a call; may be `source` itself.
        call: runs the collective once, through the API that users call.
    """

    source: torch.Tensor
    result: torch.Tensor
    call: Callable[[], object]


class Contestant(Protocol):
    """One way to run a collective; the three names tell it from the others in a table."""

    @property
    def impl(self) -> str:
        """Whose code it is."""

    @property
    def algorithm(self) -> str:
        """Which of its algorithms."""

    @property
    def buffer(self) -> str:
        """``"tensor"``, or ``"window"`` where the tensors lie in shared memory."""

    def supports(self, case: Case) -> bool:
        """Whether it can run the case at all."""

    def prepare(self, case: Case) -> Prepared:
        """Makes the tensors; every rank calls it, in the same order."""


@dataclass(frozen=True)
class Pycomm:
    """pycomm with one algorithm on one kind of buffer."""

    group: pycomm.Group
    algorithm: str
    buffer: str
    impl: str = "pycomm"

    def supports(self, case: Case) -> bool:  # noqa: ARG002
        """Everything."""
        return True

    def prepare(self, case: Case) -> Prepared:
        """Tensors from torch or from the group's window."""
        empty = self.group.empty if self.buffer == "window" else torch.empty
        source, result = case.tensors(functools.partial(empty, device=case.device))
        group, op, algorithm = self.group, case.op, self.algorithm
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: pycomm.all_reduce(source, op, algorithm=algorithm, group=group),
            "reduce_scatter": lambda: pycomm.reduce_scatter(result, source, op, group=group),
            "all_gather": lambda: pycomm.all_gather(result, source, group=group),
            "broadcast": lambda: pycomm.broadcast(source, group=group),
        }
        return Prepared(source, result, calls[case.collective])

    def chosen(self, case: Case) -> str | None:
        """What ``"auto"`` picks for an all-reduce; None where nothing is to pick."""
        if self.algorithm != "auto" or case.collective != "all_reduce":
            return None
        in_window = self.buffer == "window"
        plan = self.group.explain(case.nbytes, case.dtype, in_window=in_window, device=case.device)
        return plan.algorithm


def own(
    group: pycomm.Group, algorithms: tuple[str, ...], buffers: tuple[str, ...]
) -> list[Contestant]:
    """Our own contestants: every algorithm on every buffer."""
    return [Pycomm(group, algorithm, buffer) for buffer in buffers for algorithm in algorithms]
