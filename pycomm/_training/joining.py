"""Uneven numbers of batches with shards: a rank without batches repeats what the others do.

Every rank owns a share of the parameters, so it must take part in every step. While a rank has
batches, it announces its forwards, exchanges and steps. When it has none left, it takes part in
those of the others, with gradients that do not count, and with their options of optimizers.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pycomm._training.announcing import Announced, Announcer, Command
from pycomm._training.optimizers import Optimizer, optimizers_of, params_of
from pycomm._training.shards import part_of
from pycomm._training.step_guard import differ
from pycomm._training.weighing import Weighing
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._training.gradient_exchange import GradientExchange
    from pycomm.group import Group

# What identifies an optimizer on all ranks: its class, the numbers of its parameters, and how many
# of the same were made after it.
_Name = tuple[str, tuple[tuple[int, ...], ...], int]


class _Status(enum.Enum):
    """How a parameter's gradient lies."""

    NONE = enum.auto()
    PENDING = enum.auto()  # each rank's own, or divided
    ZEROED = enum.auto()  # divided, and to be zeroed
    WHOLE = enum.auto()


@dataclass
class _Details:
    """The details of a command.

    Attributes:
        statuses: gradients that the command needs, by the parameter's number.
        whole: the types of those that are sent.
        optimizer: the optimizer.
        arguments: arguments of the optimizer's method.
    """

    statuses: dict[int, _Status] = field(default_factory=dict)
    whole: dict[int, torch.dtype] = field(default_factory=dict)
    optimizer: _Name | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Joining:
    """One rank in a join.

    Args:
        exchange: the wrapper's exchange of gradients.
        group: the wrapper's group.

    Attributes:
        in_backward: True if the ranks have announced a backward that has not ended.
    """

    def __init__(self, exchange: GradientExchange, group: Group) -> None:
        assert exchange.shards is not None
        self._exchange, self._shards = exchange, exchange.shards
        self._announcer = Announcer(group)
        self._parameters = list(exchange.parameters)
        self._number = {id(p): number for number, p in enumerate(self._parameters)}
        self._versions = self._current_versions()
        self._active = True
        self.in_backward = False

    def __enter__(self) -> Joining:
        if any(not parameter.is_cpu for parameter in self._parameters):
            raise ValueError("join() of a sharded model needs parameters on the CPU")
        if any(other._announcer.group is self._announcer.group for other in tuple(_open)):
            raise ValueError("join() of a sharded model must not be inside of another one's")
        _open.append(self)
        self._shards.session = self._exchange.session = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        own = isinstance(error, Exception) and not isinstance(error, PycommError)
        try:
            if own and self._active and not self._announcer.failed:
                self._catch_up()
                self._announcer.announce(Command.RAISE)
        except (RuntimeError, PycommError):
            pass  # the error that has been raised here says more
        finally:
            _open.remove(self)
            self._shards.session = self._exchange.session = None

    # While this rank has batches.

    def before_forward(self) -> None:
        """Announces a forward whose weight counts."""
        self._announce(Command.FORWARD)

    def before_backward(self) -> None:
        """Announces an exchange; only the first call in a backward has an effect."""
        if not self.in_backward:
            self._announce(Command.BACKWARD, _Details())
            self.in_backward = True

    def before_average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Announces an average of gradients if any of them is pending."""
        parameters = list(parameters)
        if self.is_pending(parameters):
            self._announce(Command.AVERAGE, _Details(self._statuses(parameters)))

    def before_step(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
        """Announces a step of an optimizer, for which others need these settings."""
        if self._active:
            own = [p for p in params_of(optimizer) if id(p) in self._number]
            details = _Details(self._statuses(own), {}, self._name(optimizer), settings)
            for number, status in details.statuses.items():
                gradient = self._parameters[number].grad
                if status is _Status.WHOLE and gradient is not None:
                    details.whole[number] = gradient.dtype
            self._announce(Command.STEP, details)

    def note_step(self) -> None:
        """Records that all ranks have the same parameters."""
        self._versions = self._current_versions()

    def before_gather(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        """Announces a call of ``state_dict``."""
        if self._active:
            details = _Details({}, {}, self._name(optimizer), arguments)
            self._announce(Command.GATHER, details)

    def is_pending(self, parameters: Iterable[torch.Tensor]) -> bool:
        """True if gradients are still each rank's own, or divided."""
        statuses = self._statuses(parameters).values()
        return _Status.PENDING in statuses or _Status.ZEROED in statuses

    def others_exchange(self) -> bool:
        """True if other ranks are in a backward that this rank has not come to."""
        while True:
            told = self._announcer.announce(Command.CATCH_UP)
            if told.command is Command.CATCH_UP:
                return False
            details = self._send(told, None)
            if told.command is Command.BACKWARD:
                self.in_backward = True
                return True
            self._average(details)

    def _announce(self, command: Command, details: _Details | None = None) -> None:
        if not self._active:
            return
        told = self._announcer.announce(command)
        if told.heard and command is not Command.FORWARD:
            self._send(told, details)

    def _catch_up(self) -> None:
        """Ends what a forward without a backward has begun."""
        if self._exchange.promise.open:
            self._exchange.catch_up()
        self._exchange.promise.open = False

    # When it has none left.

    def repeat(self) -> None:
        """Takes part in what the others do, until no rank has batches."""
        self._catch_up()
        self._active = False
        while (told := self._announcer.announce(None)).command is not None:
            self._take_part(told)

    def share_rest(self, source: int) -> None:
        """Sends what one rank has changed since the last step: parameters and options."""
        self._share_edited(source)
        options = [(name, optimizer.group_options()) for name, optimizer in self._named()]
        for name, groups in self._announcer.share(source, options):
            for own, optimizer in self._named():
                if own == name:
                    optimizer.take_group_options(groups)
        if differ(self._shards.buffers(), self._announcer.group):
            raise RuntimeError(
                "parameters differ between ranks at the end of join(): in the loop, change them in "
                "place and alike on all ranks, and not through .data, which hides changes"
            )

    def _take_part(self, told: Announced) -> None:
        if told.command is Command.FORWARD:
            Weighing(0.0, False, self._announcer.group).active_ranks()  # waits
            return
        if told.command is Command.CATCH_UP:
            return
        if told.command is Command.RAISE:
            raise RuntimeError("ranks that still had batches have raised an error inside of join()")
        details = self._send(told, None)
        if told.command is Command.BACKWARD:
            self.in_backward = True
            self._exchange.stand_in()
        elif told.command is Command.AVERAGE:
            self._average(details)
        else:
            optimizer = self._find(details.optimizer)
            if told.command is Command.STEP:
                optimizer.step_with(details.arguments)
            else:
                optimizer.state_dict(**details.arguments)

    @torch.no_grad()
    def _average(self, details: _Details) -> None:
        """Takes part in an average that others have announced."""
        before, self._active = self._active, False  # nor does this rank announce it
        try:
            self._shards.average([self._parameters[number] for number in details.statuses])
        finally:
            self._active = before

    # Details.

    @torch.no_grad()
    def _send(self, told: Announced, details: _Details | None) -> _Details:
        """Sends a command's details, or receives and prepares for them."""
        announcer, sends = self._announcer, told.source == self._announcer.group.rank
        received: _Details = announcer.share(told.source, details)
        self._share_edited(told.source)
        gradients = {}
        for number, dtype in received.whole.items():
            parameter = self._parameters[number]
            like = parameter.grad if sends else torch.empty_like(parameter, dtype=dtype)
            assert like is not None
            gradients[number] = announcer.share_tensor(told.source, like)
        error: Exception | None = None
        if details is None:  # this rank has not announced the command
            try:
                self._find(received.optimizer)
                for number, status in received.statuses.items():
                    self._adapt(self._parameters[number], status, gradients.get(number))
            except (RuntimeError, ValueError) as raised:
                error = raised
        announcer.settle(error)
        return received

    def _share_edited(self, source: int) -> None:
        """Sends parameters that any rank has written since all had the same."""
        versions = zip(self._versions, self._current_versions(), strict=True)
        edited = self._announcer.on_any([before != now for before, now in versions])
        for parameter in itertools.compress(self._parameters, edited):
            values = self._announcer.share_tensor(source, parameter)
            if not self._active and self._announcer.group.rank != source:
                with torch.no_grad():
                    parameter.copy_(values)
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    # Gradients.

    def _statuses(self, parameters: Iterable[torch.Tensor]) -> dict[int, _Status]:
        return {self._number[id(p)]: self._status(p) for p in parameters}

    def _status(self, parameter: torch.Tensor) -> _Status:
        """How the gradient lies.

        Raises:
            RuntimeError: it has been changed though this rank does not have the average.
        """
        ring, part = self._shards.ring, part_of(parameter)
        assert part is not None
        if parameter.grad is None:
            return _Status.NONE
        if ring is not None and ring.is_zeroed(parameter):
            return _Status.ZEROED
        if part.is_divided(parameter) or self._shards.is_local(parameter):
            return _Status.PENDING
        return _Status.WHOLE

    def _adapt(self, parameter: torch.Tensor, wanted: _Status, whole: torch.Tensor | None) -> None:
        """Makes the gradient lie as on the ranks that have batches."""
        if wanted in (_Status.PENDING, _Status.ZEROED):
            if self._status(parameter) is not _Status.PENDING:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} has been "
                    "dropped or changed before the ranks have averaged it"
                )
            if wanted is _Status.ZEROED:
                assert self._shards.ring is not None
                self._shards.ring.own(parameter).zero_()
            return
        if wanted is _Status.NONE:
            parameter.grad = None
        elif whole is not None:
            parameter.grad = torch.empty_like(parameter, dtype=whole.dtype).copy_(whole)

    # Optimizers.

    def _named(self) -> list[tuple[_Name, Optimizer]]:
        """The optimizers of these parameters, the last one first."""
        made: list[tuple[_Name, Optimizer]] = []
        count: dict[Any, int] = {}
        for optimizer in optimizers_of(self._parameters):
            numbers = (
                tuple(self._number.get(id(param), -1) for param in group["params"])
                for group in optimizer.param_groups
            )
            key = (type(optimizer).__qualname__, tuple(numbers))
            made.append(((*key, count.get(key, 0)), optimizer))
            count[key] = count.get(key, 0) + 1
        return made

    def _name(self, optimizer: torch.optim.Optimizer) -> _Name:
        wanted: object = optimizer
        return next(name for name, other in self._named() if other is wanted)

    def _find(self, wanted: _Name | None) -> Any:
        """The optimizer of this name; None without a name."""
        if wanted is None:
            return None
        for name, optimizer in self._named():
            if name == wanted:
                return optimizer
        raise RuntimeError(
            f"it has no {wanted[0]} with the parameters of the one that other ranks use: make "
            "optimizers before join(), on all ranks, and keep their parameter groups in it"
        )


_open: list[Joining] = []  # of all threads


def session_of(optimizer: torch.optim.Optimizer) -> Joining | None:
    """The join of the wrapper that shards this optimizer's parameters; None outside of joins."""
    if not _open:
        return None
    found = {part.shards for param in params_of(optimizer) if (part := part_of(param)) is not None}
    return next((one for one in tuple(_open) if one._shards in found), None)


def refuse_in_join(optimizer: torch.optim.Optimizer, call: str) -> None:
    """Raises RuntimeError in a join, where ranks without batches do not make this call."""
    if session_of(optimizer) is not None:
        raise RuntimeError(f"{call} cannot be used inside of join() of a sharded model")
