"""Local SGD in backward: most steps leave gradients alone, the first ones may exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from pycomm._runtime.torch_private import not_compiled
from pycomm._training.comm_state import CommState
from pycomm._training.hook_state import HookState
from pycomm._training.parameters import Parameters
from pycomm.group import Group


class LocalGradients(HookState):
    """Takes the gradients of a model whose ranks exchange parameters.

    Args:
        parameters: the model's parameters.
        gradient_steps: the number of first steps, the warm-up, that exchange gradients.
        group: the ranks that do so.
        inner_group: ranks that exchange gradients in every step after the warm-up, or None.

    Attributes:
        steps: the number of steps so far.
    """

    def __init__(
        self,
        parameters: Parameters,
        gradient_steps: int,
        group: Group,
        inner_group: Group | None,
    ) -> None:
        self.steps = 0
        self._parameters = parameters
        self._gradient_steps = gradient_steps
        # These average gradients, during the warm-up and after it.
        self._early = CommState(group=group) if gradient_steps else None
        self._late = None if inner_group is None else CommState(group=inner_group)
        self._had_backward = False

    def exchanges(self, tensor: torch.Tensor) -> bool:
        """True for a parameter that ranks exchange."""
        return id(tensor) in self._parameters.entries

    @property
    def gradient_group(self) -> Group | None:
        """The group that exchanges gradients in this step, or None."""
        gradients = self._gradients
        return None if gradients is None else gradients.group

    def start(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        backward: int = -1,
        *,
        begins: Sequence[int] | None = None,
    ) -> Future[Any]:
        """Takes a bucket of gradients, and exchanges it only if this step exchanges gradients.

        See :meth:`CommState.start`.
        """
        gradients = self._note_backward(parameters)
        if gradients is not None:
            return gradients.start(buffer, parameters, backward, begins=begins)
        return _done(buffer)

    @not_compiled
    def start_in_backward(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Future[Any]:
        """See :meth:`start` and :meth:`CommState.start_in_backward`."""
        gradients = self._note_backward(parameters)
        if gradients is not None:
            return gradients.start_in_backward(buffer, parameters)
        return _done(buffer)

    def finish(self, backward: int = -1) -> None:
        """See :meth:`CommState.finish`."""
        if self._gradients is not None:
            self._gradients.finish(backward)

    def give_back(self) -> None:
        """See :meth:`CommState.give_back`."""
        if self._gradients is not None:
            self._gradients.give_back()

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether a step of the optimizer is taken, before the optimizer's step.

        In the warm-up, or with `inner_group`, all ranks that exchange gradients take the step or
        none does; see :meth:`CommState.should_commit`. Otherwise every rank decides for itself:
        this returns `ready`. Call :meth:`step` after a step that is not taken, too.
        """
        if not isinstance(ready, bool):
            raise TypeError(f"ready must be True or False, got {ready!r}")
        gradients = self._gradients
        return ready if gradients is None else gradients.should_commit(ready)

    @property
    def _gradients(self) -> CommState | None:
        return self._early if self.steps < self._gradient_steps else self._late

    def _note_backward(self, parameters: Sequence[torch.Tensor]) -> CommState | None:
        if not self._had_backward:
            self._parameters.of(parameters)  # raises if they are another model's
        self._had_backward = True
        return self._gradients


def _done(buffer: torch.Tensor) -> Future[Any]:
    future: Future[Any] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
