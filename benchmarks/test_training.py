"""Training steps of two ranks: the hook and the wrapper beside DistributedDataParallel alone."""

from __future__ import annotations

from typing import Any

import pytest

import pycomm
from benchmarks.ranks import Ranks
from pycomm.bench import launch, training, verify
from pycomm.bench.measure import Prepared
from pycomm.bench.report import MIB

IDLE = "idle"  # DistributedDataParallel without exchange, whose time is that of computing

TORCH = "torch"  # DistributedDataParallel on the device's peer


def make(
    group: pycomm.Group, name: str, settings: training.TrainingSettings
) -> tuple[Prepared, int]:
    """A training step, and the wrong elements of its gradients."""
    trainee = training.make(name, settings, group)
    wrong = 0
    if name != IDLE:
        alone = training.make(IDLE, settings, group)
        wrong = verify.count_wrong_gradients(trainee.model, alone.model)
    return Prepared(trainee.rows, trainee.rows, trainee.step), wrong


@pytest.mark.parametrize("name", [IDLE, *training.MODES, TORCH])
def test_step(benchmark: Any, two_ranks: Ranks, device: str, name: str) -> None:
    if name == TORCH:
        name = training.PEERS[device]
        if device == "cuda" and (reason := launch.without_nccl(two_ranks.group.size)):
            pytest.skip(f"NCCL {reason}")
    benchmark.group = f"training step, {device}"
    parameters = 8 * MIB if benchmark.enabled else training.WIDTH**2
    settings = training.TrainingSettings(ranks=2, parameters=parameters, batch=8, device=device)
    two_ranks.time(benchmark, make, name, settings)
