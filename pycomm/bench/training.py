"""The model in the benchmarks of training, and the ways to average its gradients."""

# DistributedDataParallel compares hooks' annotations as objects: they must not become strings.
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm._runtime.torch_private import GradBucket
from pycomm.bench import report
from pycomm.bench.contestants import Prepared

WIDTH = 1024
MODES = ("ddp", "wrapper")
SETTLING = 3  # steps, after which DDP and the wrapper have their final buckets
TOLERANCE = 1e-6  # of the largest gradient of a parameter
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class TrainingSettings:
    """A run, as asked for on the command line; see ``python -m pycomm.bench overlap -h``."""

    benchmark: str
    ranks: int
    parameters: int
    batch: int
    modes: tuple[str, ...]
    iters: int | None
    timeout: float
    json: str | None
    command: str
    bucket_cap_mb: float | None = (
        None  # of DistributedDataParallel, whose default is not one number
    )


def begin(settings: TrainingSettings, group: pycomm.Group, header: str) -> dict[str, Any]:
    """Prints the lines above the table on rank 0; returns the circumstances of the run."""
    meta = report.circumstances(settings.command)
    meta |= {"ranks": group.size, "batch": settings.batch}
    if group.rank == 0:
        print(f"# training, {group.size} ranks on {report.place(meta)}")
        print(f"# {report.versions(meta)}")
        print(f"# load {meta['load_before']:.2f}\n{header}", flush=True)
    return meta


@dataclass
class Trainee:
    """A model in training, with one way to average its gradients.

    Attributes:
        model: the wrapped module, or the module itself.
        rows: this rank's input.
        state: the state of pycomm's exchange, if there is one.
        backwards: seconds that every backward took.
        calls: seconds that backward was kept, by every bucket of pycomm's.
    """

    model: nn.Module
    rows: torch.Tensor
    state: hooks.CommState | None = None
    backwards: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Takes a step without an optimizer, so that all steps of all trainees are the same."""
        self.model.zero_grad()
        loss = self.model(self.rows).square().mean()
        timed(loss.backward, self.backwards)()

    def prepared(self) -> Prepared:
        """Prepares steps for timing."""
        return Prepared(self.rows, self.rows, self.step)


def make(name: str, settings: TrainingSettings, group: pycomm.Group) -> Trainee:
    """Makes a trainee with its final buckets: the same model on all ranks, on different rows.

    Args:
        name: ``"plain"`` has no other ranks; ``"idle"`` is DDP with a hook that does nothing,
            ``"gloo"`` without a hook; ``"ddp"`` and ``"wrapper"`` are pycomm's.
        settings: the settings of the run.
        group: the ranks that train.
    """
    torch.manual_seed(0)
    module = make_module(settings.parameters)
    rows = torch.randn(
        settings.batch, WIDTH, generator=torch.Generator().manual_seed(1 + group.rank)
    )
    trainee = Trainee(module, rows)
    if name == "wrapper":
        wrapped = pycomm.DataParallel(module, group=group)
        state = wrapped.comm_state
        assert isinstance(state, hooks.CommState)
        trainee.model, trainee.state = wrapped, state
        state.start = timed(state.start, trainee.calls)  # type: ignore[method-assign]
    elif name != "plain":
        trainee.model = ddp = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=settings.bucket_cap_mb
        )
        if name == "ddp":
            trainee.state = hooks.AllReduceState(group=group)
            ddp.register_comm_hook(trainee.state, timed(hooks.all_reduce_hook, trainee.calls))
        elif name == "idle":
            ddp.register_comm_hook(None, exchange_nothing)
    for _ in range(SETTLING):
        trainee.step()
    return trainee


def count_wrong(trainee: Trainee, alone: Trainee) -> int:
    """The number of gradients, over all ranks, that are not the mean of all ranks' gradients."""
    wrong = torch.zeros((), dtype=torch.int64)
    for ours, theirs in zip(trainee.model.parameters(), alone.model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        mean = theirs.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        wrong += (~((ours.grad - mean).abs() <= TOLERANCE * mean.abs().max())).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def timed(function: Callable[..., Returned], seconds: list[float]) -> Callable[..., Returned]:
    """Wraps a function so that it records its time."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Returned:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def count_parameters(trainee: Trainee) -> int:
    """The number of the model's parameters."""
    return sum(parameter.numel() for parameter in trainee.model.parameters())


def make_module(parameters: int) -> nn.Sequential:
    """A module with about `parameters` parameters."""
    layers = max(round(parameters / (WIDTH * (WIDTH + 3))), 1)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(layers)
        )
    )


def exchange_nothing(state: object, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: ARG001
    """A hook of DistributedDataParallel that leaves gradients as they are."""
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future
