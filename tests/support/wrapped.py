"""Models in pycomm.DataParallel: their steps, and the same steps in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ddp
import golden
import torch
from torch import nn
from wrapping import data_parallel

import pycomm

TINY = 1e-5  # MiB: a bucket per parameter


class Wrapped(ddp.Watched):
    """A wrapped model with steps that :class:`ddp.Reference` can check."""

    def __init__(
        self, module: nn.Module, compression: pycomm.Compression | None, **options: Any
    ) -> None:
        self.model = data_parallel(module, compression=compression, **options)
        self.state = self.model.comm_state
        self.feedback = options.get("feedback", True) and compression is not None
        self.exclude = options.get("exclude") or ddp.sent_dense
        self.begin()

    def begin(self, scale: float = 1.0) -> None:
        super().begin(scale)
        self.seen.first = ddp.first_elements(self.model)

    def backward(self, loss: torch.Tensor, scale: float = 1.0, **local: torch.Tensor) -> ddp.Step:
        """One exchange; `local`: this rank's gradients by name, zeros by default."""
        step = super().backward(loss, scale)
        for name, parameter in ddp.unprefixed(self.model).items():
            step.local[name] = local.get(name, torch.zeros_like(parameter)).detach()
        return step

    def run(self, rank: int, steps: Iterable[int], skip: Iterable[str] = ()) -> list[ddp.Step]:
        """Steps of :class:`ddp.Given`."""
        seen = []
        for step in steps:
            self.model.zero_grad()
            given = ddp.gradients(self.model, rank, step, skip)
            seen.append(self.backward(self.model(given), **given))
        return seen


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def batch_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """For :func:`ddp.network`."""
    return model(ddp.batch(rank, step)).square().mean()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies, by the names of the user's module."""
    named = ddp.unprefixed(model).items()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ddp.unprefixed(model).items()}


def mean_gradients(
    module: nn.Module, size: int, step: int, loss: Loss = batch_loss
) -> dict[str, torch.Tensor | None]:
    """The mean, in rank order, of each rank's gradients, computed by torch in one process."""
    everyone = []
    for rank in range(size):
        module.zero_grad()
        loss(module, rank, step).backward()
        everyone.append(gradients_of(module))
    module.zero_grad()
    return {name: _mean([one[name] for one in everyone]) for name in everyone[0]}


def _mean(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    flat = [torch.zeros_like(like) if part is None else part for part in parts]
    flat = [part.contiguous().flatten() for part in flat]
    return golden.in_rank_order(flat, "avg").view(like.shape)


def same(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> bool:
    """True if all bits agree and the same tensors are None."""
    assert a.keys() == b.keys()
    for name in a:
        if a[name] is None or b[name] is None:
            assert a[name] is b[name] is None, f"{name}: {a[name]} and {b[name]}"
        else:
            assert golden.same_bits(a[name], b[name]), f"{name}: {a[name]} and {b[name]}"
    return True


def train(
    model: nn.Module, rank: int, steps: Iterable[int], loss: Loss = batch_loss, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Parameters after every step of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in steps:
        optimizer.zero_grad(**options)
        loss(model, rank, step).backward()
        optimizer.step()
        seen.append(parameters_of(model))
    return seen
