"""Parameters that someone else writes into between steps, beside which weights are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pycomm.optim._executors import is_capturing
from pycomm.optim._storage import MASTER, REMAINDER, is_rounded


class Edits:
    """Makes what is written into a parameter count.

    torch counts the writes to a tensor, but not those through ``.data``. Masters are compared with
    their parameter if there may have been any, and follow where it differs. Of remainders nobody
    can tell which ones still belong: all of the parameter's are dropped.
    """

    def __init__(self) -> None:
        # Writes so far and address of each parameter, after its last step.
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Parameters are what their states were made or written for."""
        for param in params:
            self._seen[param] = param._version, param.data_ptr()

    def take(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Adapts the state to what has been written into its parameter.

        A state that has just been loaded is that of the parameters at the first step, in whichever
        order model and optimizer are restored.
        """
        before, now = self._seen.get(param), (param._version, param.data_ptr())
        # A graph would do the same again in every replay.
        if before == now or param.dtype == torch.float32 or is_capturing(param.device):
            return
        if MASTER in state and state[MASTER].shape == param.shape:
            master = state[MASTER]
            own = param.detach().to(master.device)
            master.copy_(torch.where(is_rounded(own, master, own.dtype), master, own.float()))
        elif REMAINDER in state and before is not None and before[0] != now[0]:
            state[REMAINDER].zero_()
        if before is not None:
            self._seen[param] = now
