"""Sharded states: their replicas, and their move to the ranks of another group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pycomm._training.parameters import part_of
from pycomm.optim._states import StatefulOptimizer
from pycomm.optim._storage import OWN, State
from pycomm.optim.flat import Buffers

if TYPE_CHECKING:
    from pycomm._training.shards import OwnedRange, Part, Shards
    from pycomm.group import Group


class DividedOptimizer(StatefulOptimizer):
    """Keeps states that may be divided among ranks."""

    _awaits_sharing = False  # True if other ranks of the group have no states yet

    def _replicate(self, shards: Shards | None) -> bool:
        """Makes replicas of the states, if `shards` wants some that are missing.

        All ranks must call this.

        Returns:
            True if states have been moved.
        """
        new, self._new = self._new, []
        if shards is None or not shards.replicates:
            self._replicas = None
            return False
        if self.is_replicated():
            return False
        try:
            for group in self.param_groups:
                names = self._state_names(group)
                for param in filter(self._parts().__contains__, group["params"]):
                    if self._held[param] is not part_of(param):  # it has had no gradient since
                        self._follow(param, group, names)
            self._use_replicas(self._parts(), self.state)
        except BaseException:
            for param in new:  # the next step makes the same states
                self.state.pop(param, None)
                self._held.pop(param, None)
            raise
        return True

    def _parts(self) -> dict[torch.Tensor, Part]:
        """The parts whose states exist, by their parameters; the program may have removed some."""
        held, state = self._held, self.state
        return {param: held[param] for param in self._params() if param in held and param in state}

    def _use_replicas(
        self, parts: Mapping[torch.Tensor, Part], states: Mapping[torch.Tensor, State]
    ) -> None:
        """Makes replicas of the states of these parts, and keeps the states there."""
        from pycomm.optim._replicas import ReplicatedStates

        self._replicas, self._buffers = ReplicatedStates(parts, states), Buffers()
        for param, state in self._replicas.states.items():
            self._put_state(param, dict(state))

    def is_replicated(self) -> bool:
        """True if there are replicas of all sharded states."""
        replicas = self._replicas
        return all(
            replicas is not None and replicas.holds(param, part, self.state[param])
            for param, part in self._parts().items()
        )

    def undoes_step(self) -> bool:
        """True if this rank has begun a step that does not count, and has copies from before it."""
        return self._replicas is not None and self._replicas.in_step

    def undo_step(self) -> None:
        """Gives parts of the parameters their values before a step that failed."""
        if self._replicas is not None:
            self._replicas.undo()

    def to_restore(self, owners: Mapping[int, int]) -> list[tuple[torch.Tensor, list[OwnedRange]]]:
        """Parameters that ranks must send each other after :meth:`undo_step` on one of them."""
        return [] if self._replicas is None else self._replicas.to_restore(owners)

    # In another group.

    def rank_in_division(self) -> int:
        """This rank's number in the division of the states; -1 if it has no part."""
        return next((part.group.rank for part in self._parts().values()), -1)

    def lost_parts(self, owners: Collection[int]) -> set[int]:
        """Ranks that have parts and are not in `owners`, by their ranks in the first group."""
        ranges = ((part.group, own.rank) for part in self._parts().values() for own in part.ranges)
        return {group.ranks[rank] for group, rank in ranges if rank not in owners}

    def lost_with_replicas(self, owners: Collection[int]) -> set[int]:
        """Lost ranks whose parts have no replicas on `owners`, either."""
        return set() if self._replicas is None else self._replicas.lost(owners)

    @torch.no_grad()
    def follow_regroup(self, group: Group, owners: Mapping[int, int]) -> None:
        """Adopts this rank's new parts of the states from the replicas, and makes new replicas.

        All ranks of the wrapper's new group must call this. If it fails, it can be repeated.

        Args:
            group: the new group.
            owners: its ranks, by their numbers in the division.
        """
        from pycomm.optim import _checkpoint

        replicas, held, self.in_step = self._replicas, self._parts(), False
        if replicas is None or not held:
            return
        states: dict[torch.Tensor, State] = {}
        buffers = Buffers()
        for options in self.param_groups:
            names = self._state_names(options)
            for param in filter(held.__contains__, options["params"]):
                given, state = replicas.given(param, group, owners)
                self._edits.take_given(held[param].own, given.own, state)
                whole = _checkpoint.gathered(given, param, state)
                assert whole is not None
                saved = _checkpoint.checked(param, whole, names)
                states[param] = _checkpoint.Adopted(param, options, saved, names).settle(buffers)
                self._edits.settled(held[param].own)  # so that a repetition sees no edit
        parts = {param: part for param in states if (part := part_of(param)) is not None}
        self._use_replicas(parts, states)
        for param in parts:
            self._edits.forget(held[param].own)
            self._hold(param)

    @torch.no_grad()
    def follow_parts(self, group: Group, owners: Mapping[int, int], restores: bool) -> None:
        """Records which ranks of another group have the parts; the next step divides them anew.

        Args:
            group: the other group.
            owners: the ranks that have parts, by their numbers in the division.
            restores: True if lost parts come from the replicas.
        """
        replicas, self._replicas, self.in_step = self._replicas, None, False
        self._awaits_sharing = len(owners) < group.size
        for param, held in self._parts().items():
            if replicas is None or not restores:
                self._edits.take(held.own, self.state[param])
                part = held.moved(param, group, owners)
            else:
                part, state = replicas.given(param, group, owners)
                self._put_state(param, state)
                self._edits.take_given(held.own, part.own, self.state[param])
            self._edits.forget(held.own)
            self._held[param] = part
            if not part.in_pieces:
                self._edits.note([part.own])

    def state_to_share(self, group: Group) -> dict[str, Any]:
        """The state that newcomers need for the next step; for :func:`pycomm.share_state`.

        Raises:
            ValueError: the states are divided in another group.
        """
        if any(part.group is not group for part in self._parts().values()):
            raise ValueError("share_state() must be called after regroup() if states are sharded")
        state_dict = self._state_dict()
        states, divided = state_dict["state"], {}
        for number, param in enumerate(self._params()):
            held = self._held.get(param)
            if held is not None and number in states:
                state = states.pop(number)
                divided[number] = {
                    "ranges": [list(own) for own in held.ranges],
                    "state": {  # in the order of all ranks, because they gather by it
                        name: value if name == "step" or name not in OWN else value.new_empty(0)
                        for name, value in state.items()
                    },
                }
        return {**state_dict, "divided": divided}

    def take_shared(self, state: Mapping[str, Any] | None, group: Group) -> None:
        """Prepares this rank for the next step of the ranks of `group`.

        Args:
            state: the state from another rank; None on ranks that keep their own.
            group: the group.

        Raises:
            ValueError: this rank has parts of the states, which would be lost; or its parameters
                are not sharded.
        """
        from pycomm._training.shards import OwnedRange, Part

        self._awaits_sharing = False
        if state is None:
            return
        if any(part.own.numel() for part in self._parts().values()):
            raise ValueError("receive must be False on a rank that has its part of the states")
        self.load_state_dict({key: value for key, value in state.items() if key != "divided"})
        params = self._params()
        for number, each in state["divided"].items():
            param, part = params[number], part_of(params[number])
            if part is None:
                raise ValueError("the parameters must be sharded, as on the rank that sends states")
            ranges = tuple(OwnedRange(*own) for own in each["ranges"])
            self.state[param] = {
                name: value.to(param.device) if isinstance(value, torch.Tensor) else value
                for name, value in each["state"].items()
            }
            self._held[param] = Part.held(part.shards, group, ranges, param)

    def _check_shared(self) -> None:
        """Raises RuntimeError if newcomers still need :meth:`take_shared`."""
        if self._awaits_sharing:
            raise RuntimeError(
                "ranks that are new in the group have no states of this optimizer: call "
                "pycomm.share_state(optimizer, receive=...) after regroup() on all ranks"
            )
