"""Tracks writes to parameters between steps, for parameters with weights of higher precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pycomm._inputs.tensors import local
from pycomm.optim._executors import is_capturing
from pycomm.optim._storage import MASTER, REMAINDER, is_rounded


class Edits:
    """Applies writes to a parameter to its master weights or remainders.

    torch counts the writes to a tensor, but not those through ``.data``. If there may have been
    any, masters are compared with their parameter, and elements that differ are replaced. With
    remainders, changed elements cannot be found, so the parameter's remainders are all dropped.
    A state of a DTensor is that of its local tensor.
    """

    def __init__(self) -> None:
        # Each parameter's count of writes and its address, after its last step.
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}
        self._changed: set[torch.Tensor] = set()  # whose states were adapted after that step

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Records that the parameters agree with their states."""
        for param in params:
            self._seen[param] = _mark(param)
            self._changed.discard(param)

    def forget(self, param: torch.Tensor) -> None:
        """Forgets the version of a parameter, or of a part, whose states are of another part now.

        It would keep the part's memory alive.
        """
        self._seen.pop(param, None)
        self._changed.discard(param)

    def take_given(self, part: torch.Tensor, given: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Adapts the state of elements of a parameter, of which this rank has stepped a part.

        The other elements' states may not have been adapted to writes to which this part's has.

        Args:
            part: this rank's part.
            given: these elements.
            state: their state.
        """
        if self._is_written(part):
            self._changed.add(part)
        before = self._seen.get(part)
        if part not in self._changed and before == _mark(part):
            return
        if REMAINDER in state and part in self._changed:
            state[REMAINDER].zero_()
        self.take(given, state)

    def settled(self, part: torch.Tensor) -> None:
        """Records that the last write to a part's parameter was that of its weights."""
        if part in self._seen:
            self._seen[part] = _mark(part)

    def take(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Adapts the state to writes to its parameter.

        A state that has just been loaded counts as that of the parameters at the first step, so
        model and optimizer can be restored in either order.
        """
        before, now = self._seen.get(param), _mark(param)
        # In a capture, the graph would repeat this in every replay.
        if before == now or param.dtype == torch.float32 or is_capturing(param.device):
            return
        elements = local(param).detach()
        if MASTER in state and state[MASTER].shape == elements.shape:
            master = state[MASTER]
            own = elements.to(master.device)
            master.copy_(torch.where(is_rounded(own, master, own.dtype), master, own.float()))
            if self._is_written(param):
                self._changed.add(param)
        elif REMAINDER in state and self._is_written(param):
            state[REMAINDER].zero_()
            self._changed.add(param)
        if before is not None:
            self._seen[param] = now

    def _is_written(self, param: torch.Tensor) -> bool:
        """True if torch has counted writes since the state was adapted to them."""
        before = self._seen.get(param)
        return before is not None and before[0] != _mark(param)[0]


def _mark(param: torch.Tensor) -> tuple[int, int]:
    """A parameter's count of writes and its address."""
    elements = local(param)
    # A write to a DTensor does not count as one to its local tensor, nor the other way round.
    count = param._version + (0 if elements is param else elements._version)
    return count, elements.data_ptr()
