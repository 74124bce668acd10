"""Training loops as users write them, and the same steps by plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import optim

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "int8": {"compression": pycomm.Int8()},
    "sharded int8": {"shard": "optimizer", "compression": pycomm.Int8()},
}
SHARDED = [mode for mode, options in MODES.items() if "shard" in options]
RATE = 0.1


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with the same parameters on every rank; ranks may be threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return module


def network(seed: int = 0) -> nn.Module:
    """One of its parameters is large enough to be compressed."""
    layers = nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    return filled(nn.Sequential(*layers), seed)


def batch(rank: int, step: int, count: int = 16) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def optimizer_for(
    model: nn.Module | Iterable[torch.Tensor], mode: str = "plain"
) -> torch.optim.Optimizer:
    """SGD of torch, or where ranks divide the states, of pycomm."""
    make = optim.FusedSGD if mode in SHARDED else torch.optim.SGD
    params = model.parameters() if isinstance(model, nn.Module) else model
    return make([p for p in params if p.requires_grad], lr=RATE)


def wrap(module: nn.Module, group: pycomm.Group, mode: str, **options: Any) -> pycomm.DataParallel:
    return data_parallel(module, group=group, **MODES[mode], **options)


def alone(
    make: Callable[[], nn.Module],
    losses: Callable[[nn.Module, int, int], Iterable[torch.Tensor]],
    steps: Iterable[int] = range(3),
    ranks: int = 2,
) -> nn.Module:
    """One process of plain torch that steps on the mean over ranks of the sums of their losses."""
    module = make()
    optimizer = optimizer_for(module)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(ranks):
            for loss in losses(module, rank, step):
                (loss / ranks).backward(retain_graph=True)
        optimizer.step()
    return module


def assert_alike(got: nn.Module, wanted: nn.Module, mode: str = "plain") -> None:
    """Parameters equal plain torch's, up to rounding and the loss of int8."""
    tolerance = 1e-3 if "int8" in mode else 1e-6
    for (name, one), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=lambda m, n=name: n + m)


def check_training(
    world: Callable[[int], pycomm.LocalWorld],
    mode: str,
    wanted: nn.Module,
    backward: Callable[[nn.Module, int, int], object],
) -> None:
    """Trains for three steps on two ranks; the parameters must end as those of `wanted`.

    ``backward(model, rank, step)`` runs all backwards of a step.
    """

    def body(group: pycomm.Group) -> None:
        model = wrap(network(), group, mode)
        optimizer = optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, group.rank, step)
            optimizer.step()
        assert_alike(model.module, wanted, mode)

    world(2).run(body)


def assert_same_on_all_ranks(model: nn.Module, group: pycomm.Group) -> None:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = flat.clone(), flat.clone()
    pycomm.all_reduce(lowest, "min", group=group)
    pycomm.all_reduce(highest, "max", group=group)
    assert torch.equal(lowest, highest)
