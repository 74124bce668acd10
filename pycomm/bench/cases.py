"""The settings of a run, and the cases that they expand to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Settings:
    """A whole run, as asked for on the command line; see ``python -m pycomm.bench -h``."""

    collective: str
    ranks: int
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    algorithms: tuple[str, ...]
    buffers: tuple[str, ...]
    compressions: tuple[str, ...]
    feedback: bool
    peers: tuple[str, ...]
    iters: int | None
    warmup_iters: int | None
    check: bool
    brief: bool
    device: str
    timeout: float
    json: str | None
    plot: str | None
    command: str


@dataclass(frozen=True)
class Case:
    """One case of the benchmark, which every contestant runs.

    Attributes:
        collective: all_reduce, reduce_scatter, all_gather or broadcast.
        dtype: dtype of the elements.
        op: the reduction.
        count: elements of the whole tensor: reduce_scatter's input, or all_gather's output.
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

    def tensors(self, empty: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's input and output, made by `empty`; the same tensor if it works in place."""
        whole = empty(self.count, dtype=self.dtype)
        if self.collective in ("all_reduce", "broadcast"):
            return whole, whole
        block = empty(self.count // self.ranks, dtype=self.dtype)
        return (block, whole) if self.collective == "all_gather" else (whole, block)

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
    if collective == "broadcast":
        return 1.0
    return (ranks - 1) / ranks


def expand(settings: Settings, ranks: int) -> Iterator[Case]:
    """Every case of a run, cut to whole elements for every rank.

    What one might compare, dtypes and operations at one size, is measured close together.
    """
    for size, name, op in itertools.product(settings.sizes, settings.dtypes, settings.ops):
        dtype: torch.dtype = getattr(torch, name)
        blocks = 1 if settings.collective in ("all_reduce", "broadcast") else ranks
        unit = blocks * dtype.itemsize
        count = max(size // unit, 1) * blocks
        yield Case(settings.collective, dtype, op, count, ranks, settings.device)
