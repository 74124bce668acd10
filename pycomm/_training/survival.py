"""Sharded optimizer states after a loss: steps are undone, and new owners adopt the states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from pycomm._training.comm_state import CommState, check_successor
from pycomm._training.optimizers import optimizers_of
from pycomm._training.shards import part_of
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm._training.local_sgd import LocalSGDState
    from pycomm.group import Group


def lost_with_parts(former: Group, group: Group) -> str:
    """The ranks of a group that are not in a smaller one, by their numbers in the first group."""
    check_successor(group)
    lost = sorted({*former.ranks} - {*group.ranks})
    return f"ranks {lost} are lost with their parts of the optimizer's states"


class ShardSurvival:
    """What sharded optimizers of a wrapper do when it goes on with another group.

    It is made before the wrapper's state knows the group.

    Args:
        state: the state.
        parameters: the wrapper's parameters, if they are sharded.
        group: the ranks that are left.
    """

    def __init__(
        self,
        state: CommState | LocalSGDState,
        parameters: Iterable[torch.Tensor],
        group: Group,
    ) -> None:
        self._group, self._parameters = group, list(parameters)
        self._optimizers = optimizers_of(self._parameters)
        self._lost = lost_with_parts(state.group, group)
        # The means of a step that has not counted come later. If another optimizer's step may have
        # counted, that would apply some of them twice, so they are dropped.
        undone = [one.in_step for one in self._optimizers]
        if isinstance(state, CommState) and undone and all(undone):
            state.note_failure()

    def undo_steps(self) -> None:
        """Undoes steps that do not count; all ranks must call this.

        Raises:
            RuntimeError: a rank has states without replicas; on all ranks.
        """
        if not self._parameters:
            return
        lacking = not all(one.is_replicated() for one in self._optimizers)
        if all_reduce(torch.tensor([int(lacking)]), "max", group=self._group):
            raise RuntimeError(
                f"{self._lost}, of which there are no replicas yet, because they were loaded or "
                "converted after the last step: load the checkpoint in a new wrapper"
            )
        for optimizer in self._optimizers:
            optimizer.undo_step()
        parts = (part for p in self._parameters if (part := part_of(p)) is not None)
        for shards in {part.shards for part in parts}:
            shards.guard.step_undone()

    def divide_anew(self) -> None:
        """Moves states to the new owners of the parameters; all ranks must call this."""
        for optimizer in self._optimizers:
            optimizer.follow_regroup()
