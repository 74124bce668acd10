"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pycomm import _C
from pycomm.optim._optimizer import (
    FusedOptimizer,
    Group,
    check_rates,
    check_torch_flags,
    number,
    own_options,
)

_SGD = 1  # csrc/core/optimizer.h


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD in one pass.

    Args:
        params: as for :class:`torch.optim.SGD`, as are all arguments up to `maximize`.
        lr: learning rate, a number or a tensor.
        momentum: factor of the momentum.
        dampening: what momentum takes off the gradient, but for the first step.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: follow the gradient upwards.
        foreach: only None or False.
        differentiable: only False.
        fused: only None or True.
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
        master_weights: str | None = None,
        states: str = "fp32",
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
    ) -> None:
        check_torch_flags(foreach=foreach, fused=fused, differentiable=differentiable)
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
            **own_options(master_weights, states, stochastic_rounding, seed),
        }
        super().__init__(params, defaults, max_norm)

    def _state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _settings(self, group: Group) -> _C.OptimizerSettings:
        return _C.OptimizerSettings(
            _SGD,
            lr=number(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=number(group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            seed=group["seed"],
        )
