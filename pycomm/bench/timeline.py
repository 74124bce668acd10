"""When a training step computes gradients, and when it exchanges them, on both devices.

Moments are readings of the clock on the CPU. On CUDA they are events on the streams, which nothing
waits for before the step has ended, so that the step is as fast as without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pycomm import hooks

STEPS = 5  # recorded, of which the one of median length is kept
Moment = Any  # of one device: seconds, or an event


class Steps(Protocol):
    """What takes steps: a :class:`pycomm.bench.training.Trainee`."""

    model: nn.Module
    state: hooks.CommState | None

    def step(self) -> None:
        """Takes a step of training."""

    def backward(self, loss: torch.Tensor) -> None:
        """Computes gradients, and averages them."""


@dataclass(frozen=True)
class BucketSpan:
    """A bucket in a step; times are milliseconds since the step began.

    Attributes:
        bytes: its size.
        ready_ms: when backward handed it over.
        begin_ms: when its exchange began, after that of the bucket before.
        end_ms: when the exchange ended.
    """

    bytes: int
    ready_ms: float
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A step of rank 0; times are milliseconds since it began.

    Attributes:
        backward_ms: when backward began, and when its last gradient was computed.
        gradients_ms: when each gradient was computed, in this order.
        buckets: the exchanges.
        end_ms: when the step ended.
    """

    backward_ms: tuple[float, float]
    gradients_ms: tuple[float, ...]
    buckets: tuple[BucketSpan, ...]
    end_ms: float


def now(device: str, stream: torch.cuda.Stream | None = None) -> Moment:
    """This moment on the CPU; on CUDA, the one at which a stream will have come so far."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream() if stream is None else stream)
    return event


def seconds(begin: Moment, end: Moment) -> float:
    """The time between two moments that have passed."""
    passed: float = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
    return passed


def record(
    trainee: Steps, intervals: Callable[[], list[tuple[float, float]]], device: str
) -> Timeline:
    """Takes some steps on all ranks, and keeps the one of median length.

    Args:
        trainee: takes the steps.
        intervals: on the CPU, when each exchange of the last step began and ended.
        device: where the model is.
    """
    steps = (_record_step(trainee, intervals, device) for _ in range(STEPS))
    found = sorted(steps, key=lambda one: one.end_ms)
    return found[STEPS // 2]


def _record_step(
    trainee: Steps, intervals: Callable[[], list[tuple[float, float]]], device: str
) -> Timeline:
    state = trainee.state
    assert state is not None
    start, backward = state.start, trainee.backward
    handed: list[tuple[int, Moment, Moment]] = []
    gradients: list[Moment] = []
    begun: list[Moment] = []

    def start_noted(buffer: torch.Tensor, *args: Any, **options: Any) -> Any:
        ready = now(device)
        future = start(buffer, *args, **options)
        own = state._stream
        handed.append((buffer.nbytes, ready, None if own is None else now(device, own.stream)))
        return future

    def backward_noted(loss: torch.Tensor) -> None:
        begun.append(now(device))
        backward(loss)

    watching = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: gradients.append(now(device))
        )
        for parameter in trainee.model.parameters()
    ]
    state.start, trainee.backward = start_noted, backward_noted  # type: ignore[method-assign]
    try:
        first = now(device)
        trainee.step()
        last = now(device)
    finally:
        state.start, trainee.backward = start, backward  # type: ignore[method-assign]
        for handle in watching:
            handle.remove()
    if device == "cuda":
        torch.cuda.synchronize()
        ran = [(ready, end) for _, ready, end in handed]
    else:
        ran = intervals()
    return _timeline(first, begun[0], gradients, [each[:2] for each in handed], ran, last)


def _timeline(
    first: Moment,
    begun: Moment,
    gradients: Sequence[Moment],
    handed: Sequence[tuple[int, Moment]],
    ran: Sequence[tuple[Moment, Moment]],
    last: Moment,
) -> Timeline:
    """The timeline of these moments, of which the exchanges follow each other."""

    def since(moment: Moment) -> float:
        return round(1e3 * seconds(first, moment), 4)

    buckets: list[BucketSpan] = []
    for (nbytes, ready), (begin, end) in zip(handed, ran, strict=True):
        free = buckets[-1].end_ms if buckets else 0.0
        began = max(since(begin), free)
        buckets.append(BucketSpan(nbytes, since(ready), began, max(since(end), began)))
    computed = tuple(map(since, gradients))
    return Timeline((since(begun), max(computed)), computed, tuple(buckets), since(last))
