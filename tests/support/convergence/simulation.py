"""Compressed training of all ranks in one process, to compare the library with.

Ranks' parameters, gradients and residuals are rows of matrices. Selection is the library's own;
what is sent, how it is rounded and what the optimizer makes of it is plain PyTorch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

import pycomm
from convergence.sparse import RECIPES
from convergence.tasks import TASKS, Task
from convergence.training import DENSE, rate_factor

MOMENTUM = 0.9
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01  # torch.optim.AdamW's
SMALL = 4096  # elements; smaller parameters are sent as they are


class Ranks:
    """The models of all ranks, as rows.

    Attributes:
        tasks: of each rank; their models' parameters are views of `weights`.
        weights: (ranks, elements).
        gradients: (ranks, elements).
        spans: where each parameter begins and ends.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        shapes = [p.shape for p in tasks[0].model.parameters()]
        ends = torch.tensor([s.numel() for s in shapes]).cumsum(0).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.weights = torch.empty(len(tasks), ends[-1])
        self.gradients = torch.zeros_like(self.weights)
        self.sent_dense = [len(s) < 2 or s.numel() < SMALL for s in shapes]
        for rank, task in enumerate(tasks):
            self._place(rank, task.model)

    @torch.no_grad()
    def _place(self, rank: int, model: nn.Module) -> None:
        for (begin, end), parameter in zip(self.spans, model.parameters(), strict=True):
            place = self.weights[rank, begin:end].view_as(parameter)
            place.copy_(parameter)
            parameter.data = place
            parameter.grad = self.gradients[rank, begin:end].view_as(parameter)

    def find_gradients(self) -> torch.Tensor:
        """New gradients of all ranks, each of its next batch."""
        self.gradients.zero_()
        for task in self.tasks:
            task.loss(task.model, task.draw()).backward()
        return self.gradients

    def exchange(self, asked: torch.Tensor, density: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of all rows that lists with int8 values make of them, and each row's residual.

        As in the library, an owner sends only a list of the sums; the rest stays with it.
        """
        mean, left = asked.mean(0), torch.zeros_like(asked)
        size = len(asked)
        for place, (begin, end) in enumerate(self.spans):
            if self.sent_dense[place]:
                continue
            top = pycomm.TopK(k=math.ceil(density * (end - begin)))
            rest = asked[:, begin:end].clone()
            total = torch.zeros(end - begin)
            for row in rest:
                _move(row, total, top)
            total /= size
            sent = torch.zeros_like(total)
            _move(total, sent, top)
            rest[place % size] += size * total
            mean[begin:end] = sent
            left[:, begin:end] = rest
        return mean, left


def _move(source: torch.Tensor, target: torch.Tensor, top: pycomm.TopK) -> None:
    """Moves the largest elements, rounded, to `target`; what rounding loses stays."""
    indices, found = top.select(source)
    scale = found.abs().max() / 127
    rounded = (found / scale).round() * scale
    source[indices] -= rounded
    target[indices] += rounded


class Optimizer(ABC):
    """Makes updates of gradients; each row of gradients has its own states."""

    @abstractmethod
    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:
        """Returns the changes of the weights."""


class Sgd(Optimizer):
    """torch.optim.SGD with momentum."""

    def __init__(self, like: torch.Tensor) -> None:
        self.velocity = torch.zeros_like(like)

    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:  # noqa: ARG002
        """See the base."""
        self.velocity = MOMENTUM * self.velocity + gradients
        return -rate * self.velocity


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    def __init__(self, like: torch.Tensor) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self._steps = 0

    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:
        """See the base."""
        self._steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradients
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradients.square()
        firsts, seconds = (1 - beta**self._steps for beta in BETAS)
        scaled = (self.second / seconds).sqrt_().add_(EPSILON)
        return -rate * ((self.first / firsts) / scaled + WEIGHT_DECAY * weights)


OPTIMIZERS = {"momentum": Sgd, "adamw": AdamW}


def learn(name: str, kind: str, method: str | None, density: float, seed: int, steps: int) -> float:
    """The final loss of a task on two ranks, of the parameters that both have.

    Args:
        name: of the task.
        kind: of the optimizer.
        method: what is sent after the first steps: ``"feedback"`` are gradients and residuals,
            ``"reset"`` each rank's differences to the common parameters; None are gradients, whole.
        density: of lists.
        seed: of model and batches.
        steps: how many.
    """
    ranks = Ranks([TASKS[name](rank, 2, seed) for rank in range(2)])
    optimizer = OPTIMIZERS[kind](ranks.weights[:1])
    common, residuals = ranks.weights[:1].clone(), torch.zeros_like(ranks.weights)
    for step in range(steps):
        rate = RECIPES[name][kind].rate * rate_factor((step + 1) / (steps + 1))
        gradients = ranks.find_gradients()
        with torch.no_grad():
            if method is None or step < int(DENSE * steps):
                common += optimizer.update(gradients.mean(0, keepdim=True), common, rate)
                ranks.weights.copy_(common)
            elif method == "feedback":
                mean, residuals = ranks.exchange(gradients + residuals, density)
                common += optimizer.update(mean[None], common, rate)
                ranks.weights.copy_(common)
            else:
                update = optimizer.update(gradients, ranks.weights, rate)
                mean, residuals = ranks.exchange(ranks.weights - common + update, density)
                common += mean
                ranks.weights.copy_(common + residuals)
    with torch.no_grad():
        ranks.weights.copy_(common)
    return ranks.tasks[0].final_loss()
