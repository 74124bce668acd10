"""Two copies of each rank's tensors, on several nodes: one on its own, one on another.

Every rank has a buddy, which keeps a copy of its tensors, and is the buddy of one rank, its ward:

    | tensors | the same before the step | the ward's tensors | room for its next ones |
    | parameters before the step, of this rank and of its ward |

1. Before a step changes anything, a rank copies its tensors, and the parameters of its ward and
   itself. Between steps, all ranks have all parameters.
2. After the step, it sends its new tensors to its buddy, which leaves those before the step alone.
3. All ranks decide together whether the step counts. Then the new tensors replace the old ones.

If a step does not count, a rank goes back to its copies. The parameters may be partly new on every
rank that has begun the step, so the ranks with copies send them to all.

No operation between nodes sends to one rank only. So an all-gather sends the tensors piece by
piece, and a rank keeps its ward's. With 2 nodes this moves no more than needed: each node receives
the tensors of the other one. With m nodes, each receives those of all m - 1 others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._inputs import host
from pycomm._spanning.collectives import launch
from pycomm._training.replicas import Kind, Replicas, places_of, views_in

if TYPE_CHECKING:
    from pycomm._work import Work

_PIECES_BYTES = 8 << 20  # of all ranks together
_SMALLEST_PIECE = 64 << 10  # bytes
_AHEAD = 2  # all-gathers at a time


class SpanningReplicas(Replicas):
    """Of ranks on several nodes: each has copies of its ward's tensors, too."""

    reaches_all = False

    def _allocate(
        self,
        kinds: Sequence[Kind],
        parameters: Sequence[Kind],
        until_made: contextlib.ExitStack,  # noqa: ARG002
    ) -> Exception | None:
        self._begun = 0
        self._buddies = buddies(self._group.nodes)
        self._ward = self._buddies.index(self._rank)
        self.copied = (self._rank, self._ward)
        size, all_ranks = self._group.size, range(self._group.size)
        self._bytes = length = max(places_of(kinds, rank, 0)[-1] for rank in all_ranks)
        self._piece = min(max(_PIECES_BYTES // size, _SMALLEST_PIECE), max(length, 1))
        ends = [4 * length]
        for rank in self.copied:
            ends.append(places_of(parameters, rank, ends[-1])[-1])
        try:  # all in one storage, so that memory_report() counts all of it
            memory = host.zeros(ends[-1] + _AHEAD * size * self._piece, dtype=torch.uint8)
        except RuntimeError as raised:  # torch's error if there is no memory
            return raised
        self._now, self._before, *wards = memory[: ends[0]].view(4, length)
        self.tensors = views_in(self._now, kinds, self._rank, 0)
        self._former = views_in(self._before, kinds, self._rank, 0)
        # The last ones that count, and the next ones: their bytes, and they.
        self._wards = [(each, views_in(each, kinds, self._ward, 0)) for each in wards]
        self._parameters = {
            rank: views_in(memory, parameters, rank, begin)
            for rank, begin in zip(self.copied, ends, strict=False)
        }
        self._rooms = memory[ends[-1] :].view(_AHEAD, size * self._piece)
        return None

    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """See :meth:`Replicas.begin_step`."""
        self._group._core.check_usable()
        self._before.copy_(self._now)
        for rank in self.copied:
            for former, parameter in zip(self._parameters[rank], parameters[rank], strict=True):
                former.copy_(parameter)
        self._begun = self.steps + 1

    def _decide(self) -> None:
        self._send()
        super()._decide()
        self._wards.reverse()

    def _send(self) -> None:
        """Sends this rank's tensors to its buddy, and receives the next ones of its ward."""
        works: list[tuple[Work, torch.Tensor, int]] = []
        for number, begin in enumerate(range(0, self._bytes, self._piece)):
            if len(works) == _AHEAD:
                self._receive(*works.pop(0))
            source = self._now[begin : begin + self._piece]
            room = self._rooms[number % _AHEAD, : len(source) * self._group.size]
            work = launch(
                self._group, "all_gather", source, room, source.shape,
                label="states to their replicas", async_op=True,
            )  # fmt: skip
            works.append((work, room.view(self._group.size, -1), begin))
        for each in works:
            self._receive(*each)

    def _receive(self, work: Work, pieces: torch.Tensor, begin: int) -> None:
        work.wait()
        piece = pieces[self._ward]
        self._wards[1][0][begin : begin + len(piece)] = piece

    @property
    def ranks_in_step(self) -> list[int]:
        """See :attr:`Replicas.ranks_in_step`."""
        return list(self.copied) if self._begun > self.steps else []

    def of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.of`."""
        if rank == self._ward:
            return self._wards[0][1]
        assert rank == self._rank
        return self._former if self._begun > self.steps else self.tensors

    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.parameters_of`."""
        return self._parameters[rank]

    def keepers(self, rank: int) -> list[int]:
        """See :meth:`Replicas.keepers`."""
        return [rank, self._buddies[rank]]


def buddies(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The buddy of each rank; each is the buddy of one other.

    It is on another node, but if a node has more than half of all ranks, some of these have theirs
    on the same one.
    """
    ranks = [rank for node in nodes for rank in node]
    ahead = max(map(len, nodes))
    found = dict(zip(ranks, ranks[ahead:] + ranks[:ahead], strict=True))
    return [found[rank] for rank in range(len(ranks))]
