"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pycomm import _C
from pycomm.optim._optimizer import (
    FusedOptimizer,
    Group,
    check_betas,
    check_rates,
    number,
    own_options,
)

_LION = 2  # csrc/core/optimizer.h


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms") in one pass.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or a tensor.
        betas: of the step's direction, and of the momentum.
        weight_decay: decoupled weight decay.
        maximize: follow the gradient upwards.
        master_weights: see :class:`FusedAdam`.
        states: of the momentum; ``"fp16"`` is possible too.
        stochastic_rounding: of bf16 parameters without master weights.
        seed: of its random bits.
        max_norm: clips the norm of all gradients together.
    """

    _state_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "bf16", "8bit")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        master_weights: str | None = None,
        states: str = "fp32",
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
    ) -> None:
        check_rates(lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
            **own_options(master_weights, states, stochastic_rounding, seed),
        }
        super().__init__(params, defaults, max_norm)

    def _state_names(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg",)

    def _settings(self, group: Group) -> _C.OptimizerSettings:
        beta1, beta2 = group["betas"]
        return _C.OptimizerSettings(
            _LION,
            lr=number(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            seed=group["seed"],
        )
