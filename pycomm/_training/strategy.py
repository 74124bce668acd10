"""What a wrapper does with its gradients.

The reducer (reducer.py) watches backwards, and hands over buckets that are full. A strategy sends
them, and gives parameters their gradients at the end of backward. The one here averages gradients
on all ranks through the wrapper's state. If the state exchanges parameters instead, gradients stay
as they are. The strategies that divide optimizer states or gradients among the ranks are in
sharding.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

import torch

from pycomm._training.buckets import Bucket, window_layout
from pycomm._training.flat import Layout, move_out
from pycomm._training.parameters import complete_parts, count_division, known_of, record_of

if TYPE_CHECKING:
    from pycomm._training.buckets import WeightedMean
    from pycomm._training.hook_state import HookState


class Strategy:
    """Averages gradients on all ranks, through the wrapper's state.

    Args:
        state: exchanges buckets.
        parameters: the parameters whose gradients are exchanged, in the order of backward.

    Attributes:
        layout: the places of the gradients.
    """

    layout: Layout

    def __init__(self, state: HookState, parameters: Sequence[torch.Tensor]) -> None:
        self.state = state
        state.follow_formats(parameters)
        self._take_over(parameters)

    def _take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives the gradients places, and ends their sharding by another wrapper."""
        complete_parts(parameters)
        sharded = [p for p in parameters if known_of(p).part is not None]
        for parameter in sharded:
            record_of(parameter).part = None
            move_out(parameter)
        if sharded:
            count_division()
        self.layout = window_layout(parameters, self.state.group)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Gets the first buckets."""

    # A backward.

    @property
    def sends_averages(self) -> bool:
        """True if the running backward sends averages of earlier ones before its own."""
        return False

    def begin(self, parameters: Iterable[torch.Tensor], noted: bool) -> None:
        """Prepares for a backward; `noted` is True on a rank whose backward has raised before."""

    def send(self, bucket: Bucket, number: int, weighing: WeightedMean | None) -> None:  # noqa: ARG002
        """Starts the exchange of a bucket, the one with this number in the backward."""
        if weighing is not None:
            weighing.scale(bucket.flat)
        self.state.start(bucket.flat, bucket.parameters, begins=bucket.begins)

    def finish(self, buckets: Sequence[Bucket]) -> None:  # noqa: ARG002
        """Waits for the exchange of all buckets."""
        self.state.finish()

    def keep(
        self,
        parameters: Iterable[torch.Tensor],
        unused: Set[int],
        bucket_of: dict[int, Bucket],
    ) -> None:
        """Makes the averages the gradients, except of parameters that no rank uses."""
        for parameter in parameters:
            if id(parameter) in unused:
                parameter.grad = None  # a rank without weight may have used it
            elif parameter.grad is None:
                bucket_of[id(parameter)].adopt(parameter)

    def resume(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undoes :meth:`begin` after a backward that has brought no gradients."""

    # What a backward leaves to a step.

    def has_pending(self, parameters: Iterable[torch.Tensor], weighted: bool) -> bool:  # noqa: ARG002
        """True if averages must be completed before another backward adds to the gradients."""
        return False

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes all gradients whole averages; all ranks must call this."""

    def average_noted(self, parameters: Iterable[torch.Tensor], weighted: bool) -> None:
        """Joins the others' :meth:`average` on a rank whose backward has raised."""

    def forget_local(self, parameter: torch.Tensor) -> None:
        """Forgets the last backward's gradient, since a new one came before it was averaged."""

    def keep_local(self, parameter: torch.Tensor) -> None:
        """Handles a gradient of a backward without an exchange."""

    # Parameters that only a step may change.

    def check(self) -> None:
        """Raises RuntimeError if a failed step may have changed only some of the parameters."""

    def sees_change(self) -> bool:
        """True if anything but a step has changed parameters of this rank."""
        return False

    def compare(self) -> None:
        """Raises RuntimeError on all ranks if their parameters differ."""

    def moved(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """The parameters that have left the memory in which they must lie."""
        return []
