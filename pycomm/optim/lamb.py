"""LAMB."""

from __future__ import annotations

from typing import Any

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

_LAMB = 3  # csrc/core/optimizer.h


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning"), in two passes.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or a tensor.
        betas: of the first and the second moment.
        eps: added to the divisor.
        weight_decay: decoupled, and part of what the step's size is measured by.
        always_adapt: scale steps by the norm of the weights also where `weight_decay` is 0 (biases
            and norms, usually).
        maximize: follow the gradient upwards.
        master_weights: see :class:`FusedAdam`.
        states: ``"fp32"``, ``"bf16"`` or ``"8bit"``.
        stochastic_rounding: see :class:`FusedAdam`.
        seed: of its random bits.
        max_norm: clips the norm of all gradients together.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = False,
        maximize: bool = False,
        master_weights: str | None = None,
        states: str = "fp32",
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
    ) -> None:
        check_rates(lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
            "maximize": maximize,
            **own_options(master_weights, states, stochastic_rounding, seed),
        }
        super().__init__(params, defaults, max_norm)

    def _state_names(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg", "exp_avg_sq")

    def _settings(self, group: Group) -> _C.OptimizerSettings:
        beta1, beta2 = group["betas"]
        return _C.OptimizerSettings(
            _LAMB,
            lr=number(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            adapt=group["always_adapt"] or group["weight_decay"] != 0,
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            seed=group["seed"],
        )
