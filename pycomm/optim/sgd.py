"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from pycomm.optim._optimizer import FusedOptimizer
from pycomm.optim._options import Group, Options, check_rates, check_torch_flags


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD in one pass.

    Args:
        params: parameters or groups of them, as for :class:`torch.optim.SGD`.
        lr: learning rate, a number or a tensor.
        momentum: factor of the momentum.
        dampening: the momentum adds (1 - dampening) times the gradient, except in the first step.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: maximize the loss instead of minimizing it.
        foreach: must be None or False.
        differentiable: must be False.
        fused: must be None or True.
        options: see :class:`Options`.
    """

    _rule = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_torch_flags({"foreach": foreach, "fused": fused, "differentiable": differentiable})
        check_rates(lr, momentum=momentum, weight_decay=float(weight_decay))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov=True needs momentum and no dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, options)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _own_settings(self, group: Group) -> dict[str, Any]:
        return {
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "nesterov": group["nesterov"],
        }
