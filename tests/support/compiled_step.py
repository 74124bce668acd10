"""A training step whose forward, backward and update are compiled, with operations of pycomm."""

from __future__ import annotations

from collections.abc import Callable

import torch

import pycomm

OPS = torch.ops.pycomm
STEPS, ROWS, RATE = 3, 8, 0.02


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 16), (16, 1)]
    return [torch.randn(*shape, generator=generator) / shape[0] ** 0.5 for shape in shapes]


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(ROWS, 6, generator=generator) * (1 + rank) / 2 + rank / 2


def outputs(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    mean: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A layer, a normalisation with the statistics of all samples, another layer."""
    h = (x @ first).tanh()
    centre = mean(h)
    return (h - centre) * (mean(h.square()) - centre.square() + 0.1).rsqrt() @ second


def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (y - x.sum(1, keepdim=True)).square().mean()


def train(
    group: pycomm.Group, device: str, backend: str, compression: str = ""
) -> list[torch.Tensor]:
    """The parameters after some steps, on the CPU; ranks have batches of their own."""
    name, size = group.name, group.size
    parameters = [weight.to(device).requires_grad_() for weight in weights()]

    def average(value: torch.Tensor) -> torch.Tensor:
        return OPS.all_reduce(value.mean(0), "avg", "auto", name)

    def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = outputs(x, first, second, average)
        return loss_of(y, x) / size

    def update(
        first: torch.Tensor,
        second: torch.Tensor,
        gradients: tuple[torch.Tensor, ...],
        step: int,
    ) -> None:
        for parameter, gradient in zip((first, second), gradients, strict=True):
            if compression:
                total = OPS.compressed_all_reduce(
                    gradient, compression, "sum", "auto", step, 0, False, name
                )
            else:
                total = OPS.all_reduce(gradient, "sum", "auto", name)
            parameter.sub_(RATE * total)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    apply = torch.compile(update, fullgraph=True, backend=backend)
    for step in range(STEPS):
        loss = compiled(batch(group.rank, step).to(device), *parameters)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            apply(*parameters, gradients, step)
    return [parameter.detach().cpu() for parameter in parameters]


def train_alone(size: int) -> list[torch.Tensor]:
    """The same with all ranks' batches in one process, without pycomm."""
    parameters = [weight.requires_grad_() for weight in weights()]
    for step in range(STEPS):
        x = torch.cat([batch(rank, step) for rank in range(size)])
        y = outputs(x, *parameters, lambda value: value.mean(0))
        gradients = torch.autograd.grad(loss_of(y, x), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= RATE * gradient
    return [parameter.detach() for parameter in parameters]


def check(found: list[torch.Tensor], size: int, compression: str) -> None:
    """Compares the parameters with the ones that one process computes."""
    wanted, tolerance = train_alone(size), 0.005 if compression else 1e-5
    for parameter, begin in zip(wanted, weights(), strict=True):
        assert (parameter - begin).abs().max() > 10 * tolerance
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
