"""Lion."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from pycomm.optim._optimizer import FusedOptimizer
from pycomm.optim._options import Group, Options, check_betas, check_rates


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms") in one pass.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or a tensor.
        betas: decay rates of the step's direction and of the momentum.
        weight_decay: decoupled weight decay.
        maximize: maximize the loss instead of minimizing it.
        options: see :class:`Options`.
    """

    _rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        check_rates(lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, options)

    def _state_names(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg",)

    def _own_settings(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2}
