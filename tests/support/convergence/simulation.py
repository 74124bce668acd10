"""Compressed training in one process, to try exchanges that the library does not have.

Ranks' parameters, gradients and residuals are rows of matrices. Selection is the library's own;
what is sent, how it is rounded and what the optimizer makes of it is plain PyTorch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

import pycomm
from convergence.tasks import Task

MOMENTUM = 0.9
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01  # torch.optim.AdamW's
SMALL = 4096  # elements; smaller parameters are sent as they are
CHUNK = 65_536  # the most elements of a parameter here, and of a chunk in a list


@dataclass(frozen=True)
class Values:
    """How the values of a list are rounded.

    Attributes:
        bits: per value: 32 sends floats; otherwise a sign and a level of the magnitude.
        share: how many values share a scale; None for all values of a chunk.
        levels: ``"uniform"`` ones are multiples of the largest magnitude over their number;
            ``"geometric"`` ones go from the smallest to the largest magnitude, which are both sent.
    """

    bits: int = 8
    share: int | None = None
    levels: str = "uniform"

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The values as they arrive."""
        if self.bits == 32 or not len(values):
            return values
        if self.share is None or self.share >= len(values):
            return self._round_together(values)
        return torch.cat([self._round_together(part) for part in values.split(self.share)])

    def bits_per_value(self, count: int) -> float:
        """Bits of a value among `count`, scales included: two bytes each, one float per chunk."""
        if self.bits == 32:
            return 32
        each = self.share or count
        scales = 2 if self.levels == "geometric" and self.bits > 1 else 1
        return self.bits + scales * (32 if self.share is None else 16) / each

    def _round_together(self, values: torch.Tensor) -> torch.Tensor:
        sizes = values.abs()
        if self.bits == 1:
            return values.sign() * sizes.mean()
        if self.levels == "uniform":
            scale = sizes.max() / (2 ** (self.bits - 1) - 1)
            return (values / scale).round() * scale
        least, most = sizes.min(), sizes.max()
        step = (most / least).log() / (2 ** (self.bits - 1) - 1)
        if step == 0:
            return values
        return values.sign() * least * (((sizes / least).log() / step).round() * step).exp()


@dataclass(frozen=True)
class Lists:
    """What a rank sends of a matrix of elements.

    Attributes:
        density: the share of the elements.
        values: how they are rounded.
        first: the density after the warm-up, which falls to `density` exponentially...
        falling: ... in this share of the steps.
        feedback: False loses what is not sent.
    """

    density: float
    values: Values = Values()
    first: float | None = None
    falling: float = 0.0
    feedback: bool = True

    def density_at(self, done: float) -> float:
        """The density when a share `done` of the compressed steps is over."""
        if self.first is None or done >= self.falling:
            return self.density
        return float(self.first * (self.density / self.first) ** (done / self.falling))

    def bits(self) -> float:
        """Bits of a list per element, as a mean over the compressed steps."""
        grid = 100 if self.first is not None else 1
        return sum(self._bits_at(self.density_at(i / grid)) for i in range(grid)) / grid

    def _bits_at(self, density: float) -> float:
        sent = math.ceil(density * CHUNK)
        floats = pycomm.TopK(k=sent)
        indices = 8 * (floats.encoded_bytes(CHUNK) - floats.encoded_bytes(0)) - 32 * sent
        return (indices + sent * self.values.bits_per_value(sent)) / CHUNK


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

    def _place(self, rank: int, model: nn.Module) -> None:
        for (begin, end), parameter in zip(self.spans, model.parameters(), strict=True):
            place = self.weights[rank, begin:end].view_as(parameter)
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad = self.gradients[rank, begin:end].view_as(parameter)

    def find_gradients(self) -> torch.Tensor:
        """New gradients of all ranks, each of its next batch."""
        self.gradients.zero_()
        for task in self.tasks:
            task.loss(task.model, task.draw()).backward()
        return self.gradients

    def exchange(
        self, asked: torch.Tensor, lists: Lists, done: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of all rows that lists make of them, and what of each row is left.

        As in the library, an owner sends only a list of the sums; the rest stays with it.
        """
        mean, left = asked.mean(0), torch.zeros_like(asked)
        size = len(asked)
        density = lists.density_at(done)
        for place, (begin, end) in enumerate(self.spans):
            if self.sent_dense[place]:
                continue
            top = pycomm.TopK(k=math.ceil(density * (end - begin)))
            rest = asked[:, begin:end].clone()
            total = torch.zeros(end - begin)
            for row in rest:
                _move(row, total, top, lists.values)
            total /= size
            sent = torch.zeros_like(total)
            _move(total, sent, top, lists.values)
            rest[place % size] += size * total
            mean[begin:end] = sent
            if lists.feedback:
                left[:, begin:end] = rest
        return mean, left


def _move(source: torch.Tensor, target: torch.Tensor, top: pycomm.TopK, values: Values) -> None:
    """Moves the largest elements, rounded, to `target`; what rounding loses stays."""
    indices, found = top.select(source)
    rounded = values.round(found)
    source[indices] -= rounded
    target[indices] += rounded


class Optimizer(ABC):
    """Makes updates of gradients; a row of gradients has its own states."""

    @abstractmethod
    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:
        """Returns the changes of the weights."""


class Sgd(Optimizer):
    """torch.optim.SGD with momentum."""

    def __init__(self, like: torch.Tensor) -> None:
        self.velocity = torch.zeros_like(like)

    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:  # noqa: ARG002
        """See the base."""
        self.velocity.mul_(MOMENTUM).add_(gradients)
        return -rate * self.velocity


class AdamW(Optimizer):
    """torch.optim.AdamW.

    Attributes:
        first, second: the moments.
        frozen: leave the second moments as they are.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.frozen = False
        self._steps = 0

    def observe(self, gradients: torch.Tensor, steps: int = 1) -> None:
        """Takes these gradients into the second moments, as if of so many steps."""
        decay = BETAS[1] ** steps
        self.second.mul_(decay).add_(gradients.square(), alpha=1 - decay)

    def update(self, gradients: torch.Tensor, weights: torch.Tensor, rate: float) -> torch.Tensor:
        """See the base."""
        self._steps += 1
        self.first.lerp_(gradients, 1 - BETAS[0])
        if not self.frozen:
            self.observe(gradients)
        firsts, seconds = (1 - beta**self._steps for beta in BETAS)
        scaled = (self.second / seconds).sqrt_().add_(EPSILON)
        return -rate * ((self.first / firsts) / scaled + WEIGHT_DECAY * weights)
