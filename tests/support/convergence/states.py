"""``python -m convergence.states``: trains with optimizers that store less.

The language model, trained by AdamW in one process, with states of every form beside states in
fp32: same model, batches and learning rates. The mean relative difference of the final losses over
the seeds must lie within 0.5 %, and outside where the states of 8 bits are broken on purpose. And a
model in bf16 must have the same weights to the last bit, be they kept as remainders or in fp32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import progress
from rich.console import Console
from rich.table import Table

from convergence.tasks import Characters
from convergence.training import rate_factor
from pycomm import optim
from pycomm.bench import report

SEEDS = (0, 1, 2)
STEPS = 250
RATE = 1e-3
BAND = 0.005
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/optimizer_states.json"

State = dict[str, torch.Tensor]


def flatten(state: State) -> None:
    """Forgets how second moments differ within a block: too coarse a code."""
    if "exp_avg_sq_absmax" in state:
        state["exp_avg_sq_code"].fill_(255)


def lose(state: State) -> None:
    """Second moments become zero beside much larger ones of their block: steps too large."""
    if "exp_avg_sq_absmax" in state:
        codes = state["exp_avg_sq_code"]
        codes[codes < 64] = 0  # below 1/252 of the largest


MODES: dict[str, dict[str, Any]] = {
    "bf16": {"states": "bf16"},
    "bf16, stochastic": {"states": "bf16", "stochastic_rounding": True},
    "fp16": {"states": "fp16"},
    "8bit": {"states": "8bit"},
}
BREAKAGES: dict[str, Callable[[State], None]] = {
    "codes flattened": flatten,
    "small moments lost": lose,
}


@dataclass(frozen=True)
class Verdict:
    """Runs of several seeds beside those with states in fp32.

    Attributes:
        losses: final ones, by seed.
        fp32_losses: of states in fp32.
        difference: the mean relative one.
        as_claimed: whether it lies in the band, or outside, where something is broken.
    """

    states: str
    broken: str | None
    steps: int
    losses: list[float]
    fp32_losses: list[float]
    difference: float
    band: float
    as_claimed: bool


@dataclass(frozen=True)
class Equality:
    """Compares two trainings in bf16 with different kinds of master weights.

    Attributes:
        as_claimed: whether all weights are the same to the last bit after every step.
    """

    seed: int
    steps: int
    as_claimed: bool


def train(seed: int, steps: int, options: dict[str, Any], broken: str | None = None) -> float:
    """The final loss."""
    task = Characters(0, 1, seed)
    optimizer = optim.FusedAdamW(task.model.parameters(), **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * rate_factor(step / steps)
        optimizer.zero_grad()
        task.loss(task.model, task.draw()).backward()
        optimizer.step()
        if broken is not None:
            for state in optimizer.state.values():
                BREAKAGES[broken](state)
    return task.final_loss()


def judge(
    seeds: Sequence[int],
    steps: int,
    cases: Sequence[tuple[str, str | None]],
    advance: Callable[[], object] = bool,
) -> list[Verdict]:
    """Trains in all modes, sound and broken; calls `advance` after every run."""

    def losses(options: dict[str, Any], broken: str | None = None) -> list[float]:
        found = []
        for seed in seeds:
            found.append(train(seed, steps, options, broken))
            advance()
        return found

    fp32 = losses({})
    verdicts = []
    for mode, broken in cases:
        found = losses(MODES[mode], broken)
        difference = statistics.fmean(a / b - 1 for a, b in zip(found, fp32, strict=True))
        as_claimed = (abs(difference) <= BAND) == (broken is None)
        verdicts.append(Verdict(mode, broken, steps, found, fp32, difference, BAND, as_claimed))
    return verdicts


def weights(task: Characters, optimizer: optim.FusedAdamW) -> list[torch.Tensor]:
    """With all bits that are known."""
    states = optimizer.state_dict(format="torch")["state"]
    return [states[number]["master_param"] for number in range(len(list(task.model.parameters())))]


def compare_masters(seed: int, steps: int) -> Equality:
    """Two models in bf16, side by side."""
    tasks = [Characters(0, 1, seed) for _ in range(2)]
    optimizers = [
        optim.FusedAdamW(task.model.bfloat16().parameters(), master_weights=master)
        for task, master in zip(tasks, ("fp32", "remainder"), strict=True)
    ]
    same = True
    for step in range(steps):
        for task, optimizer in zip(tasks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = RATE * rate_factor((step + 1) / (steps + 1))
            optimizer.zero_grad()
            task.loss(task.model, task.draw()).backward()
            optimizer.step()
        pairs = zip(*map(weights, tasks, optimizers), strict=True)
        same &= all(torch.equal(one, other) for one, other in pairs)
    return Equality(seed, steps, same)


def make_table(verdicts: list[Verdict], equality: Equality) -> Table:
    table = Table(title="Final training loss beside that of states in fp32")
    table.add_column("states")
    table.add_column("broken")
    for name in ("loss", "fp32 states", "difference", "as claimed"):
        table.add_column(name, justify="right")
    for verdict in verdicts:
        means = [statistics.fmean(losses) for losses in (verdict.losses, verdict.fp32_losses)]
        table.add_row(
            *(verdict.states, verdict.broken or ""),
            *(f"{mean:.4f}" for mean in means),
            *(f"{verdict.difference:+.3%}", "yes" if verdict.as_claimed else "NO"),
        )
    same = "bit-equal" if equality.as_claimed else "NOT bit-equal"
    table.caption = f"bf16: remainders and fp32 masters {same} over {equality.steps} steps"
    return table


def main() -> None:
    meta: dict[str, Any] = report.circumstances("make convergence")
    meta |= {"seeds": SEEDS, "rate": RATE}
    begin = time.monotonic()
    cases = [*((mode, None) for mode in MODES), *(("8bit", broken) for broken in BREAKAGES)]
    with progress.Progress() as bar:
        shown = bar.add_task("training", total=len(SEEDS) * (1 + len(cases)))
        verdicts = judge(SEEDS, STEPS, cases, lambda: bar.advance(shown))
    equality = compare_masters(SEEDS[0], STEPS // 8)
    meta["minutes"] = round((time.monotonic() - begin) / 60, 1)
    Console().print(make_table(verdicts, equality))
    report.write_json(str(RESULTS), meta, map(asdict, [*verdicts, equality]))
    if not all(row.as_claimed for row in [*verdicts, equality]):
        raise SystemExit("not all is as claimed")


if __name__ == "__main__":
    main()
