"""Rows of an optimizer's tables: a parameter with its gradient and states, for the extension."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pycomm._inputs.tensors import local
from pycomm._training.shards import Shards, divisions, part_of
from pycomm.optim import _storage
from pycomm.optim._options import Group


class Row:
    """A parameter's row, which is used again in the next step if nothing has moved.

    For a sharded parameter, it describes this rank's part, and two words follow: the number of
    elements of the parameter, and whether its gradient has been averaged. For a DTensor, the row
    describes its local tensor, and so do the gradient and the state.

    Args:
        param: the parameter.
        grad: its gradient, in the parameter's order of elements.
        state: its state.
        group: its group's options.
        names: the states' names.
        stream: the parameter's random bits.
        place: the first element's place among the random bits, for a DTensor.

    Attributes:
        param: the parameter.
        own: the elements of it that this rank steps.
        part: this rank's part; None if the parameter is not sharded.
        holds_weights: True if the state has master weights or a remainder.
        words: the row; without the last word of a sharded parameter.

    Raises:
        ChangedError: the state does not fit the parameter.
    """

    def __init__(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, Any],
        group: Group,
        names: tuple[str, ...],
        stream: int,
        place: int = 0,
    ) -> None:
        self.param = param
        self.part = part = part_of(param)
        self.own = param if part is None else part.own
        self.holds_weights = _storage.holds_weights(state)
        own_grad, first = grad, place
        if part is not None:
            own_grad, first = part.gradient(param, grad), part.first
        dtype = _storage.wanted_dtype(param, group["states"])
        own = local(self.own)
        self.words = array(
            "q", _storage.segment(own, own_grad, state, names, group, stream, dtype, first)
        )
        if part is not None:
            self.words.append(param.numel())
        self._key = _key(local(param), grad, state, group, names, stream)

    def is_of(self, param: torch.Tensor, grad: torch.Tensor, *rest: Any) -> bool:
        """True if the row still describes these arguments of the constructor."""
        return self._key == _key(local(param), grad, *rest)

    def add_to(self, table: array[int]) -> None:
        """Adds the row's words for this step."""
        table.extend(self.words)
        if self.part is not None:
            table.append(not self.part.waits_for_step(self.param))


def _key(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, Any],
    group: Group,
    names: tuple[str, ...],
    stream: int,
) -> tuple[Any, ...]:
    """Changes if a row has to be made anew."""
    # This runs for hundreds of parameters in every step, so it is kept fast.
    if grad.layout != torch.strided:
        return ()
    return (
        *(param.data_ptr(), param.shape, param.stride(), param.dtype),
        *(grad.data_ptr(), grad.shape, grad.stride(), grad.dtype, grad.is_neg()),
        *state,
        *[_place(value) for value in state.values()],
        *(group["states"], group["master_weights"], names, stream, divisions()),
    )


def _place(value: object) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)


def one_division(optimizer: str, rows: Iterable[Row], has_dtensors: bool) -> Shards | None:
    """The shards of all rows' parameters; None if no wrapper shards them.

    Args:
        optimizer: the optimizer's name.
        rows: the rows.
        has_dtensors: True if DTensors are among its parameters, with gradients or without.

    Raises:
        ValueError: some are sharded otherwise, or not at all.
    """
    found = {None if row.part is None else row.part.shards for row in rows}
    if len(found) > 1:
        raise ValueError(
            f"{optimizer} takes parameters of one wrapper if they are sharded, got others, too: "
            "make an optimizer for each"
        )
    shards = found.pop() if found else None
    if shards is not None and has_dtensors:
        raise ValueError(
            f"{optimizer} takes parameters of one wrapper if they are sharded, got DTensors, too: "
            "make an optimizer for each"
        )
    return shards
