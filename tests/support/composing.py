"""A small network, and how one process trains it, for libraries that spread it over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_net(blocks: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def batch(step: int, part: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(rows, WIDTH, generator=generator)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def alone(steps: int = 4, parts: int = 4) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of one process that averages over the parts of each batch."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(parts):
            loss = loss_of(net, batch(step, part)) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, [p.detach() for p in net.parameters()]


def close(ours: Iterable[Any], expected: Iterable[Any]) -> None:
    for a, b in zip(ours, expected, strict=True):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def mean_loss(loss: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The mean over a group's ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG, group=group)
    return total.item()
