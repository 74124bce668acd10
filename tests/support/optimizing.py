"""Optimizers over small parameters, as pycomm runs them and as the golden models say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import golden_optim as reference
import torch

import pycomm.optim as optim

SHAPES = ((33, 7), (5000,), (64, 80), (0, 3), (1,), (1024,))
OPTIMIZERS = {
    "adam": optim.FusedAdam,
    "adamw": optim.FusedAdamW,
    "sgd": optim.FusedSGD,
    "lion": optim.FusedLion,
    "lamb": optim.FusedLAMB,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-2, "betas": (0.4, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "lamb": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1},
}


def parameters(
    dtype: torch.dtype = torch.float32, seed: int = 0, shapes: Any = SHAPES
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def gradients(
    params: list[torch.nn.Parameter], step: int, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Gradients with magnitudes that differ between ranges of elements, and some zeros."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for param in params:
        values = torch.randn(param.shape, generator=generator)
        sizes = torch.randint(-12, 3, (param.numel() // 50 + 1,), generator=generator).exp2()
        values *= sizes.repeat_interleave(50)[: param.numel()].view(param.shape)
        values[torch.randint(0, 30, param.shape, generator=generator) == 0] = 0
        made.append(values.to(dtype or param.dtype))
    return made


@dataclass
class Case:
    """An optimizer with its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    master: str | None = None
    states: str = "fp32"
    stochastic: bool = False
    seed: int = 0

    def __str__(self) -> str:
        parts = [self.name, str(self.dtype).removeprefix("torch."), self.master, self.states]
        parts += ["stochastic"] if self.stochastic else []
        return "-".join([str(p) for p in parts] + [f"{k}={v}" for k, v in self.options.items()])

    @property
    def all_options(self) -> dict[str, Any]:
        return {**DEFAULTS[self.name], **self.options}

    def make(self, params: Any, **more: Any) -> optim._optimizer.FusedOptimizer:
        return OPTIMIZERS[self.name](
            params,
            **self.all_options,
            master_weights=self.master,
            states=self.states,
            stochastic_rounding=self.stochastic,
            seed=self.seed,
            **more,
        )

    def model(self, params: list[torch.nn.Parameter]) -> list[reference.Parameter]:
        return [
            reference.Parameter(
                self.name,
                param.detach().float().numpy().ravel().copy(),
                self.all_options,
                self.dtype,
                self.master,
                self.states,
                self.stochastic,
                self.seed,
                stream,
            )
            for stream, param in enumerate(params)
        ]


def set_gradients(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad


def run(case: Case, steps: int = 3, **more: Any) -> tuple[list[torch.nn.Parameter], Any]:
    """Steps over random gradients."""
    params = parameters(case.dtype)
    optimizer = case.make(params, **more)
    for step in range(steps):
        set_gradients(params, gradients(params, step, case.grad_dtype))
        optimizer.step()
    return params, optimizer
