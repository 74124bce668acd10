"""What ranks send, and what they make of it: the methods that :mod:`convergence.variants` tries.

``weights`` of :class:`Ranks` have a row for each rank. Optimizers of one row are those of all
ranks; those of n rows are each rank's own.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from convergence.simulation import BETAS, MOMENTUM, AdamW, Lists, Optimizer, Ranks, Sgd


@dataclass(frozen=True)
class Method(ABC):
    """A way to train with lists.

    Attributes:
        lists: what is sent; None sends all of it.
        rate: how many times as high the learning rate is; 0 stands for 1.2 times the root of the
            ranks.
    """

    lists: Lists | None = None
    rate: float = 1.0

    def factor(self, ranks: int) -> float:
        """How many times as high the learning rate is."""
        return self.rate or 1.2 * math.sqrt(ranks)

    def bits(self) -> float:
        """Bits that a rank sends, and receives, per parameter and step."""
        return 32.0 if self.lists is None else self.lists.bits()

    @abstractmethod
    def start(self, ranks: Ranks, optimizer: Optimizer) -> Training:
        """The training after the uncompressed steps, which have used `optimizer`."""


class Training(ABC):
    """A training with a method."""

    def __init__(self, method: Method, ranks: Ranks) -> None:
        self.lists = method.lists
        self.ranks = ranks
        self.common = ranks.weights[0].clone()
        self.residuals = torch.zeros_like(ranks.weights)

    def mean_of(self, asked: torch.Tensor, done: float) -> torch.Tensor:
        """The mean that arrives; `residuals` become what does not."""
        if self.lists is None:
            return asked.mean(0)
        mean, self.residuals = self.ranks.exchange(asked, self.lists, done)
        return mean

    @abstractmethod
    def step(self, gradients: torch.Tensor, rate: float, done: float) -> None:
        """A step with each rank's gradients, when a share `done` of the steps is over."""


def own(optimizer: Optimizer, ranks: int) -> Optimizer:
    """Copies of an optimizer of one row for all ranks."""
    copied = copy.copy(optimizer)
    for name, states in vars(optimizer).items():
        if isinstance(states, torch.Tensor):
            setattr(copied, name, states.repeat(ranks, 1))
    return copied


# Gradients.


@dataclass(frozen=True)
class Feedback(Method):
    """Gradients are sent, and residuals added to the next ones.

    Attributes:
        dense_second: second moments are those of the uncompressed gradients.
    """

    dense_second: bool = False

    def start(self, ranks: Ranks, optimizer: Optimizer) -> Training:
        """See the base."""
        return _Feedback(self, ranks, optimizer)


class _Feedback(Training):
    def __init__(self, method: Feedback, ranks: Ranks, optimizer: Optimizer) -> None:
        super().__init__(method, ranks)
        self._method, self._optimizer = method, optimizer

    def step(self, gradients: torch.Tensor, rate: float, done: float) -> None:
        mean = self.mean_of(gradients + self.residuals, done)
        if self._method.dense_second and isinstance(self._optimizer, AdamW):
            self._optimizer.frozen = True
            self._optimizer.observe(gradients.mean(0, keepdim=True))
        self.common += self._optimizer.update(mean[None], self.common[None], rate)[0]
        self.ranks.weights.copy_(self.common)


@dataclass(frozen=True)
class Ef21(Method):
    """EF21-SGDM (Fatkhullin et al. 2023): lists correct estimates of each rank's momentum."""

    def start(self, ranks: Ranks, optimizer: Optimizer) -> Training:
        """See the base."""
        return _Ef21(self, ranks, optimizer)


class _Ef21(Training):
    def __init__(self, method: Ef21, ranks: Ranks, optimizer: Optimizer) -> None:
        super().__init__(method, ranks)
        assert isinstance(optimizer, Sgd)
        self._estimate = optimizer.velocity[0].clone()
        self._velocities = optimizer.velocity.repeat(len(ranks.weights), 1)

    def step(self, gradients: torch.Tensor, rate: float, done: float) -> None:
        known = self._velocities - self.residuals
        self._velocities.mul_(MOMENTUM).add_(gradients)
        self._estimate += self.mean_of(self._velocities - known, done)
        self.common -= rate * self._estimate
        self.ranks.weights.copy_(self.common)


