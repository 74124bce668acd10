"""Training steps of sharded wrappers between nodes, beside the wrapper without shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pycomm
from pycomm.bench.optimizers import SCHEMES
from pycomm.bench.sharding import WrappedTrainee
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


def make(group: pycomm.Group, parameters: int) -> dict[str, WrappedTrainee]:
    """Each contestant, with FusedAdamW in fp32."""
    settings = TrainingSettings(ranks=group.size, parameters=parameters, batch=BATCH)
    scheme = SCHEMES["fp32"]
    return {name: WrappedTrainee(settings, scheme, group, **how) for name, how in STEPPERS.items()}


def cases(steppers: dict[str, WrappedTrainee]) -> dict[str, dict[str, Callable[[], None]]]:
    """The calls of each contestant: of a whole step, and of exchange and optimizer alone."""
    for stepper in steppers.values():
        stepper.step()  # so that buckets have their order
    whole = {name: stepper.step for name, stepper in steppers.items()}
    parts: dict[str, Callable[[], None]] = {name: s.finish for name, s in steppers.items()}
    return {"step": whole, "exchange and optimizer": parts}
