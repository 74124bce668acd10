"""LAMB."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from pycomm.optim._optimizer import FusedOptimizer
from pycomm.optim._options import Group, Options, check_betas, check_rates


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning"), in two passes.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or a tensor.
        betas: decay rates of the first and the second moment.
        eps: added to the divisor.
        weight_decay: decoupled weight decay; the norm of the step includes it.
        always_adapt: scale steps by the norm of the weights even if `weight_decay` is 0 (usually
            for biases and norms).
        maximize: maximize the loss instead of minimizing it.
        options: see :class:`Options`.
    """

    _rule = "lamb"
    _needs_whole_norms = True

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
        **options: Unpack[Options],
    ) -> None:
        check_rates(lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "always_adapt": always_adapt,
            "maximize": maximize,
        }
        super().__init__(params, defaults, options)

    def _state_names(self, group: Group) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg", "exp_avg_sq")

    def _own_settings(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "adapt": group["always_adapt"] or group["weight_decay"] != 0,
        }