# Updates.


@dataclass(frozen=True)
class Seconds:
    """Second moments of the mean gradient, which ranks send in 8 bits now and then.

    Attributes:
        every: the number of steps from one such gradient to the next.
        bounded: they are at most the rank's own second moments, and at least those over the number
            of ranks, as they would be if gradients were nothing but independent noise.
    """

    every: int
    bounded: bool = True


@dataclass(frozen=True)
class Updates(Method):
    """Each rank's optimizer makes an update of the rank's own gradients, and this is sent.

    Attributes:
        reset: a rank's parameters contain its residual (error reset).
        decay: of residuals.
        seconds: AdamW's second moments; None leaves each rank its own.
        scaled: updates of each parameter grow by the root of a rank's mean square gradient over the
            square of the mean gradient, as a mean over the parameter and about 100 steps.
    """

    reset: bool = True
    decay: float = 1.0
    seconds: Seconds | None = None
    scaled: bool = False

    def bits(self) -> float:
        """See the base."""
        return super().bits() + (8.125 / self.seconds.every if self.seconds else 0)

    def start(self, ranks: Ranks, optimizer: Optimizer) -> Training:
        """See the base."""
        return _Updates(self, ranks, optimizer)


class _Updates(Training):
    def __init__(self, method: Updates, ranks: Ranks, optimizer: Optimizer) -> None:
        super().__init__(method, ranks)
        self._method = method
        self._optimizer = own(optimizer, len(ranks.weights))
        self._steps = 0
        self._powers = torch.zeros(2, len(ranks.spans), dtype=torch.float64)
        if method.seconds is not None:
            assert isinstance(self._optimizer, AdamW)
            self._optimizer.frozen = True
            self._own_second = self._optimizer.second.clone()

    def step(self, gradients: torch.Tensor, rate: float, done: float) -> None:
        method, ranks = self._method, self.ranks
        if method.seconds is not None:
            self._share(gradients, method.seconds)
        update = self._optimizer.update(gradients, ranks.weights, rate)
        if method.scaled:
            update *= self._scales(gradients)
        kept = ranks.weights - self.common if method.reset else method.decay * self.residuals
        self.common += self.mean_of(kept + update, done)
        ranks.weights.copy_(self.common)
        if method.reset:
            ranks.weights += method.decay * self.residuals

    def _share(self, gradients: torch.Tensor, seconds: Seconds) -> None:
        assert isinstance(self._optimizer, AdamW)
        if self._steps % seconds.every == 0:
            self._optimizer.observe(gradients.mean(0), seconds.every)
        self._steps += 1
        if seconds.bounded:
            most = self._own_second.mul_(BETAS[1])
            most.addcmul_(gradients, gradients, value=1 - BETAS[1])
            self._optimizer.second.clamp_(most / len(gradients), most)

    def _scales(self, gradients: torch.Tensor) -> torch.Tensor:
        """A factor for each element: the root of a gradient's square over the mean's square."""
        scales = torch.ones(gradients.shape[1])
        squares, mean = gradients.square().mean(0), gradients.mean(0).square()
        for place, (begin, end) in enumerate(self.ranks.spans):
            found = torch.stack([squares[begin:end].sum(), mean[begin:end].sum()]).double()
            powers = self._powers[:, place]
            powers.mul_(0.99).add_(found)
            scales[begin:end] = (powers[0] / powers[1]).sqrt()
        return scales


# Momentum.


@dataclass(frozen=True)
class Velocity(Method):
    """Each rank's momentum of its own gradients is sent, with feedback."""

    def start(self, ranks: Ranks, optimizer: Optimizer) -> Training:
        """See the base."""
        return _Velocity(self, ranks, optimizer)


class _Velocity(Training):
    def __init__(self, method: Velocity, ranks: Ranks, optimizer: Optimizer) -> None:
        super().__init__(method, ranks)
        assert isinstance(optimizer, Sgd)
        self._velocities = optimizer.velocity.repeat(len(ranks.weights), 1)

    def step(self, gradients: torch.Tensor, rate: float, done: float) -> None:
        self._velocities.mul_(MOMENTUM).add_(gradients)
        self.common -= rate * self.mean_of(self._velocities + self.residuals, done)
        self.ranks.weights.copy_(self.common)
