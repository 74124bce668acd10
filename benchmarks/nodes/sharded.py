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
STEPS = 3  # in a call, because a step may end before its parameters have arrived
_INT8 = {"compression": pycomm.Int8(), "publish": pycomm.Int8()}
STEPPERS: dict[str, dict[str, Any]] = {
    BASE: {},
    "unsharded int8": {"compression": pycomm.Int8()},
    "sharded": {"shard": "optimizer"},
    "sharded int8": {"shard": "optimizer", **_INT8},
    "sharded int8 overlapping": {"shard": "optimizer", **_INT8, "overlap_params": True},
}


class Several(Own):
    """Takes several steps at a time."""

    def whole(self) -> None:
        """Takes whole steps of training."""
        for _ in range(STEPS):
            self.step()
        self.settle()

    def parts(self) -> None:
        """Exchanges gradients that are there, and steps."""
        for _ in range(STEPS):
            self.finish()
        self.settle()


def make(group: pycomm.Group, parameters: int) -> dict[str, Several]:
    """Each contestant, with FusedAdamW in fp32."""
    settings = TrainingSettings("nodes", group.size, parameters, BATCH, (), None, 60.0, None, "")
    scheme = SCHEMES["fp32"]
    return {name: Several(settings, scheme, group, **how) for name, how in STEPPERS.items()}


def cases(steppers: dict[str, Several]) -> dict[str, dict[str, Callable[[], None]]]:
    """The calls of each contestant: of whole steps, and of exchange and optimizer alone.

    The latter have nothing that they could overlap with.
    """
    for stepper in steppers.values():
        stepper.whole()  # so that buckets have their order
    whole = {name: stepper.whole for name, stepper in steppers.items()}
    parts = {name: s.parts for name, s in steppers.items() if "overlapping" not in name}
    return {"step": whole, "exchange and optimizer": parts}
