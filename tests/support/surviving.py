"""Training with sharded states, and what it must come to if ranks are lost or join."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import sharding
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import optim

STEPS = 6


class Net(nn.Module):
    """A model with parameters of any size, whose gradients depend on the batch."""

    def __init__(self, elements: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        parts = [torch.randn(elements - 100 * n, generator=rng).to(dtype) for n in range(3)]
        self.parts = nn.ParameterList(parts)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum((part.float() * batch).square().mean() for part in self.parts)


class Training:
    """One rank's model and optimizer; `freezes`: the step from which on a parameter is frozen."""

    def __init__(
        self,
        group: pycomm.Group,
        elements: int = 5000,
        dtype: torch.dtype = torch.float32,
        shard: str = "optimizer",
        seed: int = 0,
        freezes: int = STEPS,
        **options: Any,
    ) -> None:
        self.freezes = freezes
        own = ("replicas", "publish", "compression", "bucket_cap_mb")
        wrapper = {name: options.pop(name) for name in own if name in options}
        net = Net(elements, dtype, seed)
        self.model = data_parallel(net, group=group, shard=shard, **wrapper)
        self.optimizer = optim.FusedAdamW(self.model.parameters(), lr=0.01, **options)

    def backward(self, number: int, step: int) -> None:
        self.model.module.parts[0].requires_grad_(step < self.freezes)
        self.optimizer.zero_grad()
        rng = torch.Generator().manual_seed(1000 * number + step)
        self.model(torch.randn(1, generator=rng)).backward()

    def train(self, number: int, steps: Iterable[int], edits: bool = False) -> None:
        for step in steps:
            self.backward(number, step)
            self.optimizer.step()
        if edits:
            with torch.no_grad():
                for part in self.model.module.parts:
                    part.mul_(0.75)

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


def expect(
    losses: list[tuple[int, tuple[int, ...]]],
    edits: bool = False,
    nodes: list[list[int]] | None = None,
    **options: Any,
) -> Any:
    """The state that ranks end with, by training in worlds that load checkpoints.

    Args:
        losses: the number of steps that count before each change of the group, and the ranks that
            it has then.
        edits: parameters are changed by hand before each change.
        nodes: the ranks' nodes after each change.
        options: those of :class:`Training`.
    """

    def train(group: pycomm.Group, state: Any, numbers: tuple[int, ...], steps: range) -> Any:
        training = Training(group, **options)
        if state is not None:
            training.load(state)
        training.train(numbers[group.rank], steps, edits and steps.stop < STEPS)
        return training.state()

    state, first = None, 0
    for index, (_, numbers) in enumerate(losses):
        last = [*losses[1:], (STEPS, ())][index][0]
        with pycomm.LocalWorld(len(numbers), nodes=nodes and nodes[index]) as world:
            state = world.run(train, state, numbers, range(first, last))[0]
        first = last
    return state


def common_end(outcomes: Sequence[Any]) -> Any:
    """What all survivors ended with: the losses of ranks, and the state."""
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    losses, state = outcomes[0].value
    for outcome in outcomes:
        assert outcome.value[0] == losses
        assert sharding.difference(outcome.value[1], state) is None
    return losses, state
