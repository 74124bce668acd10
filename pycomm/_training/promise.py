"""Tracks whether an exchange is still to come after a forward.

A forward that records gradients promises an exchange, on all ranks alike. A backward first sends an
announcement of it. If a rank starts another forward while its promise is open, it takes part in
that announcement. If other ranks have announced an exchange, this rank's backward must have raised.
If none has, there are several forwards before one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._inputs import host
from pycomm._work import Work
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group


class Promise:
    """The promise of one wrapper.

    Attributes:
        open: True if an exchange is promised and has not ended.
    """

    def __init__(self) -> None:
        self.open = False
        self._forwards = 0  # forwards that no exchange has followed
        self._left = 0  # those of them that came before the last exchange
        self._announced = False
        self._work: Work | None = None

    def make(self, inside_backward: bool) -> None:
        """Promises an exchange, in a forward; inside a backward it repeats a counted forward."""
        self.open = True
        self._forwards += not inside_backward

    def announce(self, group: Group) -> None:
        """Announces an exchange before it sends anything; only the first call has an effect."""
        if not self._announced:
            self._announced = True
            announced = host.tensor([1], dtype=torch.uint8)
            self._work = all_reduce(announced, "max", group=group, async_op=True)

    def is_broken(self, group: Group) -> bool:
        """In another forward: true if other ranks are in the exchange, so this one must join it."""
        if not self._announced:
            others = all_reduce(host.zeros(1, dtype=torch.uint8), "max", group=group)
            self._announced = bool(others)
            if not self._announced:  # so forwards left over then will not have a backward
                self._forwards -= self._left
                self._left = 0
        return self._announced

    def wait(self) -> None:
        """Waits until all ranks have answered; raises the error if that failed."""
        if self._work is not None:
            self._work.wait()

    def settle(self, dropped: bool = False) -> None:
        """Ends a backward; other forwards before it may have backwards of their own."""
        self._forwards = self._left = 0 if dropped else max(self._forwards - 1, 0)
        self.open = self._forwards > 0
        self._announced = False
        self._work = None


def compare(used: Sequence[bool], raised: bool, group: Group) -> tuple[list[bool], list[int]]:
    """After an exchange: what any rank has used, and the ranks whose backward has raised."""
    flags = [*used, *(raised and rank == group.rank for rank in range(group.size))]
    anywhere = all_reduce(host.tensor(flags, dtype=torch.uint8), "max", group=group).bool().tolist()
    raised_on = [rank for rank, flag in enumerate(anywhere[len(used) :]) if flag]
    return anywhere[: len(used)], raised_on
