"""Which options of training combine: the table of docs/reference/options.md, by training with both.

``python tests/support/combinations.py`` writes it anew.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pycomm

PAGE = Path(__file__).parents[2] / "docs/reference/options.md"
RANKS, STEPS = 2, 4


@dataclass
class Job:
    """A training loop as a user writes it, for one rank."""

    compression: pycomm.Compression | None = None
    algorithm: str = "auto"
    local_sgd: bool = False
    shard: str | pycomm.Sharding | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = pycomm.optim.FusedAdamW
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    dtype: torch.dtype = torch.float32
    scales: bool = False
    accumulates: bool = False
    joins: bool = False
    weighs: bool = False
    clips: bool = False
    commits: bool = False


def _set(**values: Any) -> Callable[[Job], None]:
    return lambda job: [setattr(job, name, value) for name, value in values.items()] and None


def _option(**values: Any) -> Callable[[Job], None]:
    return lambda job: job.options.update(values)


def _remainder(job: Job) -> None:
    job.dtype = torch.bfloat16
    job.options["master_weights"] = "remainder"


# By the kind of what they choose: two of one kind exclude each other.
FEATURES: dict[str, tuple[str, Callable[[Job], None]]] = {
    "`compression=Int8()`": ("compression", _set(compression=pycomm.Int8())),
    "`compression=TopK()`": ("compression", _set(compression=pycomm.TopK(0.1))),
    '`algorithm="ring"`': ("algorithm", _set(algorithm="ring")),
    "`LocalSGDState`": ("local", _set(local_sgd=True)),
    '`shard="optimizer"`': ("shard", _set(shard="optimizer")),
    '`shard="gradients"`': ("shard", _set(shard="gradients")),
    "`Sharding(replicas=2)`": ("shard", _set(shard=pycomm.Sharding("optimizer", replicas=2))),
    "`no_sync()`": ("accumulates", _set(accumulates=True)),
    "`join()`": ("joins", _set(joins=True)),
    "`weigh()`": ("weighs", _set(weighs=True)),
    "`reduce_gradients()`": ("clips", _set(clips=True)),
    "`should_commit()`": ("commits", _set(commits=True)),
    "`GradScaler`": ("scales", _set(scales=True)),
    "torch's AdamW": ("optimizer", _set(optimizer=torch.optim.AdamW)),
    "`FusedLAMB`": ("optimizer", _set(optimizer=pycomm.optim.FusedLAMB)),
    '`states="8bit"`': ("states", _option(states="8bit")),
    '`master_weights="remainder"`': ("weights", _remainder),
    "`max_norm=`": ("norm", _option(max_norm=1.0)),
}


def train(job: Job, group: pycomm.Group) -> list[torch.Tensor]:
    """Trains for some steps; returns the parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 1)).to(job.dtype)
    optimizer = job.optimizer(module.parameters(), lr=1e-2, **job.options)
    scaler = pycomm.optim.GradScaler("cpu", init_scale=8.0) if job.scales else None
    named = list(module.named_parameters())
    if job.local_sgd:
        common = {"compression": job.compression, "algorithm": job.algorithm, "group": group}
        state: Any = pycomm.hooks.LocalSGDState(named, optimizer, period=2, **common)
    else:
        state = pycomm.hooks.CommState(
            job.compression, named, group=group, grad_scaler=scaler, algorithm=job.algorithm
        )
    model = pycomm.DataParallel(module, state=state, shard=job.shard)
    torch.manual_seed(1 + group.rank)
    batches = [torch.randn(8, 64, dtype=job.dtype) for _ in range(STEPS)]
    if job.joins:
        with model.join():
            for batch in batches[: STEPS - 2 * group.rank]:
                step(job, model, optimizer, state, scaler, batch)
    else:
        for batch in batches:
            step(job, model, optimizer, state, scaler, batch)
    return [parameter.detach().float() for parameter in module.parameters()]


def step(job: Job, model: Any, optimizer: Any, state: Any, scaler: Any, batch: Any) -> None:
    """Takes a step."""

    def backward(rows: torch.Tensor) -> None:
        loss = model(rows).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()

    if job.accumulates:
        with model.no_sync():
            backward(batch[:4])
        batch = batch[4:]
    if job.weighs:
        model.weigh(1.0 + model.comm_state.group.rank)
    backward(batch)
    if job.clips:
        model.reduce_gradients()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not job.commits or model.should_commit():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if job.local_sgd:
        state.step()
    optimizer.zero_grad()


def outcome(*features: str, nodes: list[int] | None = None) -> str:
    """What training with the features does: "" if it trains, otherwise its error."""

    def rank(group: pycomm.Group) -> list[torch.Tensor]:
        job = Job()
        for feature in features:
            FEATURES[feature][1](job)
        return train(job, group)

    torch.manual_seed(0)
    with pycomm.LocalWorld(RANKS, timeout=60, serial=True, nodes=nodes) as world:
        try:
            first, *others = world.run(rank)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    assert all(torch.isfinite(tensor).all() for tensor in first)
    for other in others:
        assert all(map(torch.equal, first, other)), f"{features}: parameters differ"
    return ""


def outcomes(nodes: list[int] | None = None) -> dict[frozenset[str], str]:
    """What all pairs of features of different kinds do, on one node or on several."""
    return {
        frozenset(pair): outcome(*pair, nodes=nodes)
        for pair in itertools.combinations(FEATURES, 2)
        if FEATURES[pair[0]][0] != FEATURES[pair[1]][0]
    }


def tables(found: dict[frozenset[str], str]) -> str:
    """The page's tables: the pairs, and why some raise."""
    names = list(FEATURES)
    errors = sorted(set(found.values()) - {""}, key=list(found.values()).index)
    lines = ["| | " + " | ".join(f"{i + 1}" for i in range(len(names) - 1)) + " |"]
    lines.append("|---" * len(names) + "|")
    for i, row in enumerate(names):
        cells = []
        for column in names[:i]:
            error = found.get(frozenset((row, column)), "-")
            known = {"": "yes", "-": "-"}
            cells.append(known.get(error) or chr(ord("a") + errors.index(error)))
        cells += [""] * (len(names) - 1 - i)
        lines.append(f"| {i + 1} {row} | " + " | ".join(cells) + " |")
    lines += ["", "| | the error |", "|---|---|"]
    lines += [f"| {chr(ord('a') + i)} | {error} |" for i, error in enumerate(errors)]
    return "\n".join(lines) + "\n"


_BEGIN, _END = "<!-- made by tests/support/combinations.py -->\n\n", "\n<!-- end -->"
MARKS = re.compile(f"(?<={_BEGIN}).*(?={_END})", re.DOTALL)


def shown() -> str:
    """The page's tables as they are."""
    found = MARKS.search(PAGE.read_text())
    assert found is not None
    return found[0]


if __name__ == "__main__":
    table = tables(outcomes())
    PAGE.write_text(MARKS.sub(lambda _: table, PAGE.read_text()))
