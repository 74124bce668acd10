"""A training step as a state has seen it, with the time for which backward has waited."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._training.flights import Flight


@dataclass
class Step:
    """One step.

    Attributes:
        scale: the loss scale, if gradients are scaled.
        parameters: ids of the parameters that have been exchanged in it.
        flights: their exchanges.
        bytes_in: bytes of gradients that shards average.
        bytes_wire: bytes that this rank reads or receives for that, and for new parameters.
        undecided: True if it is not known that all ranks may take the step.
        waited: seconds for which backward has only waited for them, on the CPU.
    """

    scale: torch.Tensor | None = None
    parameters: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    bytes_in: int = 0
    bytes_wire: int = 0
    undecided: bool = False
    waited: float = 0.0
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def wait(self) -> None:
        """Waits until no exchange uses memory any more, whether it has succeeded or not."""
        for flight in self.flights:
            with contextlib.suppress(PycommError):
                flight.work.wait()

    def give_back(self) -> None:
        """Adds the means, which will not be used, to residuals, so that nothing is lost."""
        for flight in self.flights:
            flight.give_back()

    def give_back_if_failed(self) -> None:
        """After a failure of the group: does so with the means of completed exchanges.

        On CUDA nothing is given back: it is not known which exchanges have completed.
        """
        landed, failed = [], self.undecided
        for flight in self.flights:
            try:
                flight.work.wait()
            except PycommError:
                failed = True
            else:
                landed.append(flight)
        for flight in landed if failed else ():
            if flight.buffer.is_cpu:
                flight.give_back()

    def time_stream(self, stream: torch.cuda.Stream) -> None:
        """Records the ends of backward and of the exchanges on their streams."""
        begin: torch.cuda.Event
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(stream.device))
        end.record(stream)
        self._waits.append((begin, end))

    def exposed(self) -> float:
        """Seconds for which backward has waited, on the CPU and on CUDA."""
        exposed = self.waited
        for begin, end in self._waits:
            end.synchronize()
            exposed += max(begin.elapsed_time(end), 0.0) / 1e3
        return exposed
