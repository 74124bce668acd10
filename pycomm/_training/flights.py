"""Running exchanges, by the backward that started them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.futures import Future

from pycomm._runtime.torch_private import queue_callback
from pycomm._training.exchange import BucketExchange
from pycomm._work import Work


@dataclass
class Flight:
    """One bucket's exchange in one step."""

    exchange: BucketExchange
    work: Work
    future: Future[torch.Tensor]
    buffer: torch.Tensor
    given_back: bool = False

    def give_back(self) -> None:
        """Adds the means to residuals, once, as they will not be used."""
        if not self.given_back:
            self.given_back = True
            self.exchange.give_back()

    def land(self) -> None:
        """Waits for the exchange, and raises its error if it failed."""
        self.work.wait()
        if self.future.done():
            self.future.wait()  # on CUDA only the current stream waits
        else:
            self.future.set_result(self.buffer)

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
