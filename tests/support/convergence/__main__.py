"""``make convergence``: trains in every mode, prints and writes the results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Table

from convergence import claims
from convergence.claims import Verdict
from convergence.tasks import TASKS
from convergence.training import MODES, RANKS, Plan, Run, run_all, run_and_kill, run_rest
from pycomm.bench import report

SEEDS = (0, 1, 2)
LIMIT = 1800.0  # seconds that a run may take
WIDTH = 112  # of the table
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/convergence.json"


@dataclass(frozen=True)
class Resumption:
    """A run that was killed after half of its steps, and went on from the checkpoint."""

    task: str
    front: str
    mode: str
    resumed_at: int
    steps: int
    as_claimed: bool  # the rest is that of the run that was not killed, to the bit


def judge_task(task: str, advance: Callable[[int], None]) -> tuple[list[Verdict], list[Resumption]]:
    """All runs of a task; `advance` is told of every step."""
    steps = TASKS[task].steps
    plans: list[Plan] = []
    runs: list[Run] = []
    for seed in SEEDS:
        for plan in claims.plan_runs(task, seed, steps):
            plans.append(plan)
            runs += run_all([plan], LIMIT)
            advance(steps)
    resumptions = []
    for plan, whole in zip(plans, runs, strict=True):
        if _is_resumed(plan):
            resumptions.append(kill_and_resume(plan, whole))
            advance(steps)
    return claims.judge(plans, runs), resumptions


def kill_and_resume(plan: Plan, whole: Run) -> Resumption:
    half = plan.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        run_and_kill(plan, Path(folder), LIMIT)
        rest = run_rest(plan, Path(folder), LIMIT)
    same = rest.digests == whole.digests[half:] and rest.final_loss == whole.final_loss
    return Resumption(plan.task, plan.front, plan.mode, half, plan.steps, same)


def count_steps() -> int:
    """The number of steps of all runs together."""
    total = 0
    for name, task in TASKS.items():
        for seed in SEEDS:
            plans = claims.plan_runs(name, seed, task.steps)
            total += task.steps * (len(plans) + sum(map(_is_resumed, plans)))
    return total


def _is_resumed(plan: Plan) -> bool:
    remembers = MODES[plan.mode].feedback and plan.broken is None
    return remembers and plan.seed == SEEDS[0]


def make_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="Final training loss beside plain DDP's")
    for name in ("task", "front", "mode", "broken"):
        table.add_column(name)
    for name in ("loss", "plain DDP", "difference", "band", "as claimed"):
        table.add_column(name, justify="right")
    for verdict in verdicts:
        means = [sum(losses) / len(losses) for losses in (verdict.losses, verdict.fp32_losses)]
        table.add_row(
            *(verdict.task, verdict.front, verdict.mode, verdict.broken or ""),
            *(f"{mean:.4f}" for mean in means),
            *(f"{verdict.difference:+.3%}", f"{verdict.band:.1%}"),
            _yes(verdict.as_claimed),
        )
    return table


def make_resumption_table(resumptions: list[Resumption]) -> Table:
    table = Table(title="Killed after half of the steps, and resumed")
    for name in ("task", "front", "mode", "bit-equal to the run that was not"):
        table.add_column(name)
    for one in resumptions:
        table.add_row(one.task, one.front, one.mode, _yes(one.as_claimed))
    return table


def _yes(right: bool) -> str:
    return "[green]yes[/]" if right else "[bold red]NO[/]"


def main() -> None:
    console = Console(width=max(Console().width, WIDTH))
    meta: dict[str, Any] = report.circumstances("make convergence")
    meta |= {"ranks": RANKS, "seeds": SEEDS}
    begin = time.monotonic()
    verdicts: list[Verdict] = []
    resumptions: list[Resumption] = []
    with progress.Progress(console=console) as bar:
        shown = bar.add_task("training", total=count_steps())
        for task in TASKS:
            judged, resumed = judge_task(task, lambda steps: bar.advance(shown, steps))
            verdicts += judged
            resumptions += resumed
    meta["minutes"] = round((time.monotonic() - begin) / 60, 1)
    console.print(make_table(verdicts), make_resumption_table(resumptions))
    console.print("parameters bit-equal on all ranks after every step of every run")
    report.write_json(str(RESULTS), meta, map(asdict, [*verdicts, *resumptions]))
    if not all(row.as_claimed for row in [*verdicts, *resumptions]):
        raise SystemExit("not all is as claimed")


if __name__ == "__main__":
    main()
