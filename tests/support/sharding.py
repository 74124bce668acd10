"""Training programs that a sharded and an unsharded wrapper must run to the same bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import golden
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import optim

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.FusedAdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.FusedAdam, {"amsgrad": True}),
    "momentum": (optim.FusedSGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (optim.FusedSGD, {"momentum": 0.8, "nesterov": True}),
    "plain": (optim.FusedSGD, {}),
    "lion": (optim.FusedLion, {"weight_decay": 0.1}),
    "lamb": (optim.FusedLAMB, {"weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter and who has gradients of it.

    Attributes:
        shape: its shape.
        transposed: its elements lie in another order.
        unused_on: ranks that never use it.
        frozen: it requires no gradient.
        group: its parameter group.
    """

    shape: tuple[int, ...]
    transposed: bool = False
    unused_on: frozenset[int] = frozenset()
    frozen: bool = False
    group: int = 0


@dataclass(frozen=True)
class Step:
    """One step of training.

    Attributes:
        without_sync: backwards inside of no_sync().
        backwards: backwards that exchange, one after the other.
        zero: what zeroes gradients: "none", "optimizer" or "model".
        set_to_none: whether they are removed.
        zero_after_forward: zero them between the first forward and its backward.
        overflows_on: the rank that has an infinite gradient.
        weighs: ranks have different weights.
        reads: call reduce_gradients() and record the gradients.
        clips: clip averaged gradients with torch.
        edits: change a parameter by hand after the step.
        steps: steps of the optimizer.
        checkpoint: record the optimizer's checkpoint, and load it.
        wraps: wrap the model anew before, with `shard` or without, and with other buckets.
        regroups: go on in a new group after the step, if there are replicas.
    """

    without_sync: int = 0
    backwards: int = 1
    zero: str = "optimizer"
    set_to_none: bool = True
    zero_after_forward: bool = False
    overflows_on: int | None = None
    weighs: bool = False
    reads: bool = False
    clips: bool = False
    edits: bool = False
    steps: int = 1
    checkpoint: bool = False
    wraps: str | None = None
    regroups: bool = False


@dataclass(frozen=True)
class Program:
    """A model, an optimizer and steps."""

    ranks: int
    dtype: torch.dtype
    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    rule: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    bucket_cap_mb: float = 0.004
    scaled: bool = False
    scheduled: bool = False
    tied: bool = False
    optimizers: int = 1
    begins: str = "wrapped"  # the optimizer is made when the model is; or "made", "stepped" before
    adds_group_at: int | None = None  # the step before which group 1 is added
    compression: pycomm.Compression | None = None
    shard_ranks: int | None = None  # the number of ranks in a shard group
    nodes: tuple[int, ...] | None = None  # the number of ranks on each of several nodes
    replicas: int = 1


class Given(nn.Module):
    """A model whose gradients are inputs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(5)
        self.given = nn.ParameterList()
        for one in program.parameters:
            shape = one.shape[::-1] if one.transposed else one.shape
            values = torch.randn(shape, generator=rng).to(program.dtype)
            values = values.permute(*range(values.ndim)[::-1]) if one.transposed else values
            self.given.append(nn.Parameter(values, requires_grad=not one.frozen))
        self.again = self.given[0] if program.tied else None

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        parts = [torch.zeros((), requires_grad=True)]
        for parameter, gradient in zip(self.given, gradients, strict=True):
            if gradient is not None:
                parts.append((parameter * gradient).sum().float())
        if self.again is not None and gradients[0] is not None:
            parts.append((self.again * gradients[0].flip(0)).sum().float())
        return torch.stack(parts).sum()


def gradients_for(
    program: Program, rank: int, number: int, overflows: bool
) -> list[torch.Tensor | None]:
    """A rank's gradients in one backward."""
    rng = torch.Generator().manual_seed(100 * number + rank)
    made: list[torch.Tensor | None] = []
    for one in program.parameters:
        values = torch.randn(one.shape, generator=rng).to(program.dtype)
        made.append(None if rank in one.unused_on else values)
    if overflows:
        for values in made:
            if values is not None and values.numel():
                values.view(-1)[-1] = torch.inf
                break
    return made


