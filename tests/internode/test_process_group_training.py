"""Hooks, wrappers, sharded steps and local SGD between nodes, over process groups."""

from __future__ import annotations

from typing import Any

import compressing
import pytest
import spanning
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm.optim import FusedAdamW

INT8, TOPK = pycomm.Int8(), pycomm.TopK(density=0.02, density_steps=3)
STOCHASTIC = pycomm.Int8(rounding="stochastic", seed=3)
MOMENTUM = pycomm.TopK(density=0.02, momentum=0.9, values=torch.int8)
LAST = 4  # step


class Model(nn.Module):
    """One of its layers is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.other = nn.Linear(300, 200), nn.Linear(200, 200)
        self.last = nn.Linear(200, 30)

    def forward(self, x: torch.Tensor, others: bool) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last(self.other(x) if others else x)


def train(
    group: pycomm.Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    local: hooks.LocalSGDState | None = None,
) -> None:
    for step in range(LAST + 1):
        generator = torch.Generator().manual_seed(100 * step + group.rank)
        x = torch.randn(8, 300, generator=generator)
        if step == LAST - 1 and scaler.is_enabled() and group.rank == 0:
            x[0, 0] = float("inf")  # no rank takes this step
        optimizer.zero_grad()
        scaler.scale(model(x, others=step != 2).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if local is not None:
            local.step()


def scaler_of(scaled: bool) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)


def hooked(
    group: pycomm.Group, compression: pycomm.Compression | None, scaled: bool
) -> list[torch.Tensor]:
    module, scaler = Model(), scaler_of(scaled)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    state = hooks.CommState(
        compression, module.named_parameters(), group=group,
        grad_scaler=scaler if scaled else None, warmup_steps=1,
    )  # fmt: skip
    state.register(model)
    train(group, model, torch.optim.SGD(module.parameters(), lr=0.1), scaler)
    assert group.rank or state.stats()["bytes_wire"] > 0  # rank 0 carries a stripe
    return [*module.parameters(), *state.tensors()]


def wrapped(
    group: pycomm.Group, compression: pycomm.Compression | None, options: dict[str, Any]
) -> list[torch.Tensor]:
    module = Model()
    model = pycomm.DataParallel(module, compression=compression, group=group, **options)
    train(group, model, FusedAdamW(module.parameters(), lr=1e-3), scaler_of(False))
    return list(module.parameters())


def local(group: pycomm.Group, compression: pycomm.Compression | None) -> list[torch.Tensor]:
    module = Model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = hooks.LocalSGDState(
        module.named_parameters(), optimizer, period=2, compression=compression, outer_lr=0.7,
        outer_momentum=0.9, group=group,
    )  # fmt: skip
    model = pycomm.DataParallel(module, local_sgd=state)
    train(group, model, optimizer, scaler_of(False), state)
    return list(module.parameters())


PROGRAMS = [
    *((hooked, (compression, scaled)) for compression in (None, INT8, STOCHASTIC, TOPK, MOMENTUM)
      for scaled in (False, True)),
    *((wrapped, (compression, {})) for compression in (None, pycomm.Cast(), INT8, TOPK)),
    *((wrapped, (compression, {"shard": "optimizer"})) for compression in (None, INT8, TOPK)),
    (wrapped, (INT8, {"shard": "optimizer", "publish": pycomm.Int8()})),
    (wrapped, (None, {"shard": "gradients"})),
    *((local, (compression,)) for compression in (None, INT8, TOPK)),
]  # fmt: skip


def programs(group: pycomm.Group) -> list[list[torch.Tensor]]:
    made = [program(group, *options) for program, options in PROGRAMS]
    return [[tensor.detach().clone() for tensor in tensors] for tensors in made]


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]], ids=str)
def test_trains_as_over_the_other_transport(nodes):
    """Parameters and residuals have the same bits, whatever is compressed, scaled or divided."""
    wanted = spanning.run(nodes, programs)
    seen = spanning.run(nodes, programs, transport="process_group")
    for rank, (found, expected) in enumerate(zip(seen, wanted, strict=True)):
        for (program, options), tensors, others in zip(PROGRAMS, found, expected, strict=True):
            for i, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
                compressing.compare(
                    f"{program.__name__} {options}, tensor {i}, rank {rank}", tensor, other
                )
