"""Collects a rank's recorded operations, of which shared memory holds only the last ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pycomm import _C
from pycomm._runtime.threads import start_thread
from pycomm.errors import GroupUnusable

if TYPE_CHECKING:
    from pycomm._runtime.member import Member

_LONGEST, _SHORTEST = 0.01, 0.0002  # seconds from one look to the next
_WANTED = 32  # new operations per look, a quarter of what the record holds
_NUMBERS = 1 << 32  # operations are numbered modulo this

Operation = dict[str, Any]  # as in pycomm.report.RecordedOperation


class Sampler:
    """Looks at the record from a thread of its own, as often as operations come.

    It begins with the last operation before it was made. If it sees an operation only while that
    runs, its end is unknown, as that of a small one is.

    Attributes:
        operations: those seen so far, by their number from the first one on.
    """

    def __init__(self, group: Member) -> None:
        self._core = group._core
        self.operations: dict[int, Operation] = {}
        newest = self._last(1)
        self._first = newest[0]["sequence"] if newest else 1
        self._known = -1  # up to this number, operations have been seen when they were done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pycomm trace", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        start_thread(self._thread)

    def stop(self) -> None:
        """Ends the thread, after a last look, also if :meth:`start` was interrupted."""
        self._stop.set()
        if self._thread.ident is not None:  # else it ends as soon as it begins, if it does
            self._thread.join()
        for each in (self.operations[number] for number in sorted(self.operations)[:-1]):
            if each["done"] is None:  # it ran at the last look at it, and others came after it
                each["done"] = each["entered"]

    @property
    def lost(self) -> int:
        """The number of operations that it has not seen."""
        return max(self.operations, default=-1) + 1 - len(self.operations)

    def _run(self) -> None:
        pause = _SHORTEST
        ends = False
        try:
            while not ends:
                ends = self._stop.wait(pause)
                pause = min(max(pause * _WANTED / max(self._look(), 1), _SHORTEST), _LONGEST)
        except GroupUnusable:  # it has been closed
            pass

    def _look(self) -> int:
        """Takes what is new; returns the number of operations since the last look."""
        newest = self._last(1)
        fresh = self._number(newest[0]) - self._known if newest else 0
        if fresh <= 0:
            return 0
        for most in (2 * fresh + 8, _C.most_recorded):  # more may have come between two readings
            seen = {self._number(each): each for each in self._last(most)}
            if min(seen, default=0) <= self._known + 1:
                break
        new = {number: each for number, each in seen.items() if number > self._known}
        self.operations.update(new)
        done = (number for number, each in new.items() if each["done"] is not None)
        self._known = max(done, default=self._known)
        return fresh

    def _last(self, most: int) -> list[Operation]:
        """This rank's last operations."""
        (own,) = self._core.state(min(most, _C.most_recorded), only_own=True)["ranks"]
        operations: list[Operation] = own["operations"]
        return operations

    def _number(self, operation: Operation) -> int:
        """The number from the first one on."""
        distance: int = (operation["sequence"] - self._first) % _NUMBERS
        return distance if distance < _NUMBERS // 2 else distance - _NUMBERS
