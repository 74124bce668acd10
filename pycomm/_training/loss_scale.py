"""The loss scale of a GradScaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycomm._runtime.staging import StandIn, fetch
from pycomm._runtime.torch_private import scale_of

if TYPE_CHECKING:
    import torch

    from pycomm.group import Group


class LossScale:
    """Reads a GradScaler's scale; without one there is none."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._staged: StandIn | None = None

    @property
    def known(self) -> bool:
        """True if there is a GradScaler."""
        return self._scaler is not None

    def read(self, group: Group) -> torch.Tensor | None:
        """The scale, as a tensor on the device where gradients are exchanged; None without one."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale = scale_of(self._scaler)  # none before the first loss was scaled
        if scale is None or not group._exchanges_on_host(scale.device):
            return scale
        if self._staged is None:
            self._staged = StandIn(scale)
        self._staged.tensor = scale
        fetch(self._staged)
        return self._staged.host

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying."""
        return {"_scaler": self._scaler, "_staged": None}
