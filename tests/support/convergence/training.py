"""A training run of one rank, and one that is killed and resumed."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddp
import helpers
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapping import data_parallel

import pycomm
from convergence.tasks import TASKS
from pycomm import hooks

RANKS = 2
RISING = 0.1  # of the steps, in which the learning rate grows
DENSE = 0.1  # of the steps, which top-k sends uncompressed


@dataclass(frozen=True)
class Mode:
    """How gradients travel, and how far from uncompressed a training may end."""

    compression: pycomm.Compression | None
    feedback: bool
    band: float


MODES = {
    "fp32": Mode(None, False, 0.0),
    "int8": Mode(pycomm.Int8(), False, 0.005),
    "int8, feedback": Mode(pycomm.Int8(), True, 0.005),
    "top-k 1 %, feedback": Mode(pycomm.TopK(density=0.01), True, 0.05),
}


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        task: what to learn.
        front: ``"plain"`` is DDP on Gloo; ``"hook"`` and ``"wrapper"`` are pycomm's.
        mode: one of `MODES`.
        seed: of the model and the batches.
        steps: how many.
        broken: what goes wrong in every step, one of `BROKEN`.
    """

    task: str
    front: str
    mode: str
    seed: int
    steps: int
    broken: str | None = None


@dataclass
class Run:
    """The results of a run on one rank.

    Attributes:
        digests: of the parameters' bits, after every step.
        final_loss: see the package.
    """

    digests: list[str] = field(default_factory=list)
    final_loss: float = float("nan")


def digest(model: nn.Module) -> str:
    """A digest of the parameters' bits."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().view(torch.uint8).numpy())
    return hashed.hexdigest()


def rate_factor(done: float) -> float:
    """Grows, then falls to nothing, both along straight lines."""
    return max(min(done / RISING, 1 - done), 0)


class Trainee:
    """All that changes in the course of a run."""

    def __init__(self, plan: Plan, rank: int, size: int) -> None:
        self.plan = plan
        self.step = 0
        self.task = TASKS[plan.task](rank, size, plan.seed)
        self.model, self.state = parallelise(self.task.model, plan)
        self.optimizer = self.task.make_optimizer(self.model.parameters())

    def train_step(self) -> str:
        """Returns a digest of the parameters."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.task.rate * rate_factor(self.step / self.plan.steps)
        self.optimizer.zero_grad()
        self.task.loss(self.model, self.task.draw()).backward()
        if self.plan.broken is not None:
            BROKEN[self.plan.broken](self)
        self.optimizer.step()
        self.step += 1
        return digest(self.model)

    def save(self, path: Path) -> None:
        """A checkpoint, which is there when it is whole."""
        saved = {
            "step": self.step,
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "comm": self.state.state_dict(),
            "random": self.task.random.get_state(),
        }
        part = path.with_suffix(".part")
        torch.save(saved, part)
        part.rename(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.step = saved["step"]
        self.task.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["comm"])
        self.task.random.set_state(saved["random"])


def parallelise(model: nn.Module, plan: Plan) -> tuple[nn.Module, hooks.CommState | None]:
    """A model with a backward that averages gradients, and the state to save with it."""
    compression = MODES[plan.mode].compression
    feedback = MODES[plan.mode].feedback and plan.broken != "feedback dropped"
    sparse = isinstance(compression, pycomm.TopK)
    options: dict[str, Any] = {"warmup_steps": int(DENSE * plan.steps) if sparse else 0}
    if plan.front == "wrapper":
        wrapped = data_parallel(model, compression=compression, feedback=feedback, **options)
        return wrapped, wrapped.comm_state
    made = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if plan.front == "plain":
        return made, None
    if compression is None:
        state, hook = hooks.AllReduceState(), hooks.all_reduce_hook
    elif feedback:
        state, hook = ddp.make_state(compression, made.named_parameters(), **options)
    else:
        state, hook = hooks.CommState(compression, **options), hooks.comm_hook
    made.register_comm_hook(state, hook)
    return made, state


