"""Loss scaling without a separate pass over the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from pycomm.optim._optimizer import FusedOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with a :meth:`step` that leaves all work to a fused optimizer.

    torch's own scaler reads and writes every gradient before a step, to look for infinities. A
    fused optimizer looks for them while it measures the norm for clipping, and unscales as it
    steps. Everything else, including arguments and other optimizers, is as in torch.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`torch.amp.GradScaler.unscale_`. Averages gradients first if a step would."""
        if self._enabled and isinstance(optimizer, FusedOptimizer):
            optimizer.average_gradients()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See :meth:`torch.amp.GradScaler.step`."""
        if not self._enabled or not isinstance(optimizer, FusedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:  # unscaled by hand
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise RuntimeError("closures are not supported while gradients are scaled")
        scale, _ = self._check_scale_growth_tracker("step")
        own = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = scale if own is None else scale * own  # type: ignore[attr-defined]
        optimizer.found_inf = None
        try:
            loss: float | None = optimizer.step()
            found = optimizer.found_inf
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        # Without gradients nothing has been checked, and update() raises an error about it.
        state["found_inf_per_device"] = {} if found is None else {scale.device: found}
        state["stage"] = OptState.STEPPED
        return loss
