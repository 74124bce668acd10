"""``python -m convergence.variants TASK...``: what half a bit per parameter is best spent on.

Simulates the exchanges of :mod:`convergence.methods`, most of which the library does not have, for
each task, optimizer and seed. As in :mod:`convergence.sparse`, the first tenth of the steps is
uncompressed, and final losses are compared to those of uncompressed training with the same seed.
The results' file is written after each run, and runs that it holds are not repeated.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from convergence.methods import Ef21, Feedback, Method, Seconds, Updates, Velocity
from convergence.simulation import AdamW, Lists, Optimizer, Ranks, Sgd, Values
from convergence.sparse import RECIPES, RESULTS
from convergence.tasks import TASKS
from convergence.training import DENSE, rate_factor
from pycomm.bench import report

RANKS = 2
STEPS_AND_SEEDS = {1000: (0, 1, 2), 3000: (0,)}
PATH = RESULTS / "convergence_variants.json"

OPTIMIZERS: dict[str, Callable[[torch.Tensor], Optimizer]] = {"momentum": Sgd, "adamw": AdamW}


def learn(name: str, kind: str, method: Method | None, seed: int, steps: int) -> float:
    """The final loss of a task, of the parameters that all ranks have; None sends everything."""
    peak, dense = RECIPES[name][kind].rate, int(DENSE * steps)
    with torch.no_grad():
        ranks = Ranks([TASKS[name](rank, RANKS, seed) for rank in range(RANKS)])
    optimizer, training = OPTIMIZERS[kind](ranks.weights[:1]), None
    for step in range(steps):
        rate = peak * rate_factor((step + 1) / (steps + 1))
        gradients = ranks.find_gradients()
        with torch.no_grad():
            if method is None or step < dense:
                mean = gradients.mean(0, keepdim=True)
                ranks.weights += optimizer.update(mean, ranks.weights[:1], rate)
                continue
            training = training or method.start(ranks, optimizer)
            done = (step - dense) / (steps - dense)
            training.step(gradients, rate * method.factor(RANKS), done)
    if training is not None:
        ranks.weights.copy_(training.common)
    return ranks.tasks[0].final_loss()


GEOMETRIC = Values(4, levels="geometric")
NARROW = Values(4, share=64)
INT8 = Lists(0.03)

# With every optimizer.
RESETS: dict[str, Method] = {
    "error reset, 3 %, int8": Updates(INT8),
    "error reset, 3 %, fp32": Updates(Lists(0.03, Values(32))),
    "error reset, 4.5 %, 4 bits, geometric": Updates(Lists(0.045, GEOMETRIC)),
    "error reset, 4.5 %, 4 bits, a scale per 64": Updates(Lists(0.045, NARROW)),
    "error reset, 3 %, 4 bits, geometric": Updates(Lists(0.03, GEOMETRIC)),
    "error reset, 5 %, 3 bits, geometric": Updates(Lists(0.05, Values(3, levels="geometric"))),
    "error reset, 7 %, signs": Updates(Lists(0.07, Values(1))),
    "error reset, 2 %, int8, 25 % at first": Updates(Lists(0.02, first=0.25, falling=0.15)),
    "error reset, 3 %, int8, residuals lost": Updates(Lists(0.03, feedback=False)),  # a control
    "feedback, 3 %, int8": Feedback(INT8),
    "updates, 3 %, int8": Updates(INT8, reset=False),
    "updates, 3 %, int8, residuals x 0.95": Updates(INT8, reset=False, decay=0.95),
}

HIGHER = {
    f"{name}, rate x 1.7": replace(RESETS[name], rate=0)
    for name in (
        "error reset, 3 %, int8",
        "error reset, 3 %, fp32",
        "error reset, 4.5 %, 4 bits, geometric",
    )
}

ADAMW: dict[str, Method] = {
    **HIGHER,
    "error reset, 3 %, int8, rate x 1.4": replace(RESETS["error reset, 3 %, int8"], rate=1.4),
    "uncompressed, each rank's moments": Updates(),
    "uncompressed, each rank's moments, rate x 1.7": Updates(rate=0),
    "uncompressed, shared second moments": Updates(seconds=Seconds(100)),
    "error reset, 3 %, int8, scaled updates": Updates(INT8, scaled=True),
    "error reset, 2.5 %, int8, shared second moments": Updates(Lists(0.025), seconds=Seconds(100)),
    "error reset, 3.9 %, 4 bits, geometric, shared second moments": Updates(
        Lists(0.039, GEOMETRIC), seconds=Seconds(100)
    ),
    "error reset, 1.7 %, int8, shared second moments every 32 steps": Updates(
        Lists(0.017), seconds=Seconds(32)
    ),
    "error reset, 1.7 %, int8, shared second moments every 32 steps, unbounded": Updates(
        Lists(0.017), seconds=Seconds(32, bounded=False)
    ),
    "error reset, 2.5 %, int8, shared second moments, unbounded": Updates(
        Lists(0.025), seconds=Seconds(100, bounded=False)
    ),
    "feedback, 3 %, int8, dense second moments": Feedback(INT8, dense_second=True),
}

MOMENTUM_ONLY: dict[str, Method] = {
    "velocity, 3 %, int8": Velocity(INT8),
    "EF21-SGDM, 3 %, int8": Ef21(INT8),
}

VARIANTS: dict[str, dict[str, Method]] = {
    "momentum": {**RESETS, **MOMENTUM_ONLY},
    "adamw": {**RESETS, **ADAMW},
}


@dataclass(frozen=True)
class Row:
    """A run; the keys of the file of results."""

    task: str
    optimizer: str
    steps: int
    seed: int
    variant: str
    bits: float
    loss: float
    uncompressed_loss: float
    difference: float


def study(name: str, kind: str, steps: int, seed: int, known: list[Row]) -> Iterator[Row]:
    """Makes the runs that are not known."""
    about = name, kind, steps, seed
    same = [row for row in known if (row.task, row.optimizer, row.steps, row.seed) == about]
    dense = same[0].uncompressed_loss if same else learn(name, kind, None, seed, steps)
    made = {row.variant for row in same}
    for variant, method in VARIANTS[kind].items():
        if variant not in made:
            loss = learn(name, kind, method, seed, steps)
            bits = round(method.bits(), 3)
            yield Row(name, kind, steps, seed, variant, bits, loss, dense, loss / dense - 1)


def make_table(rows: list[Row]) -> Table:
    """Mean, lowest and highest differences."""
    table = Table(title="final loss over uncompressed training")
    for column in ("task", "optimizer", "steps", "variant"):
        table.add_column(column)
    for column in ("bits", "seeds", "mean", "lowest", "highest"):
        table.add_column(column, justify="right")
    found: dict[tuple[str, str, int, str, float], list[float]] = {}
    for row in rows:
        key = row.task, row.optimizer, row.steps, row.variant, row.bits
        found.setdefault(key, []).append(row.difference)
    for (*about, bits), differences in found.items():
        shown = statistics.fmean(differences), min(differences), max(differences)
        table.add_row(
            *(*map(str, about), f"{bits:.2f}", str(len(differences))),
            *(f"{difference:+.1%}" for difference in shown),
        )
    return table


def main() -> None:
    names = sys.argv[1:] or list(TASKS)
    if not set(names) <= set(TASKS):
        sys.exit(f"a task is one of {', '.join(TASKS)}, not {' '.join(names)}")
    known = json.loads(PATH.read_text())["rows"] if PATH.exists() else []
    rows = [Row(**row) for row in known]
    meta = report.circumstances("python -m convergence.variants")
    for steps, seeds in STEPS_AND_SEEDS.items():
        for seed, name, kind in itertools.product(seeds, names, VARIANTS):
            for row in study(name, kind, steps, seed, list(rows)):
                rows.append(row)
                report.write_json(str(PATH), meta, map(asdict, rows))
    Console().print(make_table(rows))


if __name__ == "__main__":
    main()
