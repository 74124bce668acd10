"""``python -m convergence.sparse [STUDY]``: what top-k and int8 cost in loss, per optimizer.

Top-k is studied with ``characters``, the language model of the example, and ``digits``, the vision
model, and ``int8`` with characters; by default all three. ``large`` is a language model of ten
million parameters. The first tenth of the steps is uncompressed. The final loss on fixed batches is
compared to that of uncompressed training with the same seed, model, batches and learning rates.

*Feedback* sends gradients, and residuals feed back what was not sent; *reset* is local SGD with a
period of one step and local residuals: it sends updates.

AdamW sees one rank's gradients instead of the mean of n if updates are sent. Where noise dominates
them, its second moments are n times as large, and its steps smaller by the root of n. So its
learning rate is 1.2 times the root of n as high then: of 1, 1.2, 1.4, 1.7 and 2 the best for two
ranks was 1.7, and for four 2.4 was better than 1.7.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import progress
from rich.console import Console
from rich.table import Table
from wrapping import data_parallel

import pycomm
from convergence.tasks import ALL_TASKS, TASKS, Task
from convergence.training import DENSE, rate_factor
from pycomm import hooks
from pycomm.bench import report

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


@dataclass(frozen=True)
class Recipe:
    """How a task is learned.

    Attributes:
        make: the class of the optimizer.
        rate: the learning rate at its highest.
        momentum: of SGD; None leaves it out.
        reset_factor: how many times as high the rate is if updates are sent, over the root of the
            ranks; None leaves it as it is.
    """

    make: type[torch.optim.Optimizer]
    rate: float
    momentum: float | None = None
    reset_factor: float | None = None

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer."""
        options = {} if self.momentum is None else {"momentum": self.momentum}
        return self.make(parameters, lr=self.rate, **options)

    def factor(self, ranks: int) -> float:
        """How many times as high the rate is if updates are sent."""
        return 1.0 if self.reset_factor is None else self.reset_factor * math.sqrt(ranks)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW

# With characters, rates are the best of a few for uncompressed training. With digits, all lead to
# about the same loss. There the loss falls with every higher rate, until the model knows the images
# by heart and relative differences say nothing; so AdamW runs with the same rate and a higher one.
# The large model runs with four ranks, at 2.4, 1.2 and 1 times the rate of uncompressed training.
RECIPES = {
    "characters": {
        "sgd": Recipe(SGD, 1.0),
        "momentum": Recipe(SGD, 0.4, momentum=0.9),
        "adamw": Recipe(ADAMW, 4e-3, reset_factor=1.2),
    },
    "digits": {
        "sgd": Recipe(SGD, 0.2),
        "momentum": Recipe(SGD, 0.02, momentum=0.9),
        "adamw": Recipe(ADAMW, 5e-4),
        "adamw, higher rate": Recipe(ADAMW, 5e-4, reset_factor=1.2),
    },
    "large": {
        "adamw, rate x 2.4": Recipe(ADAMW, 1e-3, reset_factor=1.2),
        "adamw, rate x 1.2": Recipe(ADAMW, 1e-3, reset_factor=0.6),
        "adamw, rate x 1": Recipe(ADAMW, 1e-3),
    },
}


@dataclass(frozen=True)
class Setting:
    """A way to exchange what ranks have learned.

    Attributes:
        compression: of every parameter; None sends gradients as they are.
        reset: send updates with local residuals, instead of gradients with feedback.
    """

    compression: pycomm.TopK | pycomm.Int8 | None = None
    reset: bool = False

    def __str__(self) -> str:
        if self.compression is None:
            return "uncompressed"
        method = "reset" if self.reset else "feedback"
        if isinstance(self.compression, pycomm.Int8):
            return f"{method}, int8"
        values = str(self.compression.values).removeprefix("torch.")
        return f"{method}, {self.compression.density:.0%}, {values}"

    def bits(self) -> float:
        """Bits of a list per parameter; a rank sends one in every step, and receives one."""
        many = 1 << 20
        if self.compression is None:
            return 32
        if isinstance(self.compression, pycomm.Int8):
            return 8 * self.compression.encoded_bytes(many) / many
        header = pycomm.TopK(k=1).encoded_bytes(0)
        return 8 * (self.compression.encoded_bytes(many) - header) / many


RESET = Setting(pycomm.TopK(0.03, values=torch.int8), reset=True)
SETTINGS = (
    Setting(pycomm.TopK(0.01)),
    Setting(pycomm.TopK(0.03, values=torch.int8)),
    RESET,
)


@dataclass(frozen=True)
class Comparison:
    """Settings beside uncompressed training, with every optimizer.

    Attributes:
        goal: the largest mean of relative differences that is wanted.
    """

    ranks: int
    steps: int
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    goal: float = 0.02


