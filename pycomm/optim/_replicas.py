"""Two copies of sharded states: pycomm/_training/replicas.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pycomm._training.replicas import Kind, Replicas
from pycomm._training.shards import Part
from pycomm.optim import _storage
from pycomm.optim._storage import BLOCK, State


class ReplicatedStates:
    """The states of an optimizer's sharded parameters, in two copies.

    All ranks make it together. Nothing that exists changes.

    Args:
        parts: this rank's part of each parameter.
        states: the states of these parts.

    Attributes:
        states: the same states, in the replicas' memory.

    Raises:
        MemoryError, RuntimeError: see :class:`Replicas`.
    """

    def __init__(
        self, parts: Mapping[torch.Tensor, Part], states: Mapping[torch.Tensor, State]
    ) -> None:
        self._parts = dict(parts)
        self._shards = next(iter(parts.values())).shards
        self._group = self._shards.group
        places = [(param, name, states[param][name]) for param in parts for name in states[param]]
        self._replicas = Replicas(
            self._group,
            [tensor for _, _, tensor in places],
            [self._kind(param, name, tensor.dtype) for param, name, tensor in places],
            [self._kind(param, "", param.dtype) for param in parts],
            repr([(tuple(param.shape), name) for param, name, _ in places]),
        )
        self.states: dict[torch.Tensor, State] = {param: {} for param in parts}
        self._numbers: dict[torch.Tensor, dict[str, int]] = {param: {} for param in parts}
        for number, (param, name, tensor) in enumerate(places):
            self.states[param][name] = self._replicas.tensors[number].view(tensor.shape)
            self._numbers[param][name] = number

    def holds(self, param: torch.Tensor, part: Part, state: Mapping[str, Any]) -> bool:
        """True if this state of a parameter's part lies in the replicas' memory."""
        own = self.states.get(param)
        if own is None or self._parts[param] is not part or own.keys() != state.keys():
            return False
        return all(value is state[name] for name, value in own.items())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step, which counts on all ranks or on none."""
        self._shards.guard.check()
        self._replicas.begin_step([part.own for part in self._parts.values()])
        yield
        try:
            self._replicas.end_step()
        except BaseException:
            self._shards.guard.step_failed()
            raise

    # After a failure.

    @property
    def in_step(self) -> bool:
        """True if this rank has begun a step that does not count."""
        return self._group.rank in self._replicas.ranks_in_step

    def undo(self) -> None:
        """Gives all parts that such a step may have changed their parameters from before it.

        Torch does not count this, so the counts are again those of the values.
        """
        for rank in self._replicas.ranks_in_step:
            before = self._replicas.parameters_of(rank)
            for param, values in zip(self._parts, before, strict=True):
                flat(param.data)[self._range(param, "", rank)] = values

    def whole(self, param: torch.Tensor) -> State:
        """A parameter's state, of all ranks, after the last step that counts."""
        state: State = {}
        for name, number in self._numbers[param].items():
            state[name] = whole = _empty(param, name, self._replicas.tensors[number].dtype)
            for rank in range(self._group.size):
                flat(whole)[self._range(param, name, rank)] = self._replicas.of(rank)[number]
        return state

    def _kind(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> Kind:
        ranges = (self._range(param, name, rank) for rank in range(self._group.size))
        return Kind(dtype, tuple(own.stop - own.start for own in ranges))

    def _range(self, param: torch.Tensor, name: str, rank: int) -> slice:
        """A rank's elements of a state, or with the name "" of the parameter."""
        if name == "step":
            return slice(0, 1)
        unit = BLOCK if name.endswith(_storage.SCALE) else 1
        for owner, begin, end in self._parts[param].ranges:
            if owner == rank:
                return slice(begin // unit, -(-end // unit))
        return slice(0, 0)


def _empty(param: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the whole state of a parameter."""
    if name == "step":
        return torch.empty(())
    if name.endswith(_storage.SCALE):
        return torch.empty(_storage.blocks_of(param))
    return torch.empty_like(param, dtype=dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
