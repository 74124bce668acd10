"""The expected results of exchanges of parameters, computed with numpy.

An exchange is judged by what every rank had before it, so that it does not matter how optimizers
came there. Means are :class:`ddp.Reference`'s; the outer step is Nesterov's, written out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import golden
import numpy as np
import torch
from ddp import Reference, Step

import pycomm

Weights = dict[str, torch.Tensor]


@dataclass
class Outer:
    """All ranks' view of the model, from exchange to exchange.

    Attributes:
        size: how many ranks.
        first: index of each parameter's first element in the model.
        lr, momentum: of the outer step.
        compression: of the differences, or None.
        local_residuals: ranks continue from `last` plus their residuals.
        last: what ranks began with; None where parameters themselves are averaged.
    """

    size: int
    first: dict[str, int]
    lr: float = 1.0
    momentum: float = 0.0
    compression: pycomm.Compression | None = None
    local_residuals: bool = False
    last: dict[str, np.ndarray] | None = None
    velocity: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.means = Reference(self.size, self.compression)

    def exchange(self, weights: list[Weights], factors: list[float] | None = None) -> list[Weights]:
        """Each rank's weights after an exchange, from each rank's weights before it.

        What a rank contributes is multiplied by its factor.
        """
        factors = [1.0] * self.size if factors is None else factors
        after = {
            name: self._advance(name, [w[name] for w in weights], factors) for name in weights[0]
        }
        self.means.steps += 1
        return [{name: parts[rank] for name, parts in after.items()} for rank in range(self.size)]

    def _advance(
        self, name: str, weights: list[torch.Tensor], factors: list[float]
    ) -> list[torch.Tensor]:
        shape, dtype = weights[0].shape, weights[0].dtype
        if self.last is None:
            mean = self._mean(name, _scaled([golden.widen(w) for w in weights], factors))
            return [golden.narrow(mean, dtype).view(shape)] * self.size
        began = [golden.widen(start).reshape(shape) for start in self._starts(name, dtype)]
        changes = [golden.widen(w) - b for w, b in zip(weights, began, strict=True)]
        change = self._mean(name, _scaled(changes, factors))
        lr, momentum = (change.dtype.type(value) for value in (self.lr, self.momentum))
        if self.momentum:
            before = self.velocity.get(name, np.zeros_like(change))
            self.velocity[name] = before * momentum + change
            change = change + self.velocity[name] * momentum
        self.last[name] = self.last[name].ravel() + change * lr
        return [start.view(shape) for start in self._starts(name, dtype)]

    def _starts(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Where each rank's optimizer begins, flat."""
        assert self.last is not None
        last = self.last[name].ravel()
        if not self.local_residuals or name not in self.means.residuals:
            return [golden.narrow(last, dtype)] * self.size
        return [golden.narrow(last + kept, dtype) for kept in self.means.residuals[name]]

    def _mean(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        inputs = [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
        if not any(x.any() for x in inputs):
            return np.zeros(inputs[0].numel(), inputs[0].numpy().dtype)
        mean = self.means._mean(name, inputs, Step(first=self.first))
        return mean.numpy().ravel()


def _scaled(parts: list[np.ndarray], factors: list[float]) -> list[np.ndarray]:
    return [part * part.dtype.type(by) for part, by in zip(parts, factors, strict=True)]