def double_gradients(trainee: Trainee) -> None:
    """Doubles gradients, as if a sum over two ranks were not divided."""
    for parameter in trainee.model.parameters():
        parameter.grad.mul_(2)


def misplace_residuals(trainee: Trainee) -> None:
    """Moves each within its parameter."""
    for name, parameter in ddp.unprefixed(trainee.model).items():
        if not ddp.sent_dense(name, parameter):
            residual = trainee.state.residual(name).view(-1)
            residual.copy_(residual.roll(residual.numel() // 2 + 1))


def lead_astray(trainee: Trainee) -> None:
    """Changes one gradient, on one rank."""
    first = next(trainee.model.parameters())
    if dist.get_rank() == 1:
        first.grad.view(-1)[0] += 1e-3


# What breaks a run, after each of its backwards.
BROKEN: dict[str, Callable[[Trainee], None]] = {
    "gradient doubled": double_gradients,
    "residual misplaced": misplace_residuals,
    "rank astray": lead_astray,
    "feedback dropped": lambda trainee: None,  # noqa: ARG005 - it never had any
}


def finish(trainee: Trainee) -> Run:
    """The rest of a run."""
    run = Run()
    while trainee.step < trainee.plan.steps:
        run.digests.append(trainee.train_step())
    run.final_loss = trainee.task.final_loss()
    return run


def train(rank: int, size: int, store: str, plans: list[Plan]) -> list[Run]:
    """One rank's part in several runs, one after the other."""
    with helpers.member(rank, size, store):
        return [finish(Trainee(plan, rank, size)) for plan in plans]


def train_until_killed(rank: int, size: int, store: str, plan: Plan, folder: Path) -> None:
    """Saves at half, and goes on."""
    with helpers.member(rank, size, store):
        trainee = Trainee(plan, rank, size)
        while True:
            trainee.train_step()
            if trainee.step == plan.steps // 2:
                trainee.save(checkpoint(folder, rank))


def resume(rank: int, size: int, store: str, plan: Plan, folder: Path) -> Run:
    """From the checkpoint on."""
    with helpers.member(rank, size, store):
        trainee = Trainee(plan, rank, size)
        trainee.load(checkpoint(folder, rank))
        return finish(trainee)


def checkpoint(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pt"


def run_all(plans: list[Plan], limit: float = helpers.LIMIT) -> list[Run]:
    """Trains in new processes; fails if ranks' parameters differ after any step."""
    ranks = helpers.run_ranks(RANKS, train, plans, limit=limit)
    return [_agreed(plan, runs) for plan, *runs in zip(plans, *ranks, strict=True)]


def run_and_kill(plan: Plan, folder: Path, limit: float = helpers.LIMIT) -> None:
    """Leaves every rank's checkpoint."""
    saved = [checkpoint(folder, rank) for rank in range(RANKS)]
    with helpers.Ranks(RANKS, train_until_killed, plan, folder) as ranks:

        def is_over() -> bool:
            running = all(process.is_alive() for process in ranks.processes)
            return not running or all(path.exists() for path in saved)

        helpers.wait_until(is_over, limit)
        for rank in range(RANKS):
            ranks.signal(rank, signal.SIGKILL)
        first = ranks.join()[0]  # the others may have seen it die
    assert first.exitcode == -signal.SIGKILL, first.trace


def run_rest(plan: Plan, folder: Path, limit: float = helpers.LIMIT) -> Run:
    """From the checkpoints on, in new processes."""
    return _agreed(plan, helpers.run_ranks(RANKS, resume, plan, folder, limit=limit))


def _agreed(plan: Plan, runs: list[Run]) -> Run:
    first, *others = runs
    for rank, other in enumerate(others, 1):
        assert other.digests == first.digests, (
            f"ranks 0 and {rank} do not have the same parameters: {plan}"
        )
    return first
