"""Fused steps of every rule beside torch's, of 4 MiB of parameters: on one core, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pycomm.bench.measure import synchronised
from pycomm.bench.optimizers import (
    OPTIMIZERS,
    SCHEMES,
    OptimizerBenchSettings,
    our_step,
    peer_step,
)
from pycomm.bench.peers import TORCH_RULES
from pycomm.bench.report import MIB

STORED = ("fp32", "bf16_remainder", "bf16_remainder_8bit")
# With unscaling, check and clipping, too.
CONTESTANTS = [(rule, name) for rule in OPTIMIZERS for name in ("pycomm", "pycomm, full")]
CONTESTANTS += [(rule, "torch") for rule in TORCH_RULES]


@pytest.mark.parametrize(("rule", "name"), CONTESTANTS)
@pytest.mark.parametrize("scheme", STORED)
def test_step(
    benchmark: Any, device: str, fit: Callable[[int], int], rule: str, scheme: str, name: str
) -> None:
    benchmark.group = f"{rule}, {scheme}, {device}"
    stored = SCHEMES[scheme]
    count = fit(4 * MIB) // stored.dtype.itemsize
    settings = OptimizerBenchSettings(name=rule, count=count, device=device)
    if name == "torch":
        step = peer_step(name, settings, stored)
    else:
        step = our_step(settings, stored, full=name == "pycomm, full")
    benchmark(synchronised(step, device))
