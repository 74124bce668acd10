"""``python -m convergence.shards``: trains with optimizer states and gradients divided among ranks.

The language model, trained by FusedAdamW in two processes, with every storage of weights and
states. With ``shard=``, the losses and the parameters after every step must be those of the wrapper
without shards, to the last bit. And the mean relative difference of the final losses over the
seeds, beside torch's DDP on Gloo with AdamW in fp32, must lie within 0.5 %. A broken version must
miss both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import helpers
import torch
from rich import progress
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from convergence.states import BAND, RATE, SEEDS
from convergence.tasks import Characters
from convergence.training import RANKS, Run, digest, rate_factor
from pycomm import optim
from pycomm.bench import report

STEPS = 250
WIDTH = 150  # of the table
LIMIT = 1800.0  # seconds that the runs of a seed may take
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/shard_convergence.json"

BF16 = torch.bfloat16
# The parameters' type, and the optimizer's options.
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16 states": (torch.float32, {"states": "bf16"}),
    "8-bit states": (torch.float32, {"states": "8bit"}),
    "bf16, fp32 masters": (BF16, {"master_weights": "fp32"}),
    "bf16, remainders": (BF16, {"master_weights": "remainder"}),
    "bf16, remainders, 8-bit states": (BF16, {"master_weights": "remainder", "states": "8bit"}),
    "bf16, stochastic": (BF16, {"states": "bf16", "stochastic_rounding": True}),
}
STAGES = ("optimizer", "gradients")
BROKEN = "second moments lost on rank 1"


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        storage: one of `STORAGES`; None for torch's DDP and AdamW in fp32.
        shard: the wrapper's option.
        broken: whether rank 1 loses its second moments after every step.
    """

    storage: str | None
    shard: str | None = None
    broken: bool = False


@dataclass
class Curve(Run):
    """The results of a run on one rank, with the losses of its batches."""

    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The same runs of several seeds.

    Attributes:
        losses: final ones, by seed.
        ddp_losses: those of torch's DDP and AdamW in fp32.
        difference: the mean relative one.
        same_bits: whether losses and parameters were those without shards after every step of
            every rank and seed; None without shards.
        as_claimed: whether the difference lies in the band and the bits are the same, or neither,
            if something is broken.
    """

    storage: str
    shard: str | None
    broken: str | None
    steps: int
    losses: list[float]
    ddp_losses: list[float]
    difference: float
    band: float
    same_bits: bool | None
    as_claimed: bool


class Float(nn.Module):
    """Makes logits float32, so that losses are not rounded to bfloat16."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()


def train(plan: Plan, rank: int, size: int, seed: int, steps: int) -> Curve:
    """One rank's part in a run."""
    task = Characters(rank, size, seed)
    model: nn.Module
    optimizer: torch.optim.Optimizer
    if plan.storage is None:
        model = DistributedDataParallel(task.model)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        dtype, options = STORAGES[plan.storage]
        task.model = nn.Sequential(task.model.to(dtype), Float())
        model = pycomm.DataParallel(task.model, shard=plan.shard)
        optimizer = optim.FusedAdamW(model.parameters(), **options)
    curve = Curve()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * rate_factor(step / steps)
        optimizer.zero_grad()
        loss = task.loss(model, task.draw())
        loss.backward()
        optimizer.step()
        if plan.broken and rank == 1:
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()
        curve.losses += (loss.item(),)
        curve.digests.append(digest(model))
    curve.final_loss = task.final_loss()
    return curve


def train_all(rank: int, size: int, store: str, plans: list[Plan], *rest: int) -> list[Curve]:
    """One rank's part in several runs, one after the other."""
    with helpers.member(rank, size, store):
        return [train(plan, rank, size, *rest) for plan in plans]


def plan_runs(storages: Sequence[str]) -> list[Plan]:
    """All runs of a seed; torch's first, and each storage's without shards before those with."""
    plans = [Plan(None)]
    plans += [Plan(storage, shard) for storage in storages for shard in (None, *STAGES)]
    return [*plans, *(Plan("fp32", stage, broken=True) for stage in STAGES)]


def judge(
    seeds: Sequence[int],
    steps: int,
    storages: Sequence[str],
    advance: Callable[[], object] = bool,
) -> list[Verdict]:
    """Trains with these storages, sharded and not; calls `advance` after each seed."""
    plans = plan_runs(storages)
    found: dict[Plan, list[list[Curve]]] = {plan: [] for plan in plans}  # by seed and rank
    for seed in seeds:
        ranks = helpers.run_ranks(RANKS, train_all, plans, seed, steps, limit=LIMIT)
        for plan, *curves in zip(plans, *ranks, strict=True):
            found[plan].append(curves)
        advance()
    return [_judge(plan, steps, found) for plan in plans if plan.storage is not None]


def _judge(plan: Plan, steps: int, found: dict[Plan, list[list[Curve]]]) -> Verdict:
    assert plan.storage is not None
    losses = [curves[0].final_loss for curves in found[plan]]
    ddp_losses = [curves[0].final_loss for curves in found[Plan(None)]]
    difference = statistics.fmean(a / b - 1 for a, b in zip(losses, ddp_losses, strict=True))
    inside = abs(difference) <= BAND
    same = None if plan.shard is None else found[plan] == found[Plan(plan.storage)]
    as_claimed = not (inside or same) if plan.broken else inside and same is not False
    return Verdict(
        storage=plan.storage,
        shard=plan.shard,
        broken=BROKEN if plan.broken else None,
        steps=steps,
        losses=losses,
        ddp_losses=ddp_losses,
        difference=difference,
        band=BAND,
        same_bits=same,
        as_claimed=as_claimed,
    )


def make_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="Final training loss beside that of DDP and AdamW in fp32")
    for name in ("storage", "shard", "broken"):
        table.add_column(name)
    for name in ("loss", "DDP", "difference", "bits as unsharded", "as claimed"):
        table.add_column(name, justify="right")
    words = {None: "", True: "yes", False: "NO"}
    for verdict in verdicts:
        means = [statistics.fmean(losses) for losses in (verdict.losses, verdict.ddp_losses)]
        table.add_row(
            *(verdict.storage, verdict.shard or "", verdict.broken or ""),
            *(f"{mean:.4f}" for mean in means),
            f"{verdict.difference:+.3%}",
            *(words[verdict.same_bits], words[verdict.as_claimed]),
        )
    return table


def as_row(verdict: Verdict) -> dict[str, Any]:
    """For JSON, which has no NaN: broken versions may diverge."""
    diverged = {"losses": None, "difference": None} if math.isnan(verdict.difference) else {}
    return asdict(verdict) | diverged


def main() -> None:
    meta: dict[str, Any] = report.circumstances("make convergence")
    meta |= {"ranks": RANKS, "seeds": SEEDS, "rate": RATE}
    begin = time.monotonic()
    with progress.Progress() as bar:
        shown = bar.add_task("training", total=len(SEEDS))
        verdicts = judge(SEEDS, STEPS, list(STORAGES), lambda: bar.advance(shown))
    meta["minutes"] = round((time.monotonic() - begin) / 60, 1)
    Console(width=max(Console().width, WIDTH)).print(make_table(verdicts))
    report.write_json(str(RESULTS), meta, map(as_row, verdicts))
    if not all(verdict.as_claimed for verdict in verdicts):
        raise SystemExit("not all is as claimed")


if __name__ == "__main__":
    main()
