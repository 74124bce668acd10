"""What a state has seen of a training step, and how long backward has waited in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pycomm._training.flights import Flight


@dataclass
class Step:
    """One step.

    Attributes:
        scale: of its gradients, if they are scaled.
        parameters: ids of those that have been exchanged in it.
        flights: their exchanges.
        waited: seconds in which backward has done nothing but wait for them, on the CPU.
    """

    scale: torch.Tensor | None = None
    parameters: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    waited: float = 0.0
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def time_stream(self, stream: torch.cuda.Stream) -> None:
        """Notes where backward and exchanges end, on their streams."""
        begin: torch.cuda.Event
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(stream.device))
        end.record(stream)
        self._waits.append((begin, end))

    def exposed(self) -> float:
        """Seconds in which backward has waited, on the CPU and on CUDA."""
        exposed = self.waited
        for begin, end in self._waits:
            end.synchronize()
            exposed += max(begin.elapsed_time(end), 0.0) / 1e3
        return exposed
