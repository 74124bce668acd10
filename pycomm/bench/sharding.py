"""Exchange and optimizer step together, sharded or not: ``python -m pycomm.bench step --shard``.

Forward and backward are not in the times. pycomm's contestants are timed without them: backward has
left gradients in the window, and a call averages them and steps. Repeated calls find the same
gradients, or their average if the wrapper does not shard, so every call moves the same bytes. If
gradients are divided, their memory in the window is reused, so the copy into it counts, too.

Peers cannot exchange without a backward. They take whole steps, and the time of a step without
exchange and optimizer is subtracted. For DDP and ZeroRedundancyOptimizer, it is a step of DDP with
a hook that does nothing, so DDP's copies of gradients into buckets do not count. For FSDP2 and
DeepSpeed, whose copies into and out of buffers are a part of their exchange, it is a step of the
bare model. If an exchange hides behind backward, only its exposed part counts, which favours peers.

All of them run interleaved with streams that read and write as much as a sharded step must. The
fastest stream is the floor. Steps with clipping are a task of their own, with a floor of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

import pycomm
from pycomm._training.sharding import ShardGradients
from pycomm.bench import peers, training, verify
from pycomm.bench.optimizers import SCHEMES, Scheme
from pycomm.bench.report import Column, Results, TimedRow, cell, spread
from pycomm.bench.streams import Mix, Outcome, Task
from pycomm.bench.training import SETTLING, Trainee, TrainingSettings

LR = 1e-4
MAX_NORM = 1.0
HEAP_BYTES = 64  # of a group's CUDA heap, per parameter, for all modes
MODES = {"unsharded": None, "optimizer": "optimizer", "gradients": "gradients"}
BOUNDS = {"": None, " clipped": MAX_NORM}


@dataclass(frozen=True, kw_only=True)
class ShardSettings(TrainingSettings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench step -h``.

    Attributes:
        sizes: each a number of parameters.
        schemes: names of `pycomm.bench.optimizers.SCHEMES`.
        peers: names of `pycomm.bench.peers.TRAINEES`.
    """

    sizes: tuple[int, ...] = ()
    schemes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardRow(TimedRow):
    """The result of one way to exchange and step, whose times hold nothing else.

    Attributes:
        name: a mode of the wrapper, ``clipped`` with `max_norm`; or a peer.
        ratio: the time of the unsharded wrapper, which clips if this one clips, over this time.
        floor_percent: the floor's time over this time.
        wrong: the number of parameters, over all ranks, that differ from the unsharded wrapper's
            after some steps: in any bit, or for peers by a tenth of a step. None for peers that
            keep fewer bits.
    """

    scheme: str
    name: str
    ranks: int
    parameters: int
    ratio: float
    floor_us: float
    floor_percent: float
    wrong: int | None

    columns: ClassVar[tuple[Column, ...]] = (
        Column("scheme", "", 20, cell("scheme")),
        Column("name", "", 17, cell("name")),
        Column("params", "", 9, cell("parameters")),
        Column("time", "(ms)", 8, cell("time_us", ".2f", 1e3)),
        Column("whole's", "/ this", 7, cell("ratio", ".2f")),
        Column("floor", "(%)", 6, cell("floor_percent", ".1f")),
        Column("#wrong", "", 6, cell("wrong", absent="-")),
        *spread("ms"),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return f"{self.scheme} {self.name}", self.parameters, "parameters"


def run(settings: ShardSettings) -> Results[ShardRow]:
    """Measures all schemes and sizes; rank 0 prints and writes."""
    heap = HEAP_BYTES * max(settings.sizes) if settings.device == "cuda" else 0
    with pycomm.init(timeout=settings.timeout, cuda_heap_bytes=heap) as group:
        load = partial(peers.load_trainee, device=settings.device)
        _, absent = peers.find(settings.peers, load)
        present = tuple(peer for peer in settings.peers if peer not in absent)
        notes = (f"no {peer}: {reason}" for peer, reason in absent.items())
        results: Results[ShardRow] = training.begin(
            settings, group, ShardRow, *notes, absent_peers=absent
        )
        for scheme in settings.schemes:
            for size in settings.sizes:
                case = replace(settings, parameters=size, peers=present)
                results.add(_run_case(scheme, case, group))
        results.end()
    return results


def _run_case(name: str, settings: ShardSettings, group: pycomm.Group) -> list[ShardRow]:
    """Checks, then times all contestants of a scheme and a size."""
    gc.collect()  # the models of the previous case, which are in cycles
    scheme = SCHEMES[name]
    own = {
        mode: WrappedTrainee(settings, scheme, group, shard=shard) for mode, shard in MODES.items()
    }
    others = {
        peer: peers.make_trainee(peer, settings, scheme.dtype, LR, group) for peer in settings.peers
    }
    idle = {
        alone: training.make(alone, settings, group, scheme.dtype)
        for alone in dict.fromkeys(map(peers.idle_of, settings.peers))
    }
    wrong, parameters = _count_wrong(own, others, scheme), own["unsharded"].parameters
    rows: dict[str, ShardRow] = {}
    for suffix, bound in BOUNDS.items():
        calls = {mode + suffix: trainee.clip(bound).finish for mode, trainee in own.items()}
        if bound is None:
            calls |= {peer: trainee.step for peer, trainee in (others | idle).items()}
        mix = make_mix(scheme, parameters, group.size, clips=bound is not None)
        outcome = Task(name, mix, calls).compete(settings, settings.device, group)
        for contestant in wrong.keys() & calls.keys():
            rows[contestant] = ShardRow(
                scheme=name,
                name=contestant,
                ranks=group.size,
                parameters=parameters,
                wrong=wrong[contestant],
                **_figures(contestant, outcome, "unsharded" + suffix),
            )
    return [rows[contestant] for contestant in wrong]


def _figures(contestant: str, outcome: Outcome, base: str) -> dict[str, Any]:
    """The times of a row; for a peer, the times of its whole step minus those of an idle step."""
    idle_us = 0.0
    if contestant in peers.TRAINEES:
        idle_us = outcome.figures[peers.idle_of(contestant)].time_us
    columns = outcome.figures[contestant].columns(without_us=idle_us)
    return columns | {
        "ratio": round(outcome.figures[base].time_us / columns["time_us"], 3),
        "floor_us": round(outcome.stream_us, 1),
        "floor_percent": round(100 * outcome.stream_us / columns["time_us"], 1),
    }


def _count_wrong(
    own: dict[str, WrappedTrainee], others: dict[str, Trainee], scheme: Scheme
) -> dict[str, int | None]:
    """Takes some steps, and compares the parameters with the unsharded wrapper's."""
    wrong: dict[str, int | None] = {}
    theirs: dict[str, int | None] = dict.fromkeys(others)
    base = own["unsharded"].model
    for suffix, bound in BOUNDS.items():
        for trainee in own.values():
            trainee.clip(bound)
            for _ in range(SETTLING):
                trainee.step()
        for mode, trainee in own.items():
            wrong[mode + suffix] = verify.count_different(trainee.model, base)
        if bound is None and scheme.dtype == torch.float32 and not scheme.options:
            for peer, other in others.items():
                theirs[peer] = verify.count_far(other.model, base, LR / 10)
    return wrong | theirs


class WrappedTrainee(Trainee):
    """The wrapper with FusedAdamW; its exchange and step also run without a backward."""

    def __init__(
        self, settings: TrainingSettings, scheme: Scheme, group: pycomm.Group, **options: Any
    ) -> None:
        module, rows = training.make_module_and_rows(settings, group.rank, scheme.dtype)
        self._wrapped = pycomm.DataParallel(module, group=group, **options)
        if options.get("shard") is None:
            pycomm.optim.flatten(self._wrapped.parameters())
        self._fused = pycomm.optim.FusedAdamW(self._wrapped.parameters(), lr=LR, **scheme.options)
        self._ready: list[torch.Tensor | None] = []
        super().__init__(self._wrapped, rows, optimizer=self._fused)

    def clip(self, max_norm: float | None) -> WrappedTrainee:
        """Sets the bound of the gradients' norm."""
        self._fused.max_norm = max_norm
        return self

    def finish(self) -> None:
        """Averages the present gradients, which may be averages already, and steps."""
        exchange = self._wrapped._exchange
        strategy, parameters, buckets = exchange.strategy, exchange.parameters, exchange._buckets
        if isinstance(strategy, ShardGradients):
            self._wrapped.zero_grad()
            ready = self._ready or self._run_backward(parameters)
        strategy.begin(parameters, False)
        if isinstance(strategy, ShardGradients):
            for parameter, gradient in zip(parameters, ready, strict=True):
                parameter.grad = gradient
        for number, bucket in enumerate(buckets):
            strategy.send(bucket, number, None)
        strategy.finish(buckets)
        strategy.keep(parameters, set(), exchange._bucket_of)
        self._fused.step()

    def _run_backward(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Keeps the gradients of a backward of which each rank would keep its part."""
        with self._wrapped.no_sync():
            self._wrapped(self.rows).float().square().mean().backward()
        self._ready = [parameter.grad for parameter in parameters]
        self._wrapped.zero_grad()
        return self._ready


def make_mix(scheme: Scheme, count: int, ranks: int, clips: bool) -> Mix:
    """The bytes that a rank must read and write to average, update and publish `count` parameters.

    It reads the gradients of its elements from all ranks, twice to clip, and writes its elements'
    parameters to all ranks. It reads and writes its own states and master weights once.
    """
    item, own = scheme.dtype.itemsize, scheme.master_bytes + 2 * scheme.state_bytes
    weights = own if scheme.master_bytes == 4 else item + own
    read = (2 if clips else 1) * item + weights / ranks
    return Mix(int(read * count), int((item + own / ranks) * count))
