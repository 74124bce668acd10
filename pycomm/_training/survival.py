"""Sharded optimizer states in another group: steps are undone, and new owners adopt the states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._runtime import host
from pycomm._training.agree import gather_rows, largest
from pycomm._training.optimizers import optimizers_of
from pycomm._training.parameters import part_of
from pycomm._training.step_guard import StepGuard
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm._training.comm_state import CommState
    from pycomm._training.shards import OwnedRange
    from pycomm.group import Group

_ALIGN = 8  # bytes


class ShardSurvival:
    """Moves a wrapper's sharded optimizer states to another group.

    Make it before the wrapper's state knows the group.

    Args:
        state: the wrapper's state.
        parameters: the wrapper's parameters, if they are sharded; none on a newcomer.
        group: the other group.
        replicates: True if the states have replicas.
    """

    def __init__(
        self,
        state: CommState,
        parameters: Iterable[torch.Tensor],
        group: Group,
        replicates: bool,
    ) -> None:
        self._group, self._replicates = group, replicates
        parameters = list(parameters)
        self._optimizers = optimizers_of(parameters)
        parts = (part for p in parameters if (part := part_of(p)) is not None)
        self._guards: set[StepGuard] = {part.shards.guard for part in parts}
        # agree() finds out the owners of each optimizer's parts, and what to restore.
        self._owners: list[dict[int, int]] = []
        self._to_restore: list[tuple[torch.Tensor, list[OwnedRange]]] = []
        self._restored_bytes = 0
        self._has_replicas = False
        # A later step applies the means of a step that has not counted. If another optimizer's step
        # may have counted, this would apply some means twice, so they are dropped.
        undone = [one.in_step for one in self._optimizers]
        if undone and all(undone):
            state.note_failure()

    def agree(self) -> None:
        """Finds out which ranks of the other group have which parts; all ranks must call this.

        Raises:
            ValueError: ranks are lost with their parts, and the states have no replicas.
            RuntimeError: there are no replicas yet, or they are lost, too, or a step has failed and
                not all states have replicas. Each is raised on all ranks.
        """
        (count,) = largest([len(self._optimizers)], self._group)
        lacking = not all(one.is_replicated() for one in self._optimizers)
        broken = any(guard.is_broken() for guard in self._guards)
        own = [(one.rank_in_division(), one.undoes_step()) for one in self._optimizers]
        own += [(-1, False)] * (count - len(own))
        mine = [int(lacking), int(broken), *map(int, itertools.chain(*own))]
        lacks, breaks, *told = zip(*gather_rows(mine, self._group), strict=True)
        self._has_replicas = self._replicates and not any(lacks)
        self._owners = [
            {former: rank for rank, former in enumerate(ranks) if former >= 0}
            for ranks in told[::2]
        ]
        self._check_lost(list(map(any, told[1::2])))
        if any(breaks) and not self._has_replicas:
            raise RuntimeError(
                "parameters are partly those of a step that has failed: load a checkpoint of the "
                "model and the optimizer in a new wrapper"
            )

    def _check_lost(self, undone: Sequence[bool]) -> None:
        """Raises errors if states are lost, and finds out what ranks must restore.

        Args:
            undone: for each optimizer, True if any rank must undo a step.
        """
        pairs = list(zip(self._optimizers, self._owners, strict=False))
        lost = sorted({rank for one, owners in pairs for rank in one.lost_parts(owners)})
        gone = sorted({rank for one, owners in pairs for rank in one.lost_with_replicas(owners)})
        if self._has_replicas and not gone:
            for (one, owners), undoes in zip(pairs, undone, strict=False):
                self._to_restore += one.to_restore(owners) if undoes else []
        nbytes = sum(_room(elements) for elements, _ in self._to_restore)
        found = bool(lost), bool(gone), nbytes
        any_lost, any_gone, self._restored_bytes = largest(found, self._group)
        if any_lost and (any_gone or not self._has_replicas):
            self._complain(lost, gone)

    def _complain(self, lost: Sequence[int], gone: Sequence[int]) -> None:
        """Raises the error for lost ranks; `gone` are the ranks whose copies are lost, too."""
        who = f"ranks {lost}" if lost else "some former ranks"
        message = f"{who} are lost with their parts of the optimizer's states"
        if self._has_replicas:
            both = f"ranks {gone}" if gone else "some of these ranks"
            raise RuntimeError(
                f"{message}, and so are the replicas of the states of {both}: load a checkpoint in "
                "a new wrapper"
            )
        if self._replicates:
            raise RuntimeError(
                f"{message}. These states have no replicas yet, because they were loaded, "
                "converted or shared after the last step: load a checkpoint in a new wrapper"
            )
        raise ValueError(
            f"{message}: load a checkpoint in a new wrapper; to survive failures, shard needs "
            "replicas=2"
        )

    def undo_steps(self) -> None:
        """Undoes steps that do not count; all ranks must call this."""
        for optimizer in self._optimizers:
            optimizer.undo_step()
        if self._restored_bytes:
            self._restore()
        for guard in self._guards:
            guard.step_undone()

    def _restore(self) -> None:
        """Sends all ranks the parameters before a step, from the ranks that have copies.

        Each element comes from one rank, and the others give zeros, so the maximum is its bits.
        """
        values = host.zeros(self._restored_bytes, dtype=torch.uint8)
        places, end = [], 0
        for elements, ranges in self._to_restore:
            begin, end = end, end + _room(elements)
            place = values[begin : begin + elements.nbytes].view(elements.dtype)
            places.append((elements, place))
            for rank, first, last in ranges:
                if rank == self._group.rank:
                    place[first:last] = elements[first:last]
        all_reduce(values, "max", group=self._group)
        for elements, place in places:
            elements.copy_(place)

    def divide_anew(self) -> None:
        """Moves states to the new owners of the parameters; all ranks must call this.

        If there are ranks without states, or no replicas, the states move in the next step.
        """
        for optimizer, owners in zip(self._optimizers, self._owners, strict=False):
            if not owners or (self._has_replicas and len(owners) == self._group.size):
                optimizer.follow_regroup(self._group, owners)
            else:
                optimizer.follow_parts(self._group, owners, self._has_replicas)


def _room(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, padded so that a tensor of any type can follow."""
    return -(-tensor.nbytes // _ALIGN) * _ALIGN
