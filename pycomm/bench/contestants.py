"""A case of a collective, the ways in which pycomm runs it, and the row of a result."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

import pycomm
from pycomm._inputs import CODED_ALGORITHMS, COMPRESSIBLE
from pycomm.bench.measure import Figures, Prepared
from pycomm.bench.report import Column, TimedRow, cell, spread

IN_PLACE = ("all_reduce", "broadcast", "reduce")
GATHERS = ("all_gather", "gather")  # the input is a block of the output
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOT = 0
USUAL = ("default", "tensor", "none")  # words of a contestant that tables leave out
DENSE_ALGORITHMS = ("ring", "tree")  # they run with codecs, but not with top-k


@dataclass(frozen=True)
class Case:
    """One case of the benchmark, which every contestant runs.

    Attributes:
        collective: a word of the command line.
        dtype: dtype of the elements.
        op: the reduction.
        count: elements of the whole tensor: the larger one of input and output.
        ranks: how many take part.
        device: where the tensors lie.
    """

    collective: str
    dtype: torch.dtype
    op: str
    count: int
    ranks: int
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.count * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype, as the command line calls it."""
        return str(self.dtype).removeprefix("torch.")

    def tensors(self, empty: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's input and output, made by `empty`; the same tensor if it works in place."""
        whole = empty(self.count, dtype=self.dtype)
        if self.collective in IN_PLACE:
            return whole, whole
        if self.collective in ("all_to_all", "send_recv"):
            return whole, empty(self.count, dtype=self.dtype)
        block = empty(self.count // self.ranks, dtype=self.dtype)
        return (block, whole) if self.collective in GATHERS else (whole, block)

    def data(self, source: torch.Tensor) -> torch.Tensor:
        """What `source` gets before each sample: normal deviates, or small integers."""
        return _deviates(self)[: source.numel()]


@functools.lru_cache(maxsize=1)  # all contestants of a case have the same
def _deviates(case: Case) -> torch.Tensor:
    whole = torch.empty(case.count, dtype=case.dtype, device=case.device)
    return whole.normal_() if case.dtype.is_floating_point else whole.random_(0, 3)


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: bytes on the slowest link per byte of the tensor."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Contestant(ABC):
    """One way to run a collective; its four names identify it in a table.

    Attributes:
        impl: the library.
        algorithm: the library's algorithm.
        buffer: ``"tensor"``, or ``"window"`` if the tensors lie in the window.
        compression: a name for :func:`pycomm.parse_compression`.
    """

    impl: str
    algorithm: str = "default"
    buffer: str = "tensor"
    compression: str = "none"

    @abstractmethod
    def supports(self, case: Case) -> bool:
        """True if it can run the case."""

    @abstractmethod
    def prepare(self, case: Case) -> Prepared:
        """Makes the tensors; every rank calls it, in the same order."""


Value = TypeVar("Value")


def only_if(condition: bool, value: Value) -> Value | None:
    """The value, or None."""
    return value if condition else None


@dataclass(frozen=True, kw_only=True)
class Pycomm(Contestant):
    """pycomm with one algorithm on one kind of buffer."""

    group: pycomm.Group
    impl: str = "pycomm"
    algorithm: str = "auto"

    def supports(self, case: Case) -> bool:
        """True, but for one-shot between nodes, and multicast where it is refused."""
        if self.algorithm == "multicast":
            return case.op in ("sum", "avg") and self._has_multicast(case)
        return self.algorithm != "one_shot" or len(self.group.nodes) == 1

    def _has_multicast(self, case: Case) -> bool:
        if case.device == "cuda" and len(self.group.nodes) == 1:
            self.group._cuda_side(torch.device("cuda"))  # connects all ranks
        try:
            self.group.explain(case.nbytes, case.dtype, algorithm="multicast", device=case.device)
        except ValueError:
            return False
        return True

    def prepare(self, case: Case) -> Prepared:
        """Tensors from torch or from the group's window."""
        empty = self.group.empty if self.buffer == "window" else torch.empty
        source, result = case.tensors(functools.partial(empty, device=case.device))
        group, op, algorithm = self.group, case.op, self.algorithm
        at_root = functools.partial(only_if, group.rank == ROOT)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: pycomm.all_reduce(source, op, algorithm=algorithm, group=group),
            "reduce_scatter": lambda: pycomm.reduce_scatter(result, source, op, group=group),
            "all_gather": lambda: pycomm.all_gather(result, source, group=group),
            "broadcast": lambda: pycomm.broadcast(source, ROOT, group=group),
            "reduce": lambda: pycomm.reduce(source, ROOT, op, group=group),
            "gather": lambda: pycomm.gather(source, at_root(result), ROOT, group=group),
            "scatter": lambda: pycomm.scatter(result, at_root(source), ROOT, group=group),
            "all_to_all": lambda: pycomm.all_to_all(result, source, group=group),
            "send_recv": lambda: self._pass_on(source, result),
        }
        return Prepared(source, result, calls[case.collective], case.data(source))

    def _pass_on(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Sends to the next rank, and receives from the one before."""
        group = self.group
        request = pycomm.isend(source, (group.rank + 1) % group.size, group=group)
        pycomm.recv(result, (group.rank - 1) % group.size, group=group)
        request.wait()

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


@dataclass(frozen=True, kw_only=True)
class Compressed(Pycomm):
    """pycomm's compressed all-reduce, with or without a residual, in place as the others."""

    feedback: bool = False

    def refusal(self, case: Case) -> str | None:
        """The part of a case that this contestant cannot run, in a word or two; empty if it can."""
        compression = pycomm.parse_compression(self.compression)
        dtype = case.dtype_name
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
        except ValueError:  # top-k would send more bytes than the tensor has
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


@dataclass(frozen=True)
class CollectiveRow(TimedRow):
    """One contestant's result in one case.

    Attributes:
        chosen: the algorithm that ``"auto"`` picked.
        wire_bytes: bytes that a rank reads from other ranks; None for other libraries.
        algbw_GBps: bytes of the tensor per time; with compression the effective bandwidth.
        wrong: wrong elements over all ranks; None if nothing was checked.
        over_floor: this row's time over the floor's; None if there is no floor for it.
    """

    collective: str
    impl: str
    algorithm: str
    chosen: str | None
    device: str
    dtype: str
    op: str
    compression: str
    ranks: int
    buffer: str
    bytes: int
    wire_bytes: int | None
    count: int
    algbw_GBps: float  # noqa: N815 - the unit
    busbw_GBps: float  # noqa: N815 - the unit
    wrong: int | None
    over_floor: float | None

    columns: ClassVar[tuple[Column, ...]] = (
        Column("size", "(B)", 10, cell("bytes")),
        Column("count", "(elements)", 12, cell("count"), wide=True),
        Column("type", "", 9, cell("dtype"), wide=True),
        Column("redop", "", 6, cell("op"), wide=True),
        Column("wire", "(B)", 12, cell("wire_bytes"), wide=True),
        Column("time", "(us)", 9, cell("time_us", ".2f")),
        Column("algbw", "(GB/s)", 7, cell("algbw_GBps", ".2f"), wide=True),
        Column("busbw", "(GB/s)", 6, cell("busbw_GBps", ".2f")),
        Column("#wrong", "", 6, cell("wrong", absent="N/A")),
        *spread(narrow=("p99",)),
        Column("time", "/floor", 6, cell("over_floor", ".2f")),
        Column("contestant", "", -28, lambda row: row.contestant()),
    )

    def contestant(self) -> str:
        """The library, its algorithm, and what is not as usual."""
        algorithm = f"{self.algorithm}:{self.chosen}" if self.chosen else self.algorithm
        words = (algorithm, self.buffer, self.compression)
        return " ".join([self.impl, *(word for word in words if word not in USUAL)])

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        words = (self.impl, self.algorithm, self.buffer, self.compression, self.dtype, self.op)
        return " ".join(words), self.bytes, "bytes"


def make_row(
    case: Case,
    contestant: Contestant,
    figures: Figures,
    wrong: int | None,
    least: dict[str, Any] | None,
) -> CollectiveRow:
    """Makes a row from the measured figures; `least` is the floor."""
    bandwidth = case.nbytes / figures.time_us / 1e3
    floor_us = least["time_us"] if least and contestant.compression == "none" else None
    ours = contestant if isinstance(contestant, Pycomm) else None
    return CollectiveRow(
        collective=case.collective,
        impl=contestant.impl,
        algorithm=contestant.algorithm,
        chosen=ours.chosen(case) if ours else None,
        device=case.device,
        dtype=case.dtype_name,
        op=case.op if case.collective in REDUCTIONS else "none",
        compression=contestant.compression,
        ranks=case.ranks,
        buffer=contestant.buffer,
        bytes=case.nbytes,
        wire_bytes=ours.wire_bytes(case) if ours else None,
        count=case.count,
        algbw_GBps=round(bandwidth, 3),
        busbw_GBps=round(bandwidth * bus_factor(case.collective, case.ranks), 3),
        wrong=wrong,
        over_floor=round(figures.time_us / floor_us, 2) if floor_us else None,
        **figures.columns(),
    )
