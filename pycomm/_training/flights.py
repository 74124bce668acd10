"""Exchanges under way, by the backward that began them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.futures import Future

from pycomm._runtime.torch_private import queue_callback
from pycomm._training.exchange import BucketExchange
from pycomm.collectives import Work


@dataclass
class Flight:
    """One bucket's exchange in one step."""

    exchange: BucketExchange
    work: Work
    future: Future[torch.Tensor]
    buffer: torch.Tensor

    def land(self) -> None:
        """Waits for it; raises what went wrong."""
        self.work.wait()
        if self.future.done():
            self.future.wait()  # on CUDA only the current stream does
        else:
            self.future.set_result(self.buffer)

    def wire_bytes(self) -> int:
        """What this rank has moved, or on CUDA, where nobody counts, the most it may have."""
        return self.work.moved() or self.exchange.wire_bytes


class Flights:
    """All that have not been waited for.

    A backward that raises drops the callbacks of its end without calling them. That is how one is
    told from a backward that still runs around another one, as with reentrant checkpoints.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[Flight]] = {}
        self._ends: dict[int, weakref.ref[functools.partial[None]]] = {}

    def add(self, backward: int, flight: Flight) -> None:
        """Notes one."""
        self._of.setdefault(backward, []).append(flight)

    def wait_in_end(self, backward: int, finish: Callable[[int], None]) -> None:
        """Has the running backward, which has this number, call `finish` with it."""
        if backward not in self._ends:
            end = functools.partial(finish, backward)
            self._ends[backward] = weakref.ref(end)
            queue_callback(end)

    def take(self, backward: int) -> list[Flight]:
        """Those of a backward, to be waited for."""
        self._ends.pop(backward, None)
        return self._of.pop(backward, [])

    def take_dropped(self) -> list[Flight]:
        """Those of backwards that have raised."""
        raised = [backward for backward, end in self._ends.items() if end() is None]
        return [flight for backward in raised for flight in self.take(backward)] if raised else []

    def clear(self) -> None:
        """Forgets all."""
        self._of.clear()
        self._ends.clear()
