"""How much of the exchange backward hides: ``python -m pycomm.bench overlap``.

If each rank has one core, an exchange through memory takes core time from backward, so nothing can
be hidden. The benchmark therefore emulates a link, which takes as long as backward and uses no
core. Exposed is the time by which a step is longer than its computation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

import pycomm
from pycomm.bench import measure, report
from pycomm.bench.contestants import Prepared
from pycomm.bench.training import TrainingSettings, begin, count_parameters, count_wrong, make
from pycomm.hooks import CommState

# A bucket: the gradients, their parameters, and the offset of each gradient.
Bucket = tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int] | None]
ALONE = {"ddp": "idle", "wrapper": "plain"}  # the trainee with the same computation and no exchange


class Link:
    """Delays the ends of a state's exchanges to when a link of a given rate could end them.

    Attributes:
        seconds_per_byte: the inverse rate; at first 0, so there is no delay.
        buckets: the buckets of the last step, as arguments of the state's ``start``.
    """

    def __init__(self, state: CommState) -> None:
        self.seconds_per_byte = 0.0
        self.buckets: list[Bucket] = []
        self._state, self._step, self._free = state, state.step, 0.0
        self._start, self._finish = state.start, state.finish
        state.start, state.finish = self._send, self._arrive  # type: ignore[method-assign]

    def exchange(self) -> None:
        """Runs the exchanges of a step, without the step."""
        for buffer, parameters, begins in tuple(self.buckets):
            self._state.start(buffer, parameters, begins=begins)
        self._state.finish()

    def wire_bytes(self, bucket: Bucket) -> int:
        """Bytes that a rank reads from other ranks for a bucket, uncompressed."""
        ranks = self._state.group.size
        return 2 * (ranks - 1) * bucket[0].nbytes // ranks

    def _send(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        backward: int = -1,
        *,
        begins: Sequence[int] | None = None,
    ) -> Future[Any]:
        bucket = buffer, parameters, begins
        future = self._start(buffer, parameters, backward, begins=begins)
        if self._state.step != self._step:
            self._step, self.buckets = self._state.step, []
        self.buckets.append(bucket)
        taken = self.wire_bytes(bucket) * self.seconds_per_byte
        self._free = max(time.perf_counter(), self._free) + taken
        return future

    def _arrive(self, backward: int = -1) -> None:
        """Waits until the link would have carried the bytes."""
        time.sleep(max(self._free - time.perf_counter(), 0.0))
        self._finish(backward)


@dataclass(frozen=True)
class OverlapRow:
    """The result of one mode; the keys of the JSON file.

    Attributes:
        bytes: bytes of gradients per step.
        compute_us: a step without any exchange.
        backward_us: its backward.
        communication_us: the exchanges of the step alone, through the same link.
        step_us: a step with it.
        exposed_us: what the step takes longer than its computation.
        exposed_percent: of the communication.
        call_mean_us: that handing over a bucket keeps backward: under DDP, the whole hook.
        call_p50_us: the median of that.
        wrong: gradients, over all ranks.
    """

    mode: str
    ranks: int
    parameters: int
    bytes: int
    buckets: int
    iterations: int
    compute_us: float
    backward_us: float
    communication_us: float
    step_us: float
    exposed_us: float
    exposed_percent: float
    call_mean_us: float
    call_p50_us: float
    wrong: int


HEADER = """\
#    mode  parameters  buckets    compute   backward  communication       step  exposed         hand-over  #wrong
#                                    (ms)       (ms)           (ms)       (ms)      (%)  mean (us)   p50"""  # noqa: E501


def format_row(row: OverlapRow) -> str:
    """Formats a line of the table."""
    return (
        f"{row.mode:>9} {row.parameters:11} {row.buckets:8} {row.compute_us / 1e3:10.1f} "
        f"{row.backward_us / 1e3:10.1f} {row.communication_us / 1e3:14.1f} "
        f"{row.step_us / 1e3:10.1f} {row.exposed_percent:8.1f} "
        f"{row.call_mean_us:10.1f} {row.call_p50_us:5.1f} {row.wrong:>7}"
    )


def run(settings: TrainingSettings) -> None:
    """Measures every mode in the settings; rank 0 prints and writes."""
    with pycomm.init(timeout=settings.timeout) as group:
        meta = begin(settings, group, HEADER)
        rows = []
        for mode in settings.modes:
            rows.append(_measure(mode, settings, group))
            if group.rank == 0:
                print(format_row(rows[-1]), flush=True)
    if settings.json is not None and group.rank == 0:
        report.write_json(settings.json, meta, map(asdict, rows))


def _measure(mode: str, settings: TrainingSettings, group: pycomm.Group) -> OverlapRow:
    alone, trainee = (make(name, settings, group) for name in (ALONE[mode], mode))
    assert trainee.state is not None
    wrong = count_wrong(trainee, alone)
    link = Link(trainee.state)
    trainee.step()  # tells the link of the buckets
    link.seconds_per_byte = _slowest(alone.backwards[1:]) / trainee.state.stats()["bytes_wire"]
    trainee.calls.clear()

    def exchange_alone() -> None:
        counted = len(trainee.calls)
        link.exchange()
        del trainee.calls[counted:]  # those of backward count

    exchange = Prepared(alone.rows, alone.rows, exchange_alone)
    runs = [alone.prepared(), exchange, trainee.prepared()]
    compute, communication, step = measure.interleave(group, runs, settings.iters)
    exposed_us = step.time_us - compute.time_us
    return OverlapRow(
        mode=mode,
        ranks=group.size,
        parameters=count_parameters(trainee),
        bytes=int(trainee.state.stats()["bytes_in"]),
        buckets=len(link.buckets),
        iterations=step.iterations,
        compute_us=round(compute.time_us, 1),
        backward_us=round(1e6 * _slowest(alone.backwards), 1),
        communication_us=round(communication.time_us, 1),
        step_us=round(step.time_us, 1),
        exposed_us=round(exposed_us, 1),
        exposed_percent=round(100 * exposed_us / communication.time_us, 1),
        call_mean_us=round(1e6 * statistics.fmean(trainee.calls), 1),
        call_p50_us=round(1e6 * statistics.median(trainee.calls), 1),
        wrong=wrong,
    )


def _slowest(seconds: list[float]) -> float:
    """The slowest rank's median, which is the same on every rank."""
    median = torch.tensor(statistics.median(seconds))
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)
