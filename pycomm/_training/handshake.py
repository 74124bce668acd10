"""The states of a wrapper from a forward to the end of the exchange that follows it.

A forward that records gradients promises an exchange, on all ranks alike. A backward first
announces it. If a rank starts another forward while its promise is open, it takes part in that
announcement. If other ranks have announced an exchange, this rank's backward must have raised. If
none has, there are several forwards before one backward.

The announcement is one small sum over all ranks, in this order: how many announce an exchange, how
many have averages of an earlier backward that come first, and the weights, if ranks have weights.
After the exchange, a second operation compares what ranks have done in backward.

    IDLE      -> PROMISED   a forward records gradients, or a block in no_sync() has raised
    IDLE      -> BACKWARD   a gradient comes, or this rank takes part in the others' exchange
    PROMISED  -> BACKWARD   the same
    PROMISED  -> IDLE       inside of join(), this rank has no more batches
    BACKWARD  -> IDLE       the exchange is over, or no gradient has come
    BACKWARD  -> PROMISED   the same, and another backward may still come; or backward has raised
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm._runtime import host
from pycomm._work import Work
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm._training.buckets import WeightedMean
    from pycomm.group import Group


class Phase(enum.Enum):
    """What a wrapper waits for."""

    IDLE = enum.auto()  # a forward
    PROMISED = enum.auto()  # the backward of a forward
    BACKWARD = enum.auto()  # the end of a backward


class BackwardHandshake:
    """The phase of one wrapper, and what its rank has promised and announced to the others.

    Attributes:
        phase: see :class:`Phase`.
        latest: the number of the last forward; None if it was inside of a backward.
        weighing: the ranks' weights in the next exchange, if they differ.
        exchange: what carries out the exchange, while a backward runs or has raised. If the wrapper
            is dropped then, this rank can still take part in the other ranks' exchange.
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.latest: int | None = None
        self.weighing: WeightedMean | None = None
        self.exchange: object = None
        self._numbers = itertools.count()
        self._forwards: set[int] = set()  # forwards without a backward
        self._left: set[int] = set()  # forwards before the last exchange that got no backward
        self._entered: set[int | None] = set()  # forwards that the running backward has passed
        self._taken: set[int] = set()  # forwards whose exchange another backward has used up
        self._sums: torch.Tensor | None = None  # the announcement
        self._work: Work | None = None

    @property
    def open(self) -> bool:
        """True if an exchange is promised and has not ended."""
        return self.phase is not Phase.IDLE

    @property
    def in_backward(self) -> bool:
        """True from the beginning of a backward to its end, or to the next forward if it raises."""
        return self.phase is Phase.BACKWARD

    def promise(self) -> None:
        """Promises an exchange."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.PROMISED

    def note_forward(self, inside_backward: bool) -> None:
        """Promises an exchange, in a forward. A forward inside a backward is a repeated one."""
        self.promise()
        self.latest = None if inside_backward else next(self._numbers)
        if self.latest is not None:
            self._forwards.add(self.latest)

    def expect(self, backward: bool) -> None:
        """Records whether a backward will come; ``join()`` knows it without a promise."""
        self.phase = Phase.PROMISED if backward else Phase.IDLE

    def begin_backward(self, exchange: object) -> None:
        """Begins a backward."""
        self.phase, self.exchange = Phase.BACKWARD, exchange

    def leave_backward(self) -> None:
        """Ends a backward without an exchange; the exchange is still to come."""
        if self.phase is Phase.BACKWARD:
            self.phase, self.exchange = Phase.PROMISED, None

    def enter(self, forward: int | None) -> None:
        """Records that the running backward has passed an output of this forward."""
        self._entered.add(forward)

    @property
    def awaits_backward(self) -> bool:
        """True if a forward may still get its backward."""
        return bool(self._forwards)

    @property
    def is_repeated(self) -> bool:
        """True if a backward that passed no outputs has used up the running one's exchange."""
        return not self._taken.isdisjoint(self._entered)

    def announce(self, group: Group, after_averages: bool = False) -> None:
        """Announces an exchange before it sends anything; only the first call has an effect.

        Args:
            group: the ranks.
            after_averages: True if averages of an earlier backward come first.
        """
        if self._sums is None:
            self._sums = self._announcement(True, after_averages)
            self._work = all_reduce(self._sums, "sum", group=group, async_op=True)

    def is_broken(self, group: Group) -> bool:
        """In another forward: true if other ranks are in the exchange; this rank must join it."""
        announced = self.ask(group)
        if not announced:  # so forwards left from before will get no backward
            self._forwards -= self._left
            self._left = set()
        return announced

    def ask(self, group: Group, announces: bool = False) -> bool:
        """Outside of a backward: true if any rank announces an exchange."""
        if self._sums is None:
            sums = all_reduce(self._announcement(announces, False), "sum", group=group)
            if not sums[0]:
                return False
            self._sums = sums
        return True

    @property
    def after_averages(self) -> bool:
        """True if averages of an earlier backward come before the announced exchange."""
        return self._sums is not None and bool(self._sums[1])

    def total_weight(self) -> float:
        """Waits for the announcement; the sum of all ranks' weights."""
        self.wait()
        assert self._sums is not None
        return float(self._sums[2])

    def wait(self) -> None:
        """Waits until all ranks have answered; raises the error if that failed."""
        if self._work is not None:
            self._work.wait()

    def withdraw(self) -> None:
        """Ends an announcement that no exchange has followed."""
        self._sums = self._work = None

    def settle(self, dropped: bool = False) -> None:
        """Ends a backward; earlier forwards may still get their own backwards."""
        ended = self._forwards & self._entered
        if not ended and self._forwards and not self._entered:
            ended = self._taken = {min(self._forwards)}
        self._forwards = set() if dropped else self._forwards - ended
        self._taken -= self._entered
        self._left, self._entered = set(self._forwards), set()
        self.phase = Phase.PROMISED if self._forwards else Phase.IDLE
        self.exchange = None
        self.withdraw()

    def _announcement(self, announces: bool, after_averages: bool) -> torch.Tensor:
        """What this rank contributes; ranks with and without weights raise Mismatch."""
        weights = () if self.weighing is None else (self.weighing.weight,)
        return host.tensor([announces, after_averages, *weights], dtype=torch.float64)


