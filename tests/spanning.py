"""Processes of one machine that take themselves for processes of several."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import helpers


def member(
    rank: int, size: int, store: str, hosts: list[int], function: Callable[..., Any], options: dict,
    *args: Any,
) -> Any:  # fmt: skip
    """For :class:`helpers.Ranks`: ``function(group, *args)`` in a group that spans machines."""
    os.environ["PYCOMM_TEST_HOSTS"] = ",".join(map(str, hosts))
    return helpers.in_group(rank, size, store, function, options, *args)


def run(hosts: list[int], function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What ``function(group, *args)`` returned on every rank; `options` are ``pycomm.init``'s."""
    return helpers.run_ranks(sum(hosts), member, hosts, function, options, *args)


def ranks(
    hosts: list[int], function: Callable[..., Any], *args: Any, **options: Any
) -> helpers.Ranks:
    """The processes, to do harm to."""
    return helpers.Ranks(sum(hosts), member, hosts, function, options, *args)
