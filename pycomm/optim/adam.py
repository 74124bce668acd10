"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from pycomm.optim._optimizer import FusedOptimizer
from pycomm.optim._options import Group, Options, check_betas, check_rates, check_torch_flags


class FusedAdam(FusedOptimizer):
    """torch.optim.Adam in one pass.

    Args:
        params: parameters or groups of them, as for :class:`torch.optim.Adam`.
        lr: learning rate, a number or a tensor.
        betas: decay rates of the first and the second moment.
        eps: added to the divisor.
        weight_decay: L2 penalty.
        amsgrad: divide by the largest second moment so far.
        foreach: must be None or False.
        maximize: maximize the loss instead of minimizing it.
        capturable: accepted and ignored; every step can be captured.
        differentiable: must be False.
        fused: must be None or True.
        decoupled_weight_decay: decay weights as AdamW does.
        options: see :class:`Options`.
    """

    _rule = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        check_torch_flags({"foreach": foreach, "fused": fused, "differentiable": differentiable})
        check_rates(lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, options)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]

    def _own_settings(self, group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "amsgrad": group["amsgrad"],
            "decoupled": group["decoupled_weight_decay"],
        }


class FusedAdamW(FusedAdam):
    """torch.optim.AdamW in one pass: :class:`FusedAdam` with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if "decoupled_weight_decay" in options:
            raise TypeError("FusedAdamW always decouples weight decay: use FusedAdam to choose")
        options["decoupled_weight_decay"] = True
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, always with decoupled weight decay, as torch's AdamW does."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
