"""Ranks that are new in a group that has grown, among those that go on with what they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycomm.errors import CollectiveError

if TYPE_CHECKING:
    from pycomm.group import Group


def source_among(news: Sequence[bool]) -> int:
    """The rank that gives new ones what they need: the first that is not new, if there is one."""
    return [*news, False].index(False) % len(news)


def check_alike(kinds: Sequence[int], news: Sequence[bool], group: Group, wanted: str) -> None:
    """Raises an error on all ranks if those that are new are of another kind.

    Ranks that go on with what they have need only leave out one that is new.

    Args:
        kinds: a number for each rank.
        news: True for ranks that are new.
        group: the ranks.
        wanted: what must be alike on all ranks.

    Raises:
        ValueError: this rank is new and of another kind; or all are new.
        pycomm.CollectiveError: another one is.
    """
    source = source_among(news)
    wrong = [rank for rank, kind in enumerate(kinds) if kind != kinds[source]]
    if not wrong:
        return
    message = f"{wanted}: those of rank {wrong[0]} are not like those of rank {source}"
    if all(news) or group.rank in wrong:
        raise ValueError(message)
    raise CollectiveError(message, rank=wrong[0], operation="regroup")