USUAL = (
    Comparison(2, 1000, (0, 1, 2), SETTINGS),
    Comparison(4, 1000, (0, 1), (RESET,)),
    Comparison(2, 3000, (0, 1, 2), (RESET,), goal=0.01),
)
# The task of each study, and what is compared in it.
STUDIES = {
    "characters": ("characters", USUAL),
    "digits": ("digits", USUAL),
    "int8": ("characters", (Comparison(2, 1000, (0, 1, 2), (Setting(pycomm.Int8()),), 0.005),)),
    "large": ("large", (Comparison(4, 1000, (0,), (RESET,)),)),
}


@dataclass(frozen=True)
class Outcome:
    """Runs of several seeds beside uncompressed ones.

    Attributes:
        bits: see :meth:`Setting.bits`.
        differences: relative ones of the final losses, by seed.
        reached: whether their mean is at most the comparison's goal.
    """

    ranks: int
    steps: int
    optimizer: str
    setting: str
    bits: float
    losses: list[float]
    uncompressed_losses: list[float]
    differences: list[float]
    reached: bool


def learn(
    group: pycomm.Group,
    tasks: Sequence[Task],
    recipe: Recipe,
    setting: Setting,
    steps: int,
) -> float:
    """One rank's part; the final loss of the parameters that all ranks have."""
    task = tasks[group.rank]
    optimizer = recipe.make_optimizer(task.model.parameters())
    dense = int(DENSE * steps)
    local, factor = None, 1.0
    if setting.reset:
        named = task.model.named_parameters()
        local = hooks.LocalSGDState(
            *(named, optimizer), period=1, compression=setting.compression, group=group,
            gradient_steps=dense, local_residuals=True,
        )  # fmt: skip
        model = pycomm.DataParallel(task.model, state=local)
        factor = recipe.factor(group.size)
    else:
        model = data_parallel(
            task.model, compression=setting.compression, warmup_steps=dense, group=group
        )
    for step in range(steps):
        rate = recipe.rate * rate_factor((step + 1) / (steps + 1))
        optimizer.param_groups[0]["lr"] = rate * (factor if step >= dense else 1)
        optimizer.zero_grad()
        task.loss(model, task.draw()).backward()
        optimizer.step()
        if local is not None:
            local.step()
    if local is None:
        return task.final_loss()
    with local.outer_parameters():
        return task.final_loss()


def final_loss(name: str, ranks: int, seed: int, kind: str, setting: Setting, steps: int) -> float:
    """The final loss in a task, on which all ranks agree."""
    tasks = [ALL_TASKS[name](rank, ranks, seed) for rank in range(ranks)]
    with pycomm.LocalWorld(ranks, 120) as world:
        losses = world.run(learn, tasks, RECIPES[name][kind], setting, steps)
    if len(set(losses)) > 1:
        raise RuntimeError(f"ranks ended with different losses, {losses}")
    return losses[0]


def compare(name: str, asked: Comparison, kind: str) -> Iterable[Outcome]:
    """Trains a task uncompressed and in all settings."""

    def train_all(setting: Setting) -> list[float]:
        return [
            final_loss(name, asked.ranks, seed, kind, setting, asked.steps) for seed in asked.seeds
        ]

    dense = train_all(Setting())
    for setting in asked.settings:
        found = train_all(setting)
        differences = [a / b - 1 for a, b in zip(found, dense, strict=True)]
        yield Outcome(
            *(asked.ranks, asked.steps, kind, str(setting), round(setting.bits(), 3)),
            *(found, dense, differences),
            statistics.fmean(differences) <= asked.goal,
        )


def make_table(name: str, outcomes: Iterable[Outcome]) -> Table:
    table = Table(title=f"{name}: final loss over uncompressed training")
    for column in ("ranks", "steps", "optimizer", "setting"):
        table.add_column(column)
    for column in ("bits", "mean", "lowest", "highest", "goal reached"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        differences = outcome.differences
        shown = statistics.fmean(differences), min(differences), max(differences)
        table.add_row(
            *(str(outcome.ranks), str(outcome.steps), outcome.optimizer, outcome.setting),
            f"{outcome.bits:.2f}",
            *(f"{difference:+.1%}" for difference in shown),
            "yes" if outcome.reached else "NO",
        )
    return table


def study(name: str) -> None:
    """Makes all comparisons of a study, prints them and writes the file of results."""
    task, comparisons = STUDIES[name]
    meta: dict[str, Any] = report.circumstances(f"python -m convergence.sparse {name}")
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    pairs = [(asked, kind) for asked in comparisons for kind in RECIPES[task]]
    for asked, kind in progress.track(pairs, f"training {name}"):
        outcomes += compare(task, asked, kind)
    meta["minutes"] = round((time.monotonic() - begin) / 60, 1)
    Console().print(make_table(name, outcomes))
    path = RESULTS / f"convergence_{'' if name == 'int8' else 'sparse_'}{name}.json"
    report.write_json(str(path), meta, map(asdict, outcomes))


def main() -> None:
    names = sys.argv[1:] or [*TASKS, "int8"]
    if not set(names) <= STUDIES.keys():
        sys.exit(f"a study is one of {', '.join(STUDIES)}, not {' '.join(names)}")
    for name in names:
        study(name)


if __name__ == "__main__":
    main()
