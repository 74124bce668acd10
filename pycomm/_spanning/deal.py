"""Elements that parties take in turns, as nodes and stripes do in compressed operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Deal:
    """A tensor's elements, dealt to parties: `piece` elements to each, and again from the first.

    An element's party depends only on its index in the whole tensor, as in
    csrc/core/algorithms/stripes.h.

    Args:
        first: the index of the tensor's first element in the whole.
        count: the number of its elements.
        piece: so many elements go to a party before the next one's turn.
        parties: the number of parties.

    Attributes:
        width: the length of a row.
    """

    def __init__(self, first: int, count: int, piece: int, parties: int) -> None:
        self._first, self._count, self._piece, self._parties = first, count, piece, parties
        begin, end = first // (piece * parties), -(-(first + count) // (piece * parties))
        self._rounds = end - begin if count else 0
        self._front = first - begin * piece * parties if count else 0
        self.width = count if parties == 1 else self._rounds * piece

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A row for each party with its elements; zeros where this tensor has none for it."""
        if self._parties == 1:
            return tensor.view(1, -1)
        rows = tensor.new_empty((self._parties, self.width))
        dealt = rows.view(self._parties, self._rounds, self._piece)
        for edge in {0, self._rounds - 1} if self._rounds else ():
            dealt[:, edge] = 0
        for place, elements in self._pairs(dealt, tensor):
            place.copy_(elements)
        return rows

    def collect(self, rows: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes the elements of :meth:`rows` back to their places in the tensor."""
        if self._parties == 1:
            tensor.copy_(rows.view(-1))
            return
        dealt = rows.view(self._parties, self._rounds, self._piece)
        for place, elements in self._pairs(dealt, tensor):
            elements.copy_(place)

    def _pairs(
        self, dealt: torch.Tensor, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Places in rows, and the elements that belong there: whole rounds at a time."""
        turn = self._piece * self._parties
        first, last = -(-self._front // turn), (self._front + self._count) // turn
        if first < last:
            begin = first * turn - self._front
            whole = tensor[begin : begin + (last - first) * turn]
            yield (
                dealt[:, first:last].transpose(0, 1),
                whole.view(last - first, self._parties, self._piece),
            )
        for edge in {0, self._rounds - 1} - {*range(first, last)} if self._rounds else ():
            for party in range(self._parties):
                at = edge * turn + party * self._piece - self._front
                begin, end = max(at, 0), min(at + self._piece, self._count)
                if begin < end:
                    yield dealt[party, edge, begin - at : end - at], tensor[begin:end]

    def part(self, party: int) -> slice:
        """Where a party's row has elements of this tensor."""
        base = 0 if self._parties == 1 else self._before(self._first - self._front, party)
        begin, end = (self._before(self._first + i, party) for i in (0, self._count))
        return slice(begin - base, end - base) if self._parties > 1 else slice(0, self._count)

    def first(self, party: int) -> int:
        """The number of elements of the whole that the party has before those of this tensor."""
        return self._before(self._first, party)

    def origin(self, party: int) -> int:
        """The index in the whole of the first element of the party's row."""
        return self._first - self._front + party * self._piece

    def _before(self, index: int, party: int) -> int:
        """The number of the party's elements among those of the whole before `index`."""
        turn, within = divmod(index, self._piece * self._parties)
        mine = min(max(within - party * self._piece, 0), self._piece)
        return turn * self._piece + mine


def part_of(count: int, parts: int, index: int, unit: int) -> slice:
    """A part of a tensor that is cut at multiples of `unit`, as in csrc/core/layout.h."""
    base, longer = divmod(-(-count // unit), parts)
    begin = (index * base + min(index, longer)) * unit
    end = begin + (base + (index < longer)) * unit
    return slice(min(begin, count), min(end, count))