class Run:
    """One rank's run of a program, with or without shards.

    Attributes:
        uneven: ranks have different numbers of batches; checkpoints are then not loaded.
        weight: the weight of the batch, from even_batches().
        seen: everything that must be the same in both runs, in order.
    """

    uneven = False
    weight: float | None = None

    def __init__(
        self, group: pycomm.Group, program: Program, net: nn.Module, shard: str | None, **extra: Any
    ) -> None:
        self.group, self.program = group, program
        self.seen: list[tuple[str, Any]] = []
        self.net = copy.deepcopy(net)
        self.optimizers: list[Any] = []
        if program.begins != "wrapped":
            self.make_optimizers()
        if program.begins == "stepped":
            rng = torch.Generator().manual_seed(1)
            for parameter in self.net.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
                    parameter.grad = torch.empty_like(parameter).copy_(noise)
            for optimizer in self.optimizers:
                optimizer.step()
        self.shard, self.extra = shard, extra
        self.wrap("shard", program.bucket_cap_mb)
        if program.begins == "wrapped":
            self.make_optimizers()
        self.scaler = optim.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in self.optimizers]

    def wrap(self, how: str, bucket_cap_mb: float) -> None:
        shard = self.shard if how == "shard" else None
        self.model = data_parallel(
            self.net,
            bucket_cap_mb=bucket_cap_mb,
            group=self.group,
            compression=self.program.compression,
            shard=shard,
            **(self.extra if shard else {}),
        )

    def members(self, group: int) -> list[nn.Parameter]:
        listed = zip(self.net.given, self.program.parameters, strict=True)
        return [parameter for parameter, one in listed if one.group == group]

    def make_optimizers(self) -> None:
        make, own = RULES[self.program.rule]
        groups = [{"params": self.members(0), "lr": 0.02}]
        if self.program.adds_group_at is None:
            groups.append({"params": self.members(1), "lr": 0.03, "weight_decay": 0.2})
        groups = [group for group in groups if group["params"]]
        apart = [groups] if self.program.optimizers == 1 else [[group] for group in groups]
        self.optimizers = [make(part, **own, **self.program.options) for part in apart]

    def run(self) -> list[tuple[str, Any]]:
        for number, step in enumerate(self.program.steps):
            self.step(number, step)
        self.note("end")
        return self.seen

    def join(self, batches: int) -> list[tuple[str, Any]]:
        """Takes steps for so many batches, in join()."""
        self.uneven = True
        with self.model.join():
            for number, step in enumerate(self.program.steps[:batches]):
                self.step(number, step)
        return self.seen

    def even(self, batches: int) -> list[tuple[str, Any]]:
        """Takes steps with so many batches of its own, in even_batches()."""
        self.uneven = True
        numbered = pycomm.even_batches(range(batches), self.group)
        for (number, weight), step in zip(numbered, self.program.steps, strict=False):
            self.weight = weight
            self.step(number, step)
        return self.seen

    def step(self, number: int, step: Step) -> None:
        if step.wraps is not None:
            self.wrap(step.wraps, 2 * self.program.bucket_cap_mb)
        if number == self.program.adds_group_at and self.members(1):
            self.optimizers[0].add_param_group({"params": self.members(1), "lr": 0.01})
        if not step.zero_after_forward:
            self.zero(step)
        for micro in range(step.without_sync + step.backwards):
            quiet = micro < step.without_sync
            overflows = step.overflows_on == self.group.rank
            gradients = gradients_for(self.program, self.group.rank, 9 * number + micro, overflows)
            weight = self.weight
            if step.weighs:
                weight = (1.0 + self.group.rank) * (1.0 if weight is None else weight)
            weight = None if quiet else weight
            with self.model.no_sync() if quiet else contextlib.nullcontext():
                loss = self.model(gradients, weight=weight)
                if micro == 0 and step.zero_after_forward:
                    self.zero(step)
                (self.scaler.scale(loss) if self.program.scaled else loss).backward()
        if step.reads:
            self.model.reduce_gradients()
            self.seen += [
                ("gradient", None if p.grad is None else p.grad.clone())
                for p in self.net.parameters()
            ]
        if step.clips:
            self.model.reduce_gradients()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        for _ in range(step.steps):
            for optimizer in self.optimizers:
                if self.program.scaled:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
            if self.program.scaled:
                self.scaler.update()
                self.seen.append(("scale", self.scaler.get_scale()))
        if step.edits:
            with torch.no_grad():
                self.net.given[0].mul_(0.75)
        if step.regroups and self.program.replicas == 2 and not self.uneven:
            assert self.group.should_commit()  # ranks that shrink end the operations of others
            self.group = self.group.shrink()
            self.model.regroup(self.group)
        if self.program.scheduled:
            for scheduler in self.schedulers:
                scheduler.step()
        self.note("checkpoint" if step.checkpoint else "")
        if step.checkpoint and not self.uneven:
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    def zero(self, step: Step) -> None:
        for one in {"none": [], "optimizer": self.optimizers, "model": [self.model]}[step.zero]:
            one.zero_grad(set_to_none=step.set_to_none)

    def note(self, checkpoint: str) -> None:
        self.seen += [(n, p.detach().clone()) for n, p in self.net.named_parameters()]
        for optimizer in self.optimizers:
            norm = optimizer.grad_norm
            self.seen.append(("norm", None if norm is None else norm.clone()))
            if checkpoint:
                self.seen.append(("checkpoint", copy.deepcopy(optimizer.state_dict())))