class Errors(NamedTuple):
    """Ranks with errors in a backward.

    Attributes:
        raised: ranks whose backward has raised.
        repeated: ranks on which a backward that passed no outputs has used up this exchange.
        stepped: ranks whose parameters have changed during backward.
        moved: ranks whose parameters have left the memory of shards.
    """

    raised: list[int]
    repeated: list[int]
    stepped: list[int]
    moved: list[int]

    def explain(self, group: Group, moved: Sequence[str]) -> str:
        """The error's message, empty without an error; `moved` names this rank's parameters."""
        if self.raised:
            return (
                f"backward has raised on ranks {self.raised} of {group.size}, or they have made "
                "another forward instead (evaluate under torch.no_grad()): go on with the next "
                "forward"
            )
        if 0 < len(self.repeated) < group.size:
            return (
                f"backward on ranks {self.repeated} of {group.size} came after another one, which "
                "did not begin in the outputs of the wrapper's forward and was exchanged in its "
                "place: run such backwards before the forward or after its backward"
            )
        if self.stepped:
            return (
                f"parameters have changed during backward on ranks {self.stepped} of "
                f"{group.size}, as by a step in a hook of a gradient, which sees only its own "
                "rank's gradients: step after backward, or wrap with LocalSGDState for steps on "
                "each rank's own"
            )
        if self.moved:
            here = f" (here {', '.join(moved)})" if moved else ""
            return (
                f"parameters on ranks {self.moved} of {group.size}{here} have left the memory in "
                "which the wrapper shards them, as by share_memory(), model.to() or p.data = ...: "
                "use p.copy_(), or wrap the model anew"
            )
        return ""


NO_ERRORS = Errors([], [], [], [])


def compare(
    used: Sequence[bool], errors: Sequence[bool], group: Group
) -> tuple[list[bool], Errors]:
    """After an exchange: what any rank has used, and which ranks have errors."""
    count, size = len(used), group.size
    flags = [*used, *[False] * (len(errors) * size)]
    flags[count + group.rank :: size] = errors
    anywhere = all_reduce(host.tensor(flags, dtype=torch.bool), "max", group=group).tolist()
    if True not in anywhere[count:]:
        return anywhere[:count], NO_ERRORS
    begins = range(count, len(flags), size)
    on = ([rank for rank in range(size) if anywhere[begin + rank]] for begin in begins)
    return anywhere[:count], Errors(*on)
