"""How ranks agree on what must be the same on all of them, also if some have just joined."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._runtime import host
from pycomm.collectives import broadcast
from pycomm.errors import CollectiveError

if TYPE_CHECKING:
    from pycomm.group import Group


def source_rank(news: Sequence[bool]) -> int:
    """The rank that gives new ones what they need: the first that is not new, if there is one."""
    return [*news, False].index(False) % len(news)


def checksum(lines: Sequence[str]) -> int:
    """A number that is the same on two ranks if their lines are."""
    return zlib.crc32("\n".join(lines).encode())


def check_same(
    lines: Sequence[str], numbers: Sequence[int], news: Sequence[bool], group: Group, what: str
) -> None:
    """Raises an error on all ranks if one that is new differs from the others.

    Ranks that go on with what they have need only leave out one that is new. If ranks differ, this
    is a collective call.

    Args:
        lines: what must be the same on all ranks, in words.
        numbers: the :func:`checksum` of each rank's lines.
        news: True for ranks that are new.
        group: the ranks.
        what: whose lines they are.

    Raises:
        ValueError: this rank is new and differs, or all are new. It names the first difference.
        pycomm.CollectiveError: another one differs.
    """
    source = source_rank(news)
    wrong = [rank for rank, number in enumerate(numbers) if number != numbers[source]]
    if not wrong:
        return
    difference = _first_difference(lines, source, wrong[0], group)
    message = f"{what} must be the same on all ranks: {difference}"
    if all(news) or group.rank in wrong:
        raise ValueError(message)
    raise CollectiveError(message, rank=wrong[0], operation="regroup")


def _first_difference(lines: Sequence[str], source: int, other: int, group: Group) -> str:
    """The first line that rank `other` has otherwise than rank `source`, on all ranks."""
    theirs = _broadcast_text("\n".join(lines), source, group).split("\n")
    pairs = itertools.zip_longest(lines, theirs, fillvalue="nothing")
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    found = f"rank {group.rank} has {here}, but rank {source} has {there}"
    return _broadcast_text(found, other, group)


def _broadcast_text(text: str, source: int, group: Group) -> str:
    data = host.tensor(list(text.encode()), dtype=torch.uint8)
    length = host.tensor([len(data)])
    broadcast(length, source, group=group)
    if group.rank != source:
        data = host.empty(int(length), dtype=torch.uint8)
    broadcast(data, source, group=group)
    return bytes(data.tolist()).decode()
