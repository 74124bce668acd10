"""Running exchanges, by the backward that started them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from pycomm._runtime.torch_private import queue_callback
from pycomm._training.exchange import BucketExchange
from pycomm._work import Work


class BucketFuture(Future[Any]):
    """The future of a bucket, or of a function that runs after its exchange.

    The end of backward completes it. An earlier wait, as in another hook, completes it, too.
    ``torch.futures.wait_all`` waits in C++, where nothing completes it.
    """

    _flight: weakref.ref[Flight] | None = None

    def __init__(self, devices: list[int | str | torch.device] | None = None) -> None:
        super().__init__(devices=devices)
        self._devices = devices
        self.has_follower = False  # True if errors are another future's

    def follow(self, flight: Flight) -> None:
        """Makes waits for this future wait for the exchange."""
        self._flight = weakref.ref(flight)

    def is_set(self) -> bool:
        """True if there is a result."""
        return bool(super().done())

    def done(self) -> bool:
        """True if the exchange has ended; see :meth:`torch.futures.Future.done`."""
        flight = self._flight and self._flight()
        if flight and flight.work.is_completed() and not self.is_set():
            flight.land()
        return self.is_set()

    def wait(self) -> Any:
        """See :meth:`torch.futures.Future.wait`; raises the error of the exchange."""
        flight = self._flight and self._flight()
        if flight and not self.is_set():
            flight.land()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], Any]) -> BucketFuture:
        """See :meth:`torch.futures.Future.then`."""
        following, flight = BucketFuture(self._devices), self._flight and self._flight()
        self.has_follower = True
        if flight:
            following.follow(flight)

        def run(_: Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)
                if flight:
                    flight.failures.append((following, error))

        self.add_done_callback(run)
        return following


@dataclass
class Flight:
    """One bucket's exchange in one step."""

    exchange: BucketExchange
    work: Work
    future: BucketFuture
    buffer: torch.Tensor
    given_back: bool = False
    # Errors of functions that were to run after the exchange, by their futures.
    failures: list[tuple[BucketFuture, Exception]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.future.follow(self)

    def give_back(self) -> None:
        """Adds the means to residuals, once, as they will not be used."""
        if not self.given_back:
            self.given_back = True
            self.exchange.give_back()

    def land(self) -> None:
        """Waits for the exchange, and raises its error if it failed."""
        self.work.wait()
        if self.future.is_set():
            Future.wait(self.future)  # on CUDA only the current stream waits
        else:
            self.future.set_result(self.buffer)
        for future, error in self.failures:
            if not future.has_follower:
                raise error

    def wire_bytes(self) -> int:
        """Bytes that this rank has moved; on CUDA, an upper bound."""
        return self.work.moved() or self.exchange.wire_bytes


class Flights:
    """All exchanges that have not been waited for.

    A backward that raises drops its final callbacks without calling them. This distinguishes it
    from a backward that still runs around another one, as with reentrant checkpoints.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[Flight]] = {}
        self._ends: dict[int, weakref.ref[functools.partial[None]]] = {}

    def add(self, backward: int, flight: Flight) -> None:
        """Adds an exchange."""
        self._of.setdefault(backward, []).append(flight)

    def wait_in_end(self, backward: int, finish: Callable[[int], None]) -> None:
        """Makes the running backward, which has this number, call `finish` with it at its end."""
        if backward not in self._ends:
            end = functools.partial(finish, backward)
            self._ends[backward] = weakref.ref(end)
            queue_callback(end)

    def take(self, backward: int) -> list[Flight]:
        """Removes and returns the exchanges of a backward, to be waited for."""
        self._ends.pop(backward, None)
        return self._of.pop(backward, [])

    def take_dropped(self) -> list[Flight]:
        """Removes and returns the exchanges of backwards that have raised."""
        raised = [backward for backward, end in self._ends.items() if end() is None]
        return [flight for backward in raised for flight in self.take(backward)] if raised else []

    def clear(self) -> None:
        """Removes all exchanges."""
        self._of.clear()
        self._ends.clear()
