"""The groups of this process that are in use, by name."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from pycomm._runtime.member import Member

_FAREWELL = 0.5  # seconds that operations have when the interpreter exits

Kind = TypeVar("Kind", bound="Member")


class OpenGroups(Generic[Kind]):
    """Does not keep them alive. Aborts at exit those whose operations do not complete."""

    def __init__(self) -> None:
        self._by_name: weakref.WeakValueDictionary[str, Kind] = weakref.WeakValueDictionary()
        atexit.register(self._end)

    def add(self, group: Kind) -> None:
        """Notes a new one."""
        self._by_name[group.name] = group

    def find(self, name: str) -> Kind:
        """The one of that name; ValueError if there is none."""
        if name not in self._by_name:
            raise ValueError(f"group must name an open pycomm group, got {name!r}")
        return self._by_name[name]

    def any_usable(self) -> bool:
        """Whether any could run an operation now."""
        return any(group._core.usable() for group in list(self._by_name.values()))

    def forget(self) -> None:
        """Leaves all to their fate."""
        self._by_name.clear()

    def _end(self) -> None:
        """Leaves no thread in an operation that needs the interpreter when that is gone."""
        busy = _still_busy(list(self._by_name.values()))
        for group in busy:
            group.abort()
        _still_busy(busy)


def _still_busy(groups: list[Kind]) -> list[Kind]:
    """Waits for their operations; returns those that have not completed in time."""
    end = time.monotonic() + _FAREWELL
    while (groups := [group for group in groups if not group._core.idle()]) and (
        time.monotonic() < end
    ):
        time.sleep(0.002)
    return groups
