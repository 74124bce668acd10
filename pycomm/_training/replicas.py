"""Two copies of each rank's tensors, so that they outlive the rank.

Where the copies are: pycomm/_training/node_replicas.py and spanning_replicas.py.

Before a step changes its tensors and the parameters, a rank copies them. After the step, all ranks
decide together whether it counts. So no rank begins a step before the last one is decided, and if
a step does not count, the copies are whole.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm._inputs import host
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group

_LINE = 64  # bytes


class Kind(NamedTuple):
    """A tensor of which every rank has a part.

    Attributes:
        dtype: its type.
        counts: each rank's number of elements.
    """

    dtype: torch.dtype
    counts: tuple[int, ...]

    def nbytes(self, rank: int) -> int:
        """The size of a rank's part."""
        return self.counts[rank] * self.dtype.itemsize


class Replicas(ABC):
    """Tensors of all ranks of a group, each in two copies. All ranks make it together.

    Args:
        group: the ranks.
        tensors: this rank's tensors, which are copied.
        kinds: their kinds, the same on all ranks.
        parameters: parameters of which a rank's steps write its part.
        label: what else must be alike on all ranks.

    Attributes:
        reaches_all: True if every rank has the copies of all ranks.
        tensors: this rank's tensors, flat. Steps change them.
        steps: the number of steps that count.
        copied: the ranks whose parts of parameters this rank copies before a step.

    Raises:
        MemoryError: a rank lacks memory; on all ranks.
        OSError: a rank cannot make or open a file in memory.
        RuntimeError: the ranks have different tensors; on all ranks.
    """

    reaches_all: bool
    tensors: list[torch.Tensor]
    copied: Sequence[int]

    def __init__(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[Kind],
        parameters: Sequence[Kind],
        label: str,
    ) -> None:
        self._group, self._rank, self.steps = group, group.rank, 0
        crc = zlib.crc32(repr((list(kinds), list(parameters), label)).encode())
        told = host.zeros(group.size, dtype=torch.int64)
        told[group.rank] = crc
        all_reduce(told, group=group)
        if not (told == told[0]).all():  # as all ranks see
            raise RuntimeError("ranks have optimizer states of different kinds or parameters")
        with contextlib.ExitStack() as until_made:
            error = self._allocate(kinds, parameters, until_made)
            if error is None:
                for memory, tensor in zip(self.tensors, tensors, strict=True):
                    memory.view(tensor.shape).copy_(tensor)
            if not group.should_commit(error is None):
                if isinstance(error, OSError):
                    raise error
                raise MemoryError("a rank lacks memory for replicas of its states") from error
        self._decide()

    @abstractmethod
    def _allocate(
        self,
        kinds: Sequence[Kind],
        parameters: Sequence[Kind],
        until_made: contextlib.ExitStack,
    ) -> Exception | None:
        """Allocates `tensors` and their copies; all ranks call this.

        Args:
            kinds: of the tensors.
            parameters: as for the class.
            until_made: is left once all ranks have called this.

        Returns:
            What was raised if there is no memory.
        """

    @abstractmethod
    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Copies everything that a step is about to change.

        Args:
            parameters: parts of the parameters of all ranks in `copied`.

        Raises:
            pycomm.GroupUnusable: the group has failed, so the copies of a failed step must stay.
        """

    def end_step(self) -> None:
        """Decides that the step counts; all ranks must call this.

        Raises:
            pycomm.CollectiveError: it does not count on any rank.
        """
        self._decide()
        self.steps += 1

    def _decide(self) -> None:
        """Decides that the present tensors count."""
        self._group.should_commit()

    @property
    @abstractmethod
    def ranks_in_step(self) -> list[int]:
        """The ranks that have begun a step that does not count, as far as this one has copies."""

    @abstractmethod
    def of(self, rank: int) -> list[torch.Tensor]:
        """A rank's tensors after the last step that counts, if this rank has a copy of them."""

    @abstractmethod
    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """A rank's parts of parameters before the last step, if this rank has a copy of them."""

    @abstractmethod
    def keepers(self, rank: int) -> list[int]:
        """The ranks that have a rank's tensors, itself first."""


def places_of(kinds: Sequence[Kind], rank: int, first: int) -> list[int]:
    """Where each tensor of a rank begins behind `first`, in whole cache lines, and their end."""
    lines = (-(-kind.nbytes(rank) // _LINE) * _LINE for kind in kinds)
    return list(itertools.accumulate(lines, initial=first))


def views_in(
    memory: torch.Tensor, kinds: Sequence[Kind], rank: int, first: int
) -> list[torch.Tensor]:
    """A rank's tensors in memory, at these places."""
    return [
        memory[begin : begin + kind.nbytes(rank)].view(kind.dtype)
        for begin, kind in zip(places_of(kinds, rank, first), kinds, strict=False)
    ]
