"""Named ranges of time, for torch's profiler and for traces (pycomm/tracing.py).

Without a profiler or a trace, a range only reads two variables.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pycomm._runtime.torch_private import profiler_runs

if TYPE_CHECKING:
    from pycomm import _C
    from pycomm._runtime.lifetime import Member

Function = TypeVar("Function", bound=Callable[..., Any])
Details = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """A range of a thread, by the clock of :func:`time.monotonic`.

    Attributes:
        name: the range's name.
        begin: its beginning, in seconds.
        end: its end.
        thread: the thread's number.
        details: further values, for JSON.
    """

    name: str
    begin: float
    end: float
    thread: int
    details: Details


@dataclass
class Watch:
    """A trace's records of one rank's calls.

    Attributes:
        ranges: the ranges that have ended.
        launched: operations that the group's worker runs, with the open range that launched them.
    """

    ranges: list[Range] = field(default_factory=list)
    launched: list[tuple[Open, _C.Work]] = field(default_factory=list)


@dataclass(frozen=True)
class Open:
    """A range that has not ended."""

    group: Member
    name: str
    details: Details

    def waiting(self) -> AbstractContextManager[object]:
        """The range of a wait for the operations that this range has launched."""
        return record_range(self.group, f"wait for {self.name}")


watches: dict[Member, Watch] = {}  # of traces that are running
_NOTHING = contextlib.nullcontext()
here = threading.local()  # `opened`: this thread's open ranges, once there was one


def watched() -> bool:
    """True if a profiler or a trace runs."""
    return bool(watches) or profiler_runs()


def record_range(
    group: Member, name: str, details: Callable[[], Details] | None = None
) -> AbstractContextManager[object]:
    """A range of a rank of `group`; `details` is called only for a profiler or a trace."""
    if not watched():
        return _NOTHING
    return _record(Open(group, name, {} if details is None else details()))


def of_calls(launch: Function) -> Function:
    """Makes each call of ``launch(group, collective, ...)`` a range."""

    @functools.wraps(launch)
    def wrapped(group: Member, collective: str, *args: Any, **options: Any) -> Any:
        if not watched():
            return launch(group, collective, *args, **options)
        with record_range(group, collective):
            return launch(group, collective, *args, **options)

    return wrapped  # type: ignore[return-value]


def launched(work: _C.Work) -> Open | None:
    """Records that the group's worker runs an operation; only where there was a range before.

    Returns:
        The range that has launched it: the innermost one with details, such as a bucket; without
        any, the innermost one.
    """
    opened: list[Open] = here.opened
    if not opened:
        return None
    launching = next((one for one in reversed(opened) if one.details), opened[-1])
    watch = watches.get(launching.group)
    if watch is not None:
        watch.launched.append((launching, work))
    return launching


@contextlib.contextmanager
def _record(opening: Open) -> Iterator[None]:
    opened: list[Open] = vars(here).setdefault("opened", [])
    opened.append(opening)
    seen = profiler_runs()
    profiled = torch.autograd.profiler.record_function(f"pycomm:{opening.name}")
    with profiled if seen else _NOTHING:
        begin = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            opened.pop()
            watch = watches.get(opening.group)
            if watch is not None:
                thread = threading.get_native_id()
                watch.ranges.append(Range(opening.name, begin, end, thread, opening.details))
