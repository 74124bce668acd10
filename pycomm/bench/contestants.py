"""The interface of contestants, and pycomm's own contestants, compressed or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

import pycomm
from pycomm._inputs import CODED_ALGORITHMS, COMPRESSIBLE
from pycomm.bench.cases import Case, Settings, bus_factor

DENSE_ALGORITHMS = ("ring", "tree")  # they run with codecs, but not with top-k


@dataclass(frozen=True)
class Prepared:
    """A case that a contestant has prepared.

    Attributes:
        source: receives the input.
        result: holds the output after a call; may be `source` itself.
        call: runs the collective once, through the API that users call.
        data: what `source` gets before each sample, as backward writes new gradients; None if
            it keeps what it has.
        residual: what `call` keeps of what compression loses.
    """

    source: torch.Tensor
    result: torch.Tensor
    call: Callable[[], object]
    data: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def rewrite(self) -> None:
        """Writes the input."""
        if self.data is not None:
            self.source.copy_(self.data)


class Contestant(Protocol):
    """One way to run a collective; its four names identify it in a table."""

    @property
    def impl(self) -> str:
        """The library."""

    @property
    def algorithm(self) -> str:
        """The library's algorithm."""

    @property
    def buffer(self) -> str:
        """``"tensor"``, or ``"window"`` if the tensors lie in the window."""

    @property
    def compression(self) -> str:
        """The compression, as a name for :func:`pycomm.parse_compression`."""

    def supports(self, case: Case) -> bool:
        """True if it can run the case."""

    def prepare(self, case: Case) -> Prepared:
        """Makes the tensors; every rank calls it, in the same order."""


@dataclass(frozen=True)
class Pycomm:
    """pycomm with one algorithm on one kind of buffer."""

    group: pycomm.Group
    algorithm: str
    buffer: str
    compression: str = "none"
    impl: str = "pycomm"

    def supports(self, case: Case) -> bool:  # noqa: ARG002
        """True: pycomm can run every case."""
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
        return Prepared(source, result, calls[case.collective], case.data(source))

    def chosen(self, case: Case) -> str | None:
        """The algorithm that ``"auto"`` picks for an all-reduce; None if there is no choice."""
        if self.algorithm != "auto" or case.collective != "all_reduce":
            return None
        in_window = self.buffer == "window"
        plan = self.group.explain(case.nbytes, case.dtype, in_window=in_window, device=case.device)
        return plan.algorithm

    def wire_bytes(self, case: Case) -> int:
        """Bytes that a rank reads from other ranks, if no rank reads more than necessary."""
        return int(case.nbytes * bus_factor(case.collective, case.ranks))


@dataclass(frozen=True)
class Compressed(Pycomm):
    """pycomm's compressed all-reduce, with or without a residual, in place as the others."""

    feedback: bool = False

    def refusal(self, case: Case) -> str | None:
        """The part of a case that it cannot do, in a word or two."""
        compression = pycomm.parse_compression(self.compression)
        dtype = str(case.dtype).removeprefix("torch.")
        if self.algorithm not in CODED_ALGORITHMS:
            return self.algorithm
        if isinstance(compression, pycomm.TopK) and self.algorithm in DENSE_ALGORITHMS:
            return f"{self.compression} by {self.algorithm}"
        if case.op not in ("avg", "sum"):
            return case.op
        if case.dtype not in COMPRESSIBLE:
            return dtype
        try:
            compression.codec(case.count, case.dtype)
        except ValueError:  # it would send more than is there
            return f"{self.compression} of {dtype}"
        return None

    def supports(self, case: Case) -> bool:
        """See :meth:`refusal`."""
        return self.refusal(case) is None

    def prepare(self, case: Case) -> Prepared:
        """Prepares ordinary tensors, since compression always stages."""
        source = torch.empty(case.count, dtype=case.dtype, device=case.device)
        residual = torch.zeros_like(source, dtype=torch.float32) if self.feedback else None
        call = functools.partial(
            pycomm.compressed_all_reduce,
            source,
            pycomm.parse_compression(self.compression),
            residual=residual,
            op=case.op,
            algorithm=self.algorithm,
            group=self.group,
        )
        return Prepared(source, source, call, case.data(source), residual)

    def chosen(self, case: Case) -> str | None:  # noqa: ARG002
        """Two-shot, at every size."""
        return "two_shot" if self.algorithm == "auto" else None

    def wire_bytes(self, case: Case) -> int:
        """See :meth:`pycomm.Compression.wire_bytes`."""
        compression = pycomm.parse_compression(self.compression)
        return compression.wire_bytes(case.count, case.ranks, case.dtype)


def own(group: pycomm.Group, settings: Settings) -> list[Contestant]:
    """Our own contestants: every algorithm on every buffer, then every algorithm compressed."""
    field: list[Contestant] = []
    for compression in settings.compressions:
        if compression == "none":
            field += [Pycomm(group, a, b) for b in settings.buffers for a in settings.algorithms]
        else:
            field += [
                Compressed(group, algorithm, "tensor", compression, feedback=settings.feedback)
                for algorithm in settings.algorithms
            ]
    return field


def refusals(field: list[Contestant], cases: list[Case]) -> list[str]:
    """Descriptions of pycomm's contestants that are left out, each once."""
    ours = [contestant for contestant in field if isinstance(contestant, Compressed)]
    found = [contestant.refusal(case) for case in cases for contestant in ours]
    return list(dict.fromkeys(reason for reason in found if reason is not None))
