"""accelerate saves a state's residuals with its own.

.. code-block:: python

    model, optimizer = accelerator.prepare(net, optimizer)
    state = pycomm.hooks.Int8State(net.named_parameters())
    state.register(model)
    accelerator.register_for_checkpointing(Gathered(state))
"""

from __future__ import annotations

from typing import Any

from pycomm._training.hook_state import HookState


class Gathered:
    """Lets one process save the residuals of all ranks, for ``register_for_checkpointing``.

    accelerate saves a registered object on its main process only. There, a state alone would save
    only the residuals of rank 0, which the other ranks refuse. A checkpoint of this loads on any
    number of ranks.

    Args:
        state: a state of :mod:`pycomm.hooks`, or a wrapper's ``comm_state``.
    """

    def __init__(self, state: HookState) -> None:
        if not isinstance(state, HookState):
            raise TypeError(f"state must be a state of pycomm.hooks, got {state!r}")
        self._state: Any = state

    def state_dict(self) -> dict[str, Any]:
        """All residuals on rank 0, elsewhere nothing; all ranks must call this."""
        gathered: dict[str, Any] = self._state.state_dict(gathered=True)
        return gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of rank 0's :meth:`state_dict`; each rank takes its own residuals."""
        self._state.load_state_dict(state_dict)
