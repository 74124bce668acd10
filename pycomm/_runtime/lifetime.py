"""The runtime's interface of groups, the open groups, and their tensors in forked children."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pycomm import _C

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pycomm._runtime.plan import Plan
    from pycomm._runtime.sockets import Listener

# The nodes of a group's ranks, and a group's interface for the modules that it is built from.


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node.

    Attributes:
        ranks: the ranks of each node, ascending; nodes are ordered by their first rank.
        here: the index of this rank's node.
    """

    ranks: tuple[tuple[int, ...], ...]
    here: int

    @classmethod
    def of(cls, identities: Sequence[str], rank: int) -> Nodes:
        """Makes it from every rank's :func:`pycomm._runtime.rendezvous.node_identity`."""
        found: dict[str, list[int]] = {}
        for r, identity in enumerate(identities):
            found.setdefault(identity, []).append(r)
        here = list(found).index(identities[rank])
        return cls(tuple(tuple(ranks) for ranks in found.values()), here)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.ranks[self.here]

    @property
    def stripes(self) -> int:
        """The number of ranks of every node that exchange with other nodes; 0 on one node."""
        return _C.stripes(self.ranks)


class Member(Protocol):
    """One rank's membership; :class:`pycomm.Group` documents the members."""

    rank: int
    size: int
    timeout: float
    staging_bytes: int
    name: str
    title: str
    nodes: tuple[tuple[int, ...], ...]
    stripes: int
    ranks: tuple[int, ...]
    _core: _C.Group
    _algorithms: Sequence[dict[str, Any]]
    _told: set[str]

    def explain(
        self,
        nbytes: int,
        dtype: torch.dtype = ...,
        *,
        algorithm: str = ...,
        in_window: bool = ...,
        device: str = ...,
    ) -> Plan:
        """Explains how an all-reduce would run."""

    def _growing(self) -> Any:
        """This rank's part in growing."""

    @property
    def _listener(self) -> Listener | None:
        """The listener by which other nodes reach this rank after a failure, if there is one."""

    def should_commit(self, ready: bool = ...) -> bool:
        """Decides whether all ranks are ready."""

    def abort(self) -> None:
        """Ends every rank's operations."""

    def close(self) -> None:
        """Leaves the group."""


# The open groups of this process, by name.
#
# Exit handlers run in reverse order. ``import pycomm`` registers this one, so handlers that a
# program registers afterwards run while groups still work.

_FAREWELL = 0.5  # seconds for operations to end when the interpreter exits

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


open_groups: OpenGroups[Any] = OpenGroups()


def _still_busy(groups: list[Kind]) -> list[Kind]:
    """Waits for the groups' operations; returns the groups that are still busy at the end."""
    end = time.monotonic() + _FAREWELL
    while (groups := [group for group in groups if not group._core.idle()]) and (
        time.monotonic() < end
    ):
        time.sleep(0.002)
    return groups


# Tensors in windows after a fork.
#
# They lie in shared memory, which a fork does not copy. C++ makes them private to every child
# (csrc/cpu/group/fork.h). This module asks for a copy before each fork by Python, so that the child
# has the values from the time of the fork, as with other tensors: a child that writes a checkpoint
# must not see later steps.

# Functions that fork children which use no model, or which execute another program. A fork needs no
# copy if any of its callers is one of these.
_CALLERS_WITHOUT_COPY = {
    ("torch.utils.data.dataloader", "__init__"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "__init__"),
    ("subprocess", "_execute_child"),
}


def _prepare() -> None:
    if not _child_needs_no_copy() and not _C.copy_at_fork():
        logging.getLogger("pycomm.memory").warning(
            "no memory to copy the tensors in windows for a forked process: it may see what this "
            "process writes to the tensors later"
        )


def _child_needs_no_copy() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _CALLERS_WITHOUT_COPY:
            return True
        frame = frame.f_back
    return False


os.register_at_fork(before=_prepare)
