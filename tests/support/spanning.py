"""Processes of one machine that take themselves for processes of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers

from pycomm._runtime import rendezvous


def pretend(machine: str) -> None:
    """From now on this process takes itself for one of that machine."""
    real = rendezvous.machine_identity
    rendezvous.machine_identity = lambda: f"{real()} {machine}"


def names(hosts: list[int] | str) -> str:
    """A letter for each rank's machine: ``[2, 1]`` is ``"aab"``; ``"aba"`` is itself."""
    if isinstance(hosts, str):
        return hosts
    return "".join(letter * count for letter, count in zip("abcd", hosts, strict=False))


def member(
    rank: int, size: int, store: str, machines: str, function: Callable[..., Any], options: dict,
    *args: Any,
) -> Any:  # fmt: skip
    """For :class:`helpers.Ranks`: ``function(group, *args)`` in a group that spans machines."""
    pretend(machines[rank])
    return helpers.in_group(rank, size, store, function, options, *args)


def run(
    hosts: list[int] | str, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """What ``function(group, *args)`` returned on every rank; `options` are ``pycomm.init``'s."""
    machines = names(hosts)
    return helpers.run_ranks(len(machines), member, machines, function, options, *args)


def ranks(
    hosts: list[int], function: Callable[..., Any], *args: Any, **options: Any
) -> helpers.Ranks:
    """The processes, to do harm to."""
    machines = names(hosts)
    return helpers.Ranks(len(machines), member, machines, function, options, *args)
