"""The open groups of this process, by name."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm._runtime.member import Member

_FAREWELL = 0.5  # seconds that operations have when the interpreter exits

Kind = TypeVar("Kind", bound="Member")


class OpenGroups(Generic[Kind]):
    """Weak references to open groups. At exit, aborts groups whose operations do not complete."""

    def __init__(self) -> None:
        self._by_name: weakref.WeakValueDictionary[str, Kind] = weakref.WeakValueDictionary()
        self._afterwards: list[Callable[[], None]] = []
        atexit.register(self._end)

    def add(self, group: Kind) -> None:
        """Adds a new group."""
        self._by_name[group.name] = group

    def find(self, name: str) -> Kind:
        """The group with this name; ValueError if there is none."""
        if name not in self._by_name:
            raise ValueError(f"group must name an open pycomm group, got {name!r}")
        return self._by_name[name]

    def any_usable(self) -> bool:
        """True if any group could run an operation now."""
        return any(group._core.usable() for group in list(self._by_name.values()))

    def forget(self) -> None:
        """Removes all groups without ending them."""
        self._by_name.clear()

    def after_end(self, function: Callable[[], None]) -> None:
        """Calls `function` at exit, after the groups' operations."""
        self._afterwards.append(function)

    def _end(self) -> None:
        """Ends all operations, as their threads need the interpreter, which is about to end."""
        busy = _still_busy(list(self._by_name.values()))
        for group in busy:
            group.abort()
        _still_busy(busy)
        for function in self._afterwards:
            function()


def _still_busy(groups: list[Kind]) -> list[Kind]:
    """Waits for the groups' operations; returns the groups that are still busy at the end."""
    end = time.monotonic() + _FAREWELL
    while (groups := [group for group in groups if not group._core.idle()]) and (
        time.monotonic() < end
    ):
        time.sleep(0.002)
    return groups
