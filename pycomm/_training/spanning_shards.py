"""Shards of ranks on several nodes, which cannot write to each other's memory.

Each bucket of gradients is divided into equal blocks, one per rank. Backward reduces every block to
its owner, as buckets fill; a step updates the block's parameters and sends them to all ranks. An
all-reduce would move the same bytes.

Every parameter begins at a multiple of 1,024 elements, and every bucket has a multiple of 1,024
elements per rank. So blocks of all parameters are as :mod:`pycomm._training.shards` cuts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import TensorWeakRef

from pycomm._spanning.collectives import launch
from pycomm._training.buckets import partition
from pycomm._training.cuts import UNIT, Range
from pycomm._training.exchange import dense_wire_bytes
from pycomm._training.flat import Memory, kind_of
from pycomm._training.publication import Publication, Spread
from pycomm._training.scatter import Blocks, encoded_bytes
from pycomm._training.shards import Shards

if TYPE_CHECKING:
    from pycomm._training.shard_options import Sharding
    from pycomm.group import Group


class SpanningShards(Shards):
    """The parameters of one wrapper, divided among ranks on several nodes.

    Args:
        parameters: as for :class:`Shards`.
        group: the ranks.
        gradients: allocates memory for gradients.
        limit: the size of a bucket of several parameters, in bytes.
        scatters: True if backward averages gradients at their owners, not everywhere.
        sharding: how new parameters are sent.

    Attributes:
        blocks: the gradients of each bucket, by the id of its first parameter.
        publication: sends new parameters.
    """

    publication: Publication

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group: Group,
        gradients: Memory,
        limit: float,
        scatters: bool,
        sharding: Sharding,
    ) -> None:
        self._sharding = sharding
        self.blocks: dict[int, Blocks] = {}
        rooms: dict[int, int] = {}
        for bucket in partition(parameters, limit, kind_of):
            rooms |= _rooms(bucket, group.size)
        super().__init__(parameters, group, gradients, rooms, sharding.replicas > 1)
        self.leaves_local = scatters

    def cut(self, bucket: Sequence[torch.Tensor]) -> list[tuple[Range, ...]]:
        """See :meth:`Shards.cut`."""
        size, (begin, end) = self.group.size, self._extent(bucket)
        block = (end - begin) // size
        parts = []
        for parameter in bucket:
            first = self.layout[parameter].offset - begin
            last = first + parameter.numel()
            owners = range(first // block, -(-last // block))
            cuts = [(r, max(first, r * block), min(last, (r + 1) * block)) for r in owners]
            parts.append(tuple(Range(r, a - first, b - first) for r, a, b in cuts if a < b))
        return parts

    def assign(self, buckets: Iterable[Sequence[torch.Tensor]]) -> None:
        """See :meth:`Shards.assign`."""
        buckets, rank = list(buckets), self.group.rank
        super().assign(buckets)
        spreads, first = [], 0
        for bucket in buckets:
            piece, (begin, end) = self.layout[bucket[0]].piece, self._extent(bucket)
            assert piece.parameters is not None
            gradients = piece.gradients[begin:end]
            begins = {id(p): self.layout[p].offset - begin for p in bucket}
            self.blocks[id(bucket[0])] = Blocks(gradients, self._own(gradients), begins, first)
            first += end - begin
            whole = piece.parameters[begin:end]
            own = self._own(whole)
            ranges = []
            for parameter, cuts in zip(bucket, self.cut(bucket), strict=True):
                at = self.layout[parameter].offset - begin - rank * len(own)
                mine = next((r for r in cuts if r.rank == rank), Range(rank, 0, 0))
                ranges.append((TensorWeakRef(parameter), at + mine.begin, at + mine.end))
            spreads.append(Spread(whole, own, tuple(ranges)))
        spreads.reverse()  # forward uses those first whose gradients come last
        self.publication = Publication(self._sharding, spreads)

    def _average_local(self, local: Sequence[torch.Tensor]) -> None:
        """Collects the blocks of the buckets that these gradients lie in."""
        ids, works = set(map(id, local)), []
        for blocks in self.blocks.values():
            if not ids.isdisjoint(blocks.begins):
                own, whole = blocks.own, blocks.gradients
                label = "gradients to all"
                works.append(
                    launch(
                        self.group, "all_gather", own, whole, own.shape, label=label, async_op=True
                    )
                )
        for work in works:
            work.wait()

    def wire_bytes(self, nbytes: int) -> int:
        """See :meth:`Shards.wire_bytes`; `nbytes` as gradients are sent."""
        for bucket in self.blocks.values():
            nbytes += encoded_bytes(self._sharding.publish, bucket.gradients)
        return dense_wire_bytes(nbytes, self.group) // 2

    def end_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """See :meth:`Shards.end_step`."""
        parameters = list(parameters)
        super().end_step(parameters)
        self.publication.end_step(parameters)

    def _extent(self, bucket: Sequence[torch.Tensor]) -> tuple[int, int]:
        """The first and the last element of a bucket in its piece, padding included."""
        first, last = self.layout[bucket[0]], self.layout[bucket[-1]]
        return first.offset, last.offset + self.layout.room(bucket[-1])

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.group.size, -1)[self.group.rank]


def _rooms(bucket: Sequence[torch.Tensor], ranks: int) -> dict[int, int]:
    """The elements that each parameter of a bucket takes, by its id."""
    rooms = {id(p): -(-max(p.numel(), 1) // UNIT) * UNIT for p in bucket}
    total, unit = sum(rooms.values()), ranks * UNIT
    rooms[id(bucket[-1])] += -total % unit
    return rooms
