"""Training steps: ``python -m pycomm.bench step`` and ``python -m pycomm.bench overlap``.

``step`` times steps with every exchange. The time of an exchange is its step's time minus that of
DDP with a hook that does nothing.

``overlap`` measures how much of the exchange backward hides. If each rank has one core, an exchange
through memory takes core time from backward, so nothing can be hidden. The benchmark therefore
emulates a link, which takes as long as backward and uses no core. CUDA tensors are exchanged on a
stream of their own, without such a link. The exposed time is the time by which a step is longer
than its computation. A timeline of one step shows when it computed and when it exchanged.
"""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm._runtime.torch_private import GradBucket
from pycomm.bench import launch, measure, timeline, verify
from pycomm.bench.report import Column, RankSettings, Results, TimedRow, cell, spread

WIDTH = 1024
MODES = ("ddp", "wrapper")
PEERS = {"cpu": "gloo", "cuda": "nccl"}  # of DDP without a hook
OTHERWISE = "pycomm"  # the backend of DDP without a hook, where there is no NCCL
IN_PLOTS = {
    "ddp": "DDP, pycomm's hook",
    "wrapper": "pycomm's wrapper",
    "gloo": "DDP on Gloo",
    "nccl": "DDP on NCCL",
    "pycomm": "DDP on pycomm's backend",
}
SETTLING = 3  # steps, after which DDP and the wrapper have their final buckets
Returned = TypeVar("Returned")
# A bucket: the gradients, their parameters, and the offset of each gradient.
Bucket = tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int] | None]
ALONE = {"ddp": "idle", "wrapper": "plain"}  # the trainee with the same computation and no exchange


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(RankSettings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench overlap -h``.

    Attributes:
        parameters: approximate parameters of the model.
        batch: rows of each rank.
        modes: some of `MODES`.
        device: where the model is.
        bucket_cap_mb: as in DistributedDataParallel, whose default is not one number.
    """

    parameters: int
    batch: int
    modes: tuple[str, ...] = ()
    device: str = "cpu"
    bucket_cap_mb: float | None = None


@dataclass
class Trainee:
    """A model in training, with one way to average its gradients.

    Attributes:
        model: the wrapped module, or the module itself.
        rows: this rank's input.
        state: the state of pycomm's exchange, if there is one.
        optimizer: None keeps the parameters, so that all steps of all trainees are the same.
        calls: for each of pycomm's buckets, the seconds for which it held up backward.
    """

    model: nn.Module
    rows: torch.Tensor
    state: hooks.CommState | None = None
    optimizer: torch.optim.Optimizer | None = None
    calls: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Takes a step of training."""
        self.model.zero_grad()
        self.backward(self.model(self.rows).float().square().mean())
        if self.optimizer is not None:
            self.optimizer.step()

    def backward(self, loss: torch.Tensor) -> None:
        """Computes gradients, and averages them."""
        loss.backward()  # type: ignore[no-untyped-call]

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def make(
    name: str, settings: TrainingSettings, group: pycomm.Group, dtype: torch.dtype = torch.float32
) -> Trainee:
    """Makes a trainee with its final buckets: the same model on all ranks, on different rows.

    Args:
        name: ``"plain"`` has no other ranks; ``"idle"`` is DDP with a hook that does nothing, and
            one of `PEERS`, or `OTHERWISE`, without a hook; ``"ddp"`` and ``"wrapper"`` are
            pycomm's.
        settings: the settings of the run.
        group: the ranks that train.
        dtype: the dtype of parameters and rows.
    """
    module, rows = make_module_and_rows(settings, group.rank, dtype)
    trainee = Trainee(module, rows)
    if name == "wrapper":
        wrapped = pycomm.DataParallel(module, group=group)
        state = wrapped.comm_state
        assert isinstance(state, hooks.CommState)
        trainee.model, trainee.state = wrapped, state
        state.start = timed(state.start, trainee.calls)  # type: ignore[method-assign]
    elif name != "plain":
        trainee.model = ddp = DistributedDataParallel(
            module,
            gradient_as_bucket_view=True,
            bucket_cap_mb=settings.bucket_cap_mb,
            process_group=dist.new_group(backend=name) if name == OTHERWISE else None,
        )
        if name == "ddp":
            trainee.state = hooks.AllReduceState(group=group)
            ddp.register_comm_hook(trainee.state, timed(hooks.all_reduce_hook, trainee.calls))
        elif name == "idle":
            ddp.register_comm_hook(None, exchange_nothing)
    for _ in range(SETTLING):
        trainee.step()
    return trainee


def timed(function: Callable[..., Returned], seconds: list[float]) -> Callable[..., Returned]:
    """Wraps a function so that it records its time."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Returned:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def make_module_and_rows(
    settings: TrainingSettings, rank: int, dtype: torch.dtype
) -> tuple[nn.Sequential, torch.Tensor]:
    """The same model on all ranks, and different rows on each rank."""
    torch.manual_seed(0)
    layers = max(round(settings.parameters / (WIDTH * (WIDTH + 3))), 1)
    module = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(layers)
        )
    )
    generator = torch.Generator().manual_seed(1 + rank)
    rows = torch.randn(settings.batch, WIDTH, generator=generator)
    return module.to(settings.device, dtype), rows.to(settings.device, dtype)


def exchange_nothing(state: object, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: ARG001
    """A hook of DistributedDataParallel that leaves gradients as they are."""
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def begin(
    settings: TrainingSettings,
    group: pycomm.Group,
    rows: type[TimedRow],
    *notes: str,
    **facts: Any,
) -> Results[Any]:
    """Prints the lines above the table."""
    results: Results[Any] = Results(settings, ranks=group.size, batch=settings.batch, **facts)
    results.begin(
        f"training, {group.size} ranks on {results.place}", rows.header(settings.wide), *notes
    )
    return results


@dataclass(frozen=True)
class StepRow(TimedRow):
    """The result of one way to exchange; the times are of a whole step.

    Attributes:
        name: ``"ddp"`` is DDP with pycomm's hook, ``"wrapper"`` pycomm's own; one of `PEERS` and
            `OTHERWISE` are DDP alone on this backend.
        idle_us: a step of DDP with a hook that does nothing.
        exchange_us: by how much a step takes longer.
        speedup: the time of DDP's exchange without a hook over the time of this one.
        wrong: the number of wrong gradients, over all ranks.
    """

    name: str
    ranks: int
    parameters: int
    idle_us: float
    exchange_us: float
    speedup: float | None
    wrong: int

    columns: ClassVar[tuple[Column, ...]] = (
        Column("name", "", 8, cell("name")),
        Column("parameters", "", 11, cell("parameters")),
        Column("step", "(ms)", 10, cell("time_us", ".2f", 1e3)),
        Column("without", "(ms)", 8, cell("idle_us", ".2f", 1e3)),
        Column("exchange", "(ms)", 10, cell("exchange_us", ".2f", 1e3)),
        Column("peer's", "/ this", 8, cell("speedup", ".2f")),
        Column("#wrong", "", 6, cell("wrong")),
        *spread("ms", narrow=("p99",)),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return IN_PLOTS[self.name], self.parameters, "parameters"


def run_steps(settings: TrainingSettings) -> Results[StepRow]:
    """Measures steps with all exchanges in the same rounds; rank 0 prints and writes."""
    with pycomm.init(timeout=settings.timeout) as group:
        peer, absent = find_peer(settings, group)
        notes = (f"no {name}: {reason}" for name, reason in absent.items())
        results: Results[StepRow] = begin(settings, group, StepRow, *notes, absent_peers=absent)
        names = (*settings.modes, *peer)
        idle, *trainees = (make(name, settings, group) for name in ("idle", *names))
        wrong = [verify.count_wrong_gradients(each.model, idle.model) for each in trainees]
        calls = {"idle": idle.step} | dict(
            zip(names, (each.step for each in trainees), strict=True)
        )
        figures = measure.compete(group, calls, settings, settings.device)
        idle_us = figures["idle"].time_us
        peer_us = [figures[name].time_us - idle_us for name in peer]
        results.add(
            StepRow(
                name=name,
                ranks=group.size,
                parameters=idle.parameters,
                idle_us=round(idle_us, 1),
                exchange_us=round(figures[name].time_us - idle_us, 1),
                speedup=round(peer_us[0] / (figures[name].time_us - idle_us), 2) if peer else None,
                wrong=errors,
                **figures[name].columns(),
            )
            for name, errors in zip(names, wrong, strict=True)
        )
        results.end()
    return results


def find_peer(
    settings: TrainingSettings, group: pycomm.Group
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backend of DDP without a hook; the name of one that cannot exchange here, and why not."""
    absent = absent_peers(settings.device, group.size)
    return (OTHERWISE,) if absent else (PEERS[settings.device],), absent


def absent_peers(device: str, ranks: int) -> dict[str, str]:
    """Why the backend of `PEERS` cannot exchange here, by its name; empty if it can."""
    reason = launch.without_nccl(ranks) if device == "cuda" else None
    return {} if reason is None else {PEERS[device]: reason}


class EmulatedLink:
    """Delays the ends of a state's exchanges to when a link of a given rate could end them.

    Attributes:
        seconds_per_byte: the inverse rate; at first 0, so there is no delay.
        buckets: the buckets of the last step, as arguments of the state's ``start``.
    """

    def __init__(self, state: hooks.CommState) -> None:
        self.seconds_per_byte = 0.0
        self.buckets: list[Bucket] = []
        self._state, self._step, self._free = state, state.step, 0.0
        self._busy: list[tuple[float, float]] = []
        self._start, self._finish = state.start, state.finish
        state.start, state.finish = self._send, self._arrive  # type: ignore[method-assign]

    def exchange(self) -> None:
        """Runs the exchanges of a step, without the step."""
        for buffer, parameters, begins in tuple(self.buckets):
            self._state.start(buffer, parameters, begins=begins)
        self._state.finish()

    def intervals(self) -> list[tuple[float, float]]:
        """When the link carried each bucket of the last step, which began to run no later."""
        ran = self._state.intervals()
        return [
            (begin, max(end, done))
            for (begin, end), (_, _, done) in zip(self._busy, ran, strict=True)
        ]

    def wire_bytes(self, bucket: Bucket) -> int:
        """Bytes that a rank reads from other ranks for a bucket, uncompressed."""
        ranks = self._state.group.size
        return 2 * (ranks - 1) * bucket[0].nbytes // ranks

    def _send(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        *backward: int,
        **options: Any,
    ) -> Future[Any]:
        bucket = buffer, parameters, options.get("begins")
        future = self._start(buffer, parameters, *backward, **options)
        if self._state.step != self._step:
            self._step, self.buckets, self._busy = self._state.step, [], []
        self.buckets.append(bucket)
        taken = self.wire_bytes(bucket) * self.seconds_per_byte
        begin = max(time.perf_counter(), self._free)
        self._free = begin + taken
        self._busy.append((begin, self._free))
        return future

    def _arrive(self, backward: int = -1) -> None:
        """Waits until the link would have carried the bytes."""
        time.sleep(max(self._free - time.perf_counter(), 0.0))
        self._finish(backward)


@dataclass(frozen=True)
class OverlapRow(TimedRow):
    """The result of one mode; the times are of a step with its exchange.

    Attributes:
        bytes: bytes of gradients per step.
        compute_us: a step without any exchange.
        backward_us: its backward.
        communication_us: the exchanges of the step alone, through the same link.
        exposed_us: the time by which the step is longer than its computation.
        exposed_percent: `exposed_us` as a share of the communication.
        call_mean_us: the mean time for which handing over a bucket holds up backward: under DDP,
            the time of the hook.
        call_p50_us: the median of these times.
        wrong: the number of wrong gradients, over all ranks.
        timeline: a step, as a dict; see :class:`pycomm.bench.timeline.Timeline`.
    """

    mode: str
    ranks: int
    parameters: int
    bytes: int
    buckets: int
    compute_us: float
    backward_us: float
    communication_us: float
    exposed_us: float
    exposed_percent: float
    call_mean_us: float
    call_p50_us: float
    wrong: int
    timeline: dict[str, Any]

    columns: ClassVar[tuple[Column, ...]] = (
        Column("mode", "", 9, cell("mode")),
        Column("parameters", "", 11, cell("parameters"), wide=True),
        Column("buckets", "", 7, cell("buckets")),
        Column("compute", "(ms)", 9, cell("compute_us", ".1f", 1e3)),
        Column("backward", "(ms)", 9, cell("backward_us", ".1f", 1e3)),
        Column("communication", "(ms)", 13, cell("communication_us", ".1f", 1e3)),
        Column("step", "(ms)", 9, cell("time_us", ".1f", 1e3)),
        Column("exposed", "(%)", 7, cell("exposed_percent", ".1f")),
        Column("hand-over", "mean (us)", 9, cell("call_mean_us", ".1f"), wide=True),
        Column("hand-over", "p50 (us)", 9, cell("call_p50_us", ".1f"), wide=True),
        Column("#wrong", "", 6, cell("wrong")),
        *spread("ms"),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return IN_PLOTS[self.mode], self.parameters, "parameters"


def run_overlap(settings: TrainingSettings) -> Results[OverlapRow]:
    """Measures every mode in the settings; rank 0 prints and writes."""
    with pycomm.init(timeout=settings.timeout) as group:
        results: Results[OverlapRow] = begin(settings, group, OverlapRow)
        for mode in settings.modes:
            results.add([_measure_overlap(mode, settings, group)])
        results.end()
    return results


def _measure_overlap(mode: str, settings: TrainingSettings, group: pycomm.Group) -> OverlapRow:
    alone, trainee = (make(name, settings, group) for name in (ALONE[mode], mode))
    assert trainee.state is not None
    wrong = verify.count_wrong_gradients(trainee.model, alone.model)
    backwards = _note_backwards(alone, settings.device)
    for _ in range(SETTLING):
        alone.step()
    link = EmulatedLink(trainee.state)
    trainee.step()  # tells the link of the buckets
    if settings.device == "cpu":
        bytes_wire = trainee.state.stats()["bytes_wire"]
        link.seconds_per_byte = _slowest(backwards) / bytes_wire
    trainee.calls.clear()

    def exchange_alone() -> None:
        counted = len(trainee.calls)
        link.exchange()
        del trainee.calls[counted:]  # only the calls in backward count

    calls = {"compute": alone.step, "communication": exchange_alone, "step": trainee.step}
    compute, communication, step = measure.compete(group, calls, settings, settings.device).values()
    exposed_us = step.time_us - compute.time_us
    return OverlapRow(
        mode=mode,
        ranks=group.size,
        parameters=trainee.parameters,
        bytes=int(trainee.state.stats()["bytes_in"]),
        buckets=len(link.buckets),
        compute_us=round(compute.time_us, 1),
        backward_us=round(1e6 * _slowest(backwards), 1),
        communication_us=round(communication.time_us, 1),
        exposed_us=round(exposed_us, 1),
        exposed_percent=round(100 * exposed_us / communication.time_us, 1),
        call_mean_us=round(1e6 * statistics.fmean(trainee.calls), 1),
        call_p50_us=round(1e6 * statistics.median(trainee.calls), 1),
        wrong=wrong,
        timeline=asdict(timeline.record(trainee, link.intervals, settings.device)),
        **step.columns(),
    )


def _note_backwards(trainee: Trainee, device: str) -> list[tuple[Any, Any]]:
    """Notes when each backward begins and ends from now on."""
    moments: list[tuple[Any, Any]] = []
    backward = trainee.backward

    def noted(loss: torch.Tensor) -> None:
        begin = timeline.now(device)
        backward(loss)
        moments.append((begin, timeline.now(device)))

    trainee.backward = noted  # type: ignore[method-assign]
    return moments


def _slowest(moments: list[tuple[Any, Any]]) -> float:
    """The slowest rank's median time, which is the same on every rank."""
    median = torch.tensor(statistics.median(timeline.seconds(*each) for each in moments))
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)
