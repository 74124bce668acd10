"""Copies of sharded states; pycomm/_training/replicas.py keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pycomm._training.replicas import Kinds, Replicas, StateKind
from pycomm._training.shards import OwnedRange, Part
from pycomm.optim import _storage
from pycomm.optim._storage import BLOCK, OWN, State

if TYPE_CHECKING:
    from pycomm.group import Group


class ReplicatedStates:
    """The states of an optimizer's sharded parameters, with copies that outlive their rank.

    All ranks make it together. The optimizer and its states do not change.

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
        places = [(p, name, states[p][name]) for p in parts for name in states[p] if name in OWN]
        kinds = Kinds(
            [self._kind(param, name, tensor.dtype) for param, name, tensor in places],
            [self._kind(param, "", param.dtype) for param in parts],
        )
        label = repr([(tuple(param.shape), name) for param, name, _ in places])
        self._replicas = Replicas(self._group, [tensor for _, _, tensor in places], kinds, label)
        self.states: dict[torch.Tensor, State] = {param: {} for param in parts}
        self._numbers: dict[torch.Tensor, dict[str, int]] = {param: {} for param in parts}
        for number, (param, name, tensor) in enumerate(places):
            self.states[param][name] = self._replicas.tensors[number].view(tensor.shape)
            self._numbers[param][name] = number
        self._copied = {
            rank: [flat(param.detach())[self._range(param, "", rank)] for param in parts]
            for rank in self._replicas.copied_by(self._group.rank)
        }

    def holds(self, param: torch.Tensor, part: Part, state: Mapping[str, Any]) -> bool:
        """True if this state of a parameter's part lies in the replicas' memory."""
        own = self.states.get(param)
        if own is None or self._parts[param] is not part or own.keys() != state.keys() & OWN:
            return False
        return all(value is state[name] for name, value in own.items())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step, which counts on all ranks or on none."""
        self._shards.guard.check()
        self._replicas.begin_step(self._copied)
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
        return self._replicas.in_step

    def undo(self) -> None:
        """Restores the parameters that a step that does not count may have changed.

        This rank restores the parts that it reaches copies of; :meth:`to_restore` has the others.
        Torch does not count this write, so versions match the values again.
        """
        for rank, before in self._replicas.parameters_before():
            for param, values in zip(self._parts, before, strict=True):
                flat(param.data)[self._range(param, "", rank)] = values

    def to_restore(self, owners: Mapping[int, int]) -> list[tuple[torch.Tensor, list[OwnedRange]]]:
        """Parameters that ranks must send each other after :meth:`undo`.

        Args:
            owners: the ranks of another group that have parts, by their numbers in this group.

        Returns:
            For each parameter its elements, flat, and the ranks of the other group that send them.
        """
        if self._replicas.reaches_all:
            return []
        return [(flat(param.data), self._given(param, owners)) for param in self._parts]

    def lost(self, owners: Collection[int]) -> set[int]:
        """The ranks whose states are lost with all copies, by their ranks in the first group.

        Args:
            owners: the remaining ranks.
        """
        found = {own.rank for part in self._parts.values() for own in part.ranges}
        left = {r for r in found if any(k in owners for k in self._replicas.keepers(r))}
        return {self._group.ranks[rank] for rank in found - left}

    def given(
        self, param: torch.Tensor, group: Group, owners: Mapping[int, int]
    ) -> tuple[Part, State]:
        """This rank's contribution to a parameter's state after the last step that counts.

        A rank that has a lost rank's copies contributes the lost rank's part, too.

        Args:
            param: the parameter.
            group: another group.
            owners: its ranks that have parts, by their numbers in this group.

        Returns:
            The elements of all ranks of the other group, and the state of this rank's elements.
        """
        ranges, held = self._given(param, owners), self._parts[param]
        mine = [
            own for own, given in zip(held.ranges, ranges, strict=True) if given.rank == group.rank
        ]
        state: State = {}
        for name, number in self._numbers[param].items():
            like = self._replicas.of(self._group.rank)[number]
            if name == "step":
                state[name] = like.clone().view(())
            else:
                tensors = [self._replicas.of(own.rank)[number] for own in mine]
                state[name] = torch.cat(tensors) if tensors else like.new_empty(0)
        return Part.held(held.shards, group, ranges, param), state

    def _given(self, param: torch.Tensor, owners: Mapping[int, int]) -> list[OwnedRange]:
        """All ranks' elements of a parameter, with the ranks of another group that have them."""
        return [
            OwnedRange(
                next(owners[k] for k in self._replicas.keepers(rank) if k in owners), begin, end
            )
            for rank, begin, end in self._parts[param].ranges
        ]

    def _kind(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> StateKind:
        ranges = (self._range(param, name, rank) for rank in range(self._group.size))
        return StateKind(dtype, tuple(own.stop - own.start for own in ranges))

    def _range(self, param: torch.Tensor, name: str, rank: int) -> slice:
        """A rank's elements of a state; with the name "", of the parameter."""
        if name == "step":
            return slice(0, 1)
        unit = BLOCK if name.endswith(_storage.SCALE) else 1
        for owner, begin, end in self._parts[param].ranges:
            if owner == rank:
                return slice(begin // unit, -(-end // unit))
        return slice(0, 0)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
