"""What ranks owe each other between a forward and the end of its backward.

A forward with gradients promises an exchange, on all ranks alike. The first thing that a backward
sends is an announcement of it. A rank that comes to another forward with its promise still open
answers in the same place: where others have announced an exchange its own backward must have
raised, wherever that was; where nobody has, there are several forwards before one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pycomm.collectives import Work, all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group


class Promise:
    """One wrapper's.

    Attributes:
        open: whether an exchange is promised and has not ended.
    """

    def __init__(self) -> None:
        self.open = False
        self._forwards = 0  # that no exchange has followed
        self._left = 0  # those of them that were before the last exchange
        self._announced = False
        self._work: Work | None = None

    def make(self, inside_backward: bool) -> None:
        """In a forward; inside of a backward it repeats one that has been counted."""
        self.open = True
        self._forwards += not inside_backward

    def announce(self, group: Group) -> None:
        """Before an exchange sends anything; only the first call does something."""
        if not self._announced:
            self._announced = True
            announced = torch.ones(1, dtype=torch.uint8)
            self._work = all_reduce(announced, "max", group=group, async_op=True)

    def is_broken(self, group: Group) -> bool:
        """In another forward: whether other ranks are in the exchange; then this one must be."""
        if not self._announced:
            others = all_reduce(torch.zeros(1, dtype=torch.uint8), "max", group=group)
            self._announced = bool(others)
            if not self._announced:  # so what was left then is not going to have a backward
                self._forwards -= self._left
                self._left = 0
        return self._announced

    def wait(self) -> None:
        """Until all ranks have answered; raises what went wrong."""
        if self._work is not None:
            self._work.wait()

    def settle(self, dropped: bool = False) -> None:
        """A backward is through; other forwards before it may have backwards of their own."""
        self._forwards = self._left = 0 if dropped else max(self._forwards - 1, 0)
        self.open = self._forwards > 0
        self._announced = False
        self._work = None


def compare(used: Sequence[bool], raised: bool, group: Group) -> tuple[list[bool], list[int]]:
    """After an exchange: what any rank has used, and on which ranks backward has raised."""
    flags = [*used, *(raised and rank == group.rank for rank in range(group.size))]
    anywhere = all_reduce(torch.tensor(flags).byte(), "max", group=group).bool().tolist()
    raised_on = [rank for rank, flag in enumerate(anywhere[len(used) :]) if flag]
    return anywhere[: len(used)], raised_on
