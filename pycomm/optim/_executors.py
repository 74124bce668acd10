"""What an optimizer step runs on: rows of tables, and the step on this process's threads."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycomm import _C
from pycomm._inputs import local
from pycomm._runtime import host
from pycomm._training.parameters import divisions, part_of
from pycomm.optim import _storage
from pycomm.optim._options import Group

if TYPE_CHECKING:
    from pycomm._training.shards import Shards

# Rows of an optimizer's tables: a parameter with its gradient and states, for the extension.


class Row:
    """A parameter's row, which the next step reuses if nothing has moved.

    For a sharded parameter, it describes this rank's part, and two words follow: the number of
    elements of the parameter, and whether its gradient has been averaged. For a DTensor, row,
    gradient and state belong to its local tensor.

    Args:
        param: the parameter.
        grad: its gradient, in the parameter's memory format.
        state: its state.
        group: its group's options.
        names: the states' names.
        stream: the number of the parameter's stream of random bits.
        place: for a DTensor, the offset of the first element in this stream.

    Attributes:
        param: the parameter.
        own: the elements that this rank steps.
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
        self._options = (*row_options(group, names), stream)
        self._address = grad.data_ptr()
        self.description = _C.RowDescription(local(param), grad, state)

    def is_of(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, Any],
        group: Group,
        names: tuple[str, ...],
        stream: int,
    ) -> bool:
        """True if the row describes these arguments of the constructor.

        A gradient of the whole parameter may have moved, which the row then follows.
        """
        same = self._options == (*row_options(group, names), stream)
        if not (same and self.description.fits(local(param), grad, state)):
            return False
        address = grad.data_ptr()
        if self.part is None:
            self.words[1] = address
        return self.part is None or address == self._address

    def add_to(self, table: array[int]) -> None:
        """Adds the row's words for this step."""
        table.extend(self.words)
        if self.part is not None:
            table.append(not self.part.waits_for_step(self.param))


def row_options(group: Group, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a group's rows depend on, apart from tensors."""
    return group["states"], group["master_weights"], names, divisions()


def one_division(optimizer: str, rows: Iterable[Row], has_dtensors: bool) -> Shards | None:
    """The shards of all rows' parameters; None if no wrapper shards them.

    Args:
        optimizer: the optimizer's name.
        rows: the rows.
        has_dtensors: True if the optimizer has DTensors, with gradients or without.

    Raises:
        ValueError: some parameters have other shards, or none.
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


# A group and its segments, as integers.
Table = tuple[Group, "array[int]"]


@dataclass
class Prepared:
    """What a step runs on; the next step uses it again if nothing has changed.

    Attributes:
        tables: the table of each group that has gradients.
        rows: all rows in them.
        params: their parameters.
        grads: their gradients, which must stay alive until the step has run.
        device: the parameters' device.
        shards: the shards of the parameters, if a wrapper shards them.
        options: the options of all groups that tables depend on.
        is_settled: True if the step before had the same rows, and no other rank has a part of it.
        description: what the tables were made from; None if the next step makes new ones.
    """

    tables: list[Table]
    rows: list[Row]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    device: torch.device
    shards: Shards | None
    options: list[tuple[Any, ...]]
    is_settled: bool
    description: _C.StepDescription | None = None

    @property
    def edition(self) -> int:
        """A number that changes with the words of the tables."""
        return 0 if self.description is None else self.description.edition

    def describe(self, params: list[torch.Tensor], states: Mapping[torch.Tensor, Any]) -> None:
        """Describes the tensors of the tables after a step, so that the next one compares them.

        Args:
            params: all parameters of the optimizer.
            states: its states.
        """
        known = {id(row.param): row for row in self.rows}
        rows = [known.get(id(param)) for param in params]
        self.description = _C.StepDescription(
            params,
            [None if row is None else row.description for row in rows],
            [row is not None and row.holds_weights for row in rows],
            [words for _, words in self.tables],
            states,
        )
        self.grads = []


# Steps on this process's threads. _cuda_executors.py has steps on a CUDA device.

# Addresses of the gradients' scale, of the flag for gradients that are not finite, and of the clip
# factor; 0 for a missing number.
Control = tuple[int, int, int]


class Step(NamedTuple):
    """The inputs of a step, apart from its tables.

    Attributes:
        settings: the settings of each table.
        scale: the factor of scaled gradients, or None.
        found: nonzero if a gradient is not finite, or None.
        clip: the factor that clips gradients, or None.
        max_norm: bound of the norm of all gradients together; None for no bound.
        sets_found: look for gradients that are not finite.
        params: the parameters of all tables.
        grads: their gradients, which must stay alive until the step has run.
    """

    settings: Sequence[_C.OptimizerSettings]
    scale: torch.Tensor | None
    found: torch.Tensor | None
    clip: torch.Tensor | None
    max_norm: float | None
    sets_found: bool
    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]

    @property
    def control(self) -> Control:
        """Addresses of the numbers; the tensors must live until the step has been enqueued."""
        scale, found, clip = (
            0 if number is None else number.data_ptr()
            for number in (self.scale, self.found, self.clip)
        )
        return scale, found, clip

    @property
    def bound(self) -> float:
        """`max_norm` for the extension: 0 for no bound."""
        return self.max_norm or 0.0

    @property
    def measures(self) -> bool:
        """True if the step reads all gradients before it changes anything."""
        return self.max_norm is not None or self.sets_found


class OnCpu:
    """Steps on torch's threads."""

    def __init__(self, tables: list[Table]) -> None:
        self._tables = tables

    def scalar(self) -> torch.Tensor:
        """Memory for a number that run() fills in."""
        return host.zeros(dtype=torch.float32)

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings."""
        return float(lr.item() if isinstance(lr, torch.Tensor) else lr)

    def squares(self) -> torch.Tensor:
        """The sum of the squares of all gradients, as they are."""
        norm = _C.optimizer_grad_norm(joined(self._tables), 0, 0, 0, 0.0)
        return host.tensor(norm * norm, dtype=torch.float64)

    def run(self, step: Step) -> torch.Tensor | None:
        """Steps all tables, and fills in what `step.control` points to.

        Returns:
            The norm of all gradients together, if it was needed.
        """
        norm = None
        if step.measures:
            value = _C.optimizer_grad_norm(joined(self._tables), *step.control, step.bound)
            norm = host.tensor(value, dtype=torch.float64)
        for one, (_, words) in zip(step.settings, self._tables, strict=True):
            _C.optimizer_step(one, words, *step.control)
        return norm


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def joined(tables: list[Table]) -> array[int]:
    """The segments of all tables."""
    words = array("q")
    for _, part in tables:
        words += part
    return words


def attribute(
    optimizer: torch.optim.Optimizer, name: str, device: torch.device
) -> torch.Tensor | None:
    """A number that a GradScaler may have set as an attribute."""
    value = getattr(optimizer, name, None)
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=device)
