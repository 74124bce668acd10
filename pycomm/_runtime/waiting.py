"""Waiting while a group is made: never longer than its timeout, and never without a look around."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pycomm.errors import PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SLICE = 0.05  # seconds that a wait takes before it looks at other things
_FIRST_NAP = 0.001  # between two questions to a Store, which serves all ranks
_GROWTH = 1.25  # of naps, so that many ranks that wait for long leave it alone
_LONGEST_SLICE = 0.2  # if it took longer, this process was stopped meanwhile


class Deadline:
    """Seconds that a rendezvous may still take, as far as this process runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never less than a millisecond (zero would mean "do not wait at all")."""
        return max(self._end - time.monotonic(), 1e-3)

    def await_keys(self, store: Store, keys: Sequence[str], look: Callable[[], object]) -> bool:
        """Waits until all keys are there, or until `look`, called in between, returns True.

        Asks again and again: a Store's own wait cannot be interrupted.

        Returns:
            Whether the keys are there.
        """
        nap = _FIRST_NAP
        while not store.check(list(keys)):
            if look():
                return False
            with self._slice() as seconds:
                time.sleep(min(nap, seconds))
            nap = min(_GROWTH * nap, _SLICE)
        return True

    def await_bytes(self, connection: socket.socket, look: Callable[[], object]) -> None:
        """Returns once there is a connection to accept or there are bytes to read."""
        arrivals = select.poll()
        arrivals.register(connection, select.POLLIN)
        while True:
            with self._slice() as seconds:
                if arrivals.poll(1e3 * seconds):
                    return
            look()

    def await_event(self, event: threading.Event, look: Callable[[], object]) -> None:
        """Returns once it is set. An interrupted join would take its thread for ended."""
        while not event.is_set():
            with self._slice() as seconds:
                event.wait(seconds)
            look()

    def look_for(self, seconds: float, look: Callable[[], object]) -> None:
        """Looks again and again, for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            look()
            with self._slice() as rest:
                time.sleep(rest)

    @contextlib.contextmanager
    def _slice(self) -> Iterator[float]:
        """The seconds that a wait may take; raises TimeoutError if no time is left."""
        begin = time.monotonic()
        if begin >= self._end:
            raise TimeoutError("timed out")
        yield min(_SLICE, self._end - begin)
        self._end += max(0, time.monotonic() - begin - _LONGEST_SLICE)

    @contextlib.contextmanager
    def guarding(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Turns the transports' own ways of failing into pycomm.Timeout.

        Args:
            what: what did not happen then, or how to find out.
        """
        try:
            yield
        except PycommError:
            raise
        except (OSError, RuntimeError) as error:
            try:
                event = what if isinstance(what, str) else what()
            except RuntimeError:
                event = "reaching the Store"
            raise Timeout(
                f"rendezvous: {event} did not happen within {self._seconds} s ({error})",
                operation="rendezvous",
            ) from error
