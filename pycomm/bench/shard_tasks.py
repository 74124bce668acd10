"""The contestants of the benchmark of sharded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import pycomm
from pycomm._training.sharding import ShardGradients
from pycomm.bench.optim_tasks import Scheme
from pycomm.bench.streams import Mix
from pycomm.bench.training import WIDTH, TrainingSettings, make_module

LR = 1e-4
MAX_NORM = 1.0


@dataclass
class Stepper:
    """A model with its optimizer, if it has one.

    Attributes:
        model: the model, wrapped or not.
        rows: this rank's input.
        optimizer: None takes no steps.
    """

    model: nn.Module
    rows: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None

    def step(self) -> None:
        """Takes a whole step of training."""
        self.model.zero_grad()
        self.model(self.rows).float().square().mean().backward()
        if self.optimizer is not None:
            self.optimizer.step()


class Own(Stepper):
    """The wrapper with FusedAdamW, whose exchange and step also run on gradients that are ready."""

    def __init__(
        self, settings: TrainingSettings, scheme: Scheme, group: pycomm.Group, **options: Any
    ) -> None:
        module, rows = make_module_and_rows(settings, scheme, group.rank)
        self._wrapped = pycomm.DataParallel(module, group=group, **options)
        if options.get("shard") is None:
            pycomm.optim.flatten(self._wrapped.parameters())
        self._fused = pycomm.optim.FusedAdamW(self._wrapped.parameters(), lr=LR, **scheme.options)
        self._ready: list[torch.Tensor | None] = []
        super().__init__(self._wrapped, rows, self._fused)

    def clip(self, max_norm: float | None) -> Own:
        """Sets the bound of the gradients' norm."""
        self._fused.max_norm = max_norm
        return self

    def finish(self) -> None:
        """Averages the gradients that are there, and steps; gradients may be averages already."""
        exchange = self._wrapped._exchange
        strategy, parameters, buckets = exchange.strategy, exchange.parameters, exchange._buckets
        if isinstance(strategy, ShardGradients):
            self._wrapped.zero_grad()
            ready = self._ready or self._run_backward(parameters)
        strategy.begin(parameters, False)
        if isinstance(strategy, ShardGradients):
            for parameter, gradient in zip(parameters, ready, strict=True):
                parameter.grad = gradient
        for number, bucket in enumerate(buckets):
            strategy.send(bucket, number, None)
        strategy.finish(buckets)
        strategy.keep(parameters, set(), exchange._bucket_of)
        self._fused.step()

    def _run_backward(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Keeps the gradients of a backward of which each rank would keep its part."""
        with self._wrapped.no_sync():
            self._wrapped(self.rows).float().square().mean().backward()
        self._ready = [parameter.grad for parameter in parameters]
        self._wrapped.zero_grad()
        return self._ready


def mix(scheme: Scheme, count: int, ranks: int, clips: bool) -> Mix:
    """The bytes that a rank must read and write to average, update and publish `count` parameters.

    It reads the gradients of its elements from all ranks, twice to clip, and writes its elements'
    parameters to all ranks. It reads and writes its own states and master weights once.
    """
    item, own = scheme.dtype.itemsize, scheme.master_bytes + 2 * scheme.state_bytes
    weights = own if scheme.master_bytes == 4 else item + own
    read = (2 if clips else 1) * item + weights / ranks
    return Mix(int(read * count), int((item + own / ranks) * count))


def count_different(ours: nn.Module, theirs: nn.Module) -> int:
    """The number of parameters, over all ranks, that differ in any bit."""
    return _count(ours, theirs, lambda a, b: _bits(a) != _bits(b))


def count_far(ours: nn.Module, theirs: nn.Module) -> int:
    """The number of parameters, over all ranks, that differ by a tenth of a step or more."""
    return _count(ours, theirs, lambda a, b: ~((a - b).abs() < LR / 10))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def _count(
    ours: nn.Module,
    theirs: nn.Module,
    differ: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> int:
    found = torch.zeros((), dtype=torch.int64)
    for one, other in zip(_whole(ours), _whole(theirs), strict=True):
        found += differ(one, other).sum()
    dist.all_reduce(found)
    return int(found)


def _whole(model: nn.Module) -> Sequence[torch.Tensor]:
    tensors = (parameter.detach() for parameter in model.parameters())
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def make_module_and_rows(
    settings: TrainingSettings, scheme: Scheme, rank: int
) -> tuple[nn.Sequential, torch.Tensor]:
    """The same model on all ranks, and rows of each rank's own."""
    torch.manual_seed(0)
    module = make_module(settings.parameters).to(scheme.dtype)
    generator = torch.Generator().manual_seed(1 + rank)
    rows = torch.randn(settings.batch, WIDTH, generator=generator)
    return module, rows.to(scheme.dtype)
