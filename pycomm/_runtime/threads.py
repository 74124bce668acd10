"""Threads, and waits with deadlines."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pycomm import _C
from pycomm.errors import PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NO_THREAD = "Resource temporarily unavailable"  # in errors of C++ threads, as Gloo's


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread; RuntimeError names the limits if there is none left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {_C.thread_limits()}") from error


def with_limits(error: Exception) -> Exception:
    """An error of torch; if it says that no thread is left, the result names the limits."""
    if _NO_THREAD not in str(error):
        return error
    return RuntimeError(f"no thread can be started ({error}): {_C.thread_limits()}")


# Waits while a group is made: bounded by a timeout, with regular checks for failures.

_SLICE = 0.05  # seconds that a wait takes before it checks for failures
_FIRST_NAP = 0.001  # seconds between two queries of a Store, which serves all ranks
_GROWTH = 1.25  # factor between naps, so that many ranks in long waits do not overload the Store
_LONGEST_SLICE = 0.2  # if a slice took longer, this process was suspended


class Deadline:
    """The end of a rendezvous. Time in which this process was suspended does not count.

    Attributes:
        seconds: the whole time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never less than a millisecond (zero would mean "do not wait at all")."""
        return max(self._end - time.monotonic(), 1e-3)

    def over(self) -> bool:
        """True if no time is left."""
        return time.monotonic() >= self._end

    def await_keys(self, store: Store, keys: Sequence[str], look: Callable[[], object]) -> bool:
        """Waits until all keys are set, or until `look`, called in between, returns True.

        This polls, because a Store's own wait cannot be interrupted.

        Returns:
            True if the keys are set.
        """
        nap = _FIRST_NAP
        while not store.check(list(keys)):
            if look():
                return False
            with self.slice() as seconds:
                time.sleep(min(nap, seconds))
            nap = min(_GROWTH * nap, _SLICE)
        return True

    def await_bytes(self, connection: socket.socket, look: Callable[[], object]) -> None:
        """Returns once there is a connection to accept or there are bytes to read."""
        arrivals = select.poll()
        arrivals.register(connection, select.POLLIN)
        while True:
            with self.slice() as seconds:
                if arrivals.poll(1e3 * seconds):
                    return
            look()

    def await_event(self, event: threading.Event, look: Callable[[], object]) -> None:
        """Returns once the event is set. Unlike Thread.join, it survives an interrupt."""
        while not event.is_set():
            with self.slice() as seconds:
                event.wait(seconds)
            look()

    def look_for(self, seconds: float, look: Callable[[], object]) -> None:
        """Calls `look` repeatedly for a number of seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            look()
            with self.slice() as rest:
                time.sleep(rest)

    @contextlib.contextmanager
    def slice(self) -> Iterator[float]:
        """The seconds that a wait may take; raises TimeoutError if no time is left."""
        begin = time.monotonic()
        if begin >= self._end:
            raise TimeoutError("the timeout is over")
        yield min(_SLICE, self._end - begin)
        self._end += max(0, time.monotonic() - begin - _LONGEST_SLICE)

    @contextlib.contextmanager
    def guarding(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Converts errors of transports to pycomm.Timeout.

        Args:
            what: describes the event that did not happen, or returns the description.
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
                f"rendezvous: {event} did not happen within {self.seconds} s ({error})",
                operation="rendezvous",
            ) from error
