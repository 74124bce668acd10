"""Exchanges that count on all ranks that survive, or on none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pycomm._training.comm_state import CommState
from pycomm._training.step import Step


@contextlib.contextmanager
def on_all_or_none(state: CommState) -> Iterator[None]:
    """Surrounds exchanges whose results are used only afterwards.

    At the end all ranks decide whether the exchanges count. If the group fails before, the state
    is as it was, and can repeat them in a smaller group.
    """
    step, residuals = state.step, state._residuals.copy()
    try:
        yield
        if state.group._decides:
            state.group.should_commit()
    except BaseException:  # also if this rank is interrupted
        state._now.wait()
        state._now = Step()
        state._flying.clear()
        state._residuals.restore(residuals)
        state.step = step
        raise