def difference(a: Any, b: Any, where: str = "") -> str | None:
    """The first place in which two values differ in type, shape, order or bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        alike = alike and (a.numel() == 0 or golden.same_bits(a, b))
        return None if alike else f"{where}: {a} and {b}"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: {list(a)} and {list(b)}"
        pairs: Any = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} long"
        pairs = [(index, *both) for index, both in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b or (a != a and b != b) else f"{where}: {a!r} and {b!r}"
    found = (difference(one, other, f"{where}/{key}") for key, one, other in pairs)
    return next((text for text in found if text is not None), None)


def run_stages(program: Program, body: Any) -> dict[str | None, list[Any]]:
    """What a body returns on each rank, on threads, with and without shards."""
    net = Given(program)
    stages = ["optimizer", "gradients"]
    if program.compression is not None or program.shard_ranks is not None:
        stages.remove("gradients")
    with contextlib.ExitStack() as stack:

        def world(size: int, **options: Any) -> pycomm.LocalWorld:
            return stack.enter_context(pycomm.LocalWorld(size, timeout=20, **options))

        runs = {}
        size = program.shard_ranks or program.ranks
        for stage in (None, *stages):
            parts = [world(size) for _ in range(program.ranks // size)]

            def on_rank(
                group: pycomm.Group, stage: str | None, parts: list[pycomm.LocalWorld]
            ) -> Any:
                part = parts[group.rank // size].groups[group.rank % size]
                extra = {} if program.shard_ranks is None else {"shard_group": part}
                extra |= {"replicas": program.replicas}
                return body(Run(group, program, net, stage, **extra))

            runs[stage] = world(program.ranks, nodes=program.nodes).run(on_rank, stage, parts)
    return runs


def check(program: Program) -> None:
    """Runs a program with and without shards, and compares everything."""
    runs = run_stages(program, lambda run: run.run())
    for stage in runs.keys() - {None}:
        for rank, (plain, sharded) in enumerate(zip(runs[None], runs[stage], strict=True)):
            found = difference(plain, sharded, f"{stage}, rank {rank}")
            assert found is None, found


def check_even(program: Program, batches: Sequence[int]) -> None:
    """Runs a program in even_batches(), and compares each step with one without shards in join().

    Args:
        program: the program.
        batches: the number of batches that each rank has.
    """

    def body(run: Run) -> tuple[list[tuple[str, Any]], ...]:
        own = batches[run.group.rank]
        if run.shard is not None:
            return (run.even(own),)
        return run.even(own), Run(run.group, program, Given(program), None).join(own)

    runs = run_stages(program, body)
    expected = runs[None][batches.index(max(batches))][1]
    for stage, ranks in runs.items():
        for rank, (seen, *_) in enumerate(ranks):
            found = difference(expected, seen, f"{stage}, rank {rank}")
            assert found is None, found
