"""The claims about trainings, and their checks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from convergence.training import MODES, Plan, Run

FRONTS = ("hook", "wrapper")
BREAKAGES = {
    "gradient doubled": "int8",
    "residual misplaced": "top-k 1 %, feedback",
    "feedback dropped": "top-k 1 %, feedback",
}


@dataclass(frozen=True)
class Verdict:
    """The same runs of several seeds, beside plain DDP's.

    Attributes:
        losses: the final losses, by seed.
        fp32_losses: plain DDP's final losses, by seed.
        difference: the mean relative difference.
        band: the largest allowed difference, to either side.
        as_claimed: whether the difference lies in the band, or outside if something is broken.
    """

    task: str
    front: str
    mode: str
    broken: str | None
    steps: int
    losses: list[float]
    fp32_losses: list[float]
    difference: float
    band: float
    as_claimed: bool


def plan_runs(task: str, seed: int, steps: int) -> list[Plan]:
    """All runs of a seed; plain DDP first."""

    def plan(front: str, mode: str, broken: str | None = None) -> Plan:
        return Plan(task, front, mode, seed, steps, broken)

    working = [plan(front, mode) for front in FRONTS for mode in MODES]
    broken = [plan("hook", mode, name) for name, mode in BREAKAGES.items()]
    return [plan("plain", "fp32"), *working, *broken]


def judge(plans: list[Plan], runs: list[Run]) -> list[Verdict]:
    """A verdict on all that is claimed of these runs."""
    plain = {p.seed: run.final_loss for p, run in zip(plans, runs, strict=True) if _is_plain(p)}
    cases: dict[tuple[str, str, str | None], dict[int, float]] = {}
    for p, run in zip(plans, runs, strict=True):
        if not _is_plain(p):
            cases.setdefault((p.front, p.mode, p.broken), {})[p.seed] = run.final_loss
    (about,) = {(p.task, p.steps) for p in plans}
    return [_judge(*about, *case, losses, plain) for case, losses in cases.items()]


def _is_plain(plan: Plan) -> bool:
    return plan.front == "plain"


def _judge(
    task: str,
    steps: int,
    front: str,
    mode: str,
    broken: str | None,
    losses: dict[int, float],
    plain: dict[int, float],
) -> Verdict:
    difference = statistics.fmean(loss / plain[seed] - 1 for seed, loss in losses.items())
    band = MODES[mode].band
    inside = abs(difference) <= band
    pairs = [*losses.values()], [plain[seed] for seed in losses]
    as_claimed = inside == (broken is None)
    return Verdict(task, front, mode, broken, steps, *pairs, difference, band, as_claimed)
