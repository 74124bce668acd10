"""Elements that parties take in turns, as nodes and stripes do in compressed operations."""

from __future__ import annotations

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
        back = self._rounds * self._piece * self._parties - self._front - self._count
        whole = torch.nn.functional.pad(tensor, (self._front, back))
        dealt = whole.view(self._rounds, self._parties, self._piece).transpose(0, 1)
        return dealt.reshape(self._parties, -1)

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`rows`."""
        if self._parties == 1:
            return rows.view(-1)
        dealt = rows.view(self._parties, self._rounds, self._piece).transpose(0, 1)
        return dealt.reshape(-1)[self._front : self._front + self._count]

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
