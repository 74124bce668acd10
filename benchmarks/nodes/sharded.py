"""Training steps of sharded wrappers between nodes, beside the wrapper without shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pycomm
from pycomm.bench.optim_tasks import SCHEMES
from pycomm.bench.shard_tasks import Own
from pycomm.bench.training import TrainingSettings

BASE = "unsharded"
BATCH = 8  # so small that backward hides little of an exchange
STEPPERS: dict[str, dict[str, Any]] = {
    BASE: {},
    "unsharded int8": {"compression": pycomm.Int8()},
    "sharded": {"shard": "optimizer"},
    "sharded int8": {
        "compression": pycomm.Int8(),
        "shard": pycomm.Sharding("optimizer", publish=pycomm.Int8()),
    },
}


def make(group: pycomm.Group, parameters: int) -> dict[str, Own]:
    """Each contestant, with FusedAdamW in fp32."""
    settings = TrainingSettings("nodes", group.size, parameters, BATCH, (), None, 60.0, None, "")
    scheme = SCHEMES["fp32"]
    return {name: Own(settings, scheme, group, **how) for name, how in STEPPERS.items()}


def cases(steppers: dict[str, Own]) -> dict[str, dict[str, Callable[[], None]]]:
    """The calls of each contestant: of a whole step, and of exchange and optimizer alone."""
    for stepper in steppers.values():
        stepper.step()  # so that buckets have their order
    whole = {name: stepper.step for name, stepper in steppers.items()}
    parts: dict[str, Callable[[], None]] = {name: s.finish for name, s in steppers.items()}
    return {"step": whole, "exchange and optimizer": parts}
