"""Announcements in a join: ranks with batches tell the others what comes next.

Each rank sends its command, or none if it has no more batches, in one small all-reduce. If any rank
listens, one of the announcing ranks then sends details.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pycomm.collectives import all_reduce, broadcast

if TYPE_CHECKING:
    from pycomm.group import Group


class Command(enum.IntEnum):
    """What a rank does next."""

    FORWARD = 0
    CATCH_UP = 1  # go on without the backward of the last forward, as after an error
    BACKWARD = 2
    AVERAGE = 3
    STEP = 4
    GATHER = 5
    RAISE = 6

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = (
    "a forward",
    "a forward or the end of the loop",
    "a backward",
    "an average of gradients",
    "optimizer.step()",
    "optimizer.state_dict()",
    "an error in the loop",
)
# What a rank that catches up may find the others at.
_CAUGHT = (Command.BACKWARD, Command.AVERAGE)


class Announced(NamedTuple):
    """What the ranks have announced.

    Attributes:
        command: None if no rank has batches.
        source: one of the ranks that do it.
        heard: True if any rank waits for details.
    """

    command: Command | None
    source: int
    heard: bool


class Session(Protocol):
    """A join as shards and the exchange of gradients see it: pycomm/_training/joining.py.

    Attributes:
        in_backward: True if the ranks have announced a backward that has not ended.
    """

    in_backward: bool

    def before_forward(self) -> None:
        """Announces a forward whose weight counts."""

    def before_backward(self) -> None:
        """Announces an exchange; only the first call in a backward has an effect."""

    def before_average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Announces an average of gradients if any of them is pending."""

    def is_pending(self, parameters: Iterable[torch.Tensor]) -> bool:
        """True if gradients are still each rank's own, or divided."""

    def others_exchange(self) -> bool:
        """True if other ranks are in a backward that this rank has not come to."""


class Announcer:
    """Exchanges announcements on a group; all its ranks must call each method alike.

    Attributes:
        failed: True once ranks have disagreed, so that they no longer meet.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.failed = False

    def announce(self, command: Command | None) -> Announced:
        """Sends this rank's command; None if it has no more batches.

        Raises:
            RuntimeError: ranks do different things; on all ranks.
        """
        if self.failed:
            raise RuntimeError("join() has failed before: leave it on all ranks, and join anew")
        does = command not in (None, Command.CATCH_UP)
        flags = [int(command == each) for each in Command]
        words = torch.tensor([*flags, self.group.rank if does else -1, not does])
        *found, source, heard = all_reduce(words, "max", group=self.group).tolist()
        seen = [each for each, flag in zip(Command, found, strict=True) if flag]
        if len(seen) == 2 and seen[0] is Command.CATCH_UP and seen[1] in _CAUGHT:
            del seen[0]
        if len(seen) > 1:
            self.failed = True
            raise RuntimeError(
                "ranks in join() of a sharded model must make the same calls while they have "
                f"batches, but they have come to {' and '.join(map(str, seen))}"
            )
        return Announced(seen[0] if seen else None, source, bool(heard))

    def share(self, source: int, value: object) -> Any:
        """One rank's value, on all ranks."""
        sends = self.group.rank == source
        data = bytearray(pickle.dumps(value) if sends else b"")
        size = broadcast(torch.tensor([len(data)]), source, group=self.group)
        flat = torch.frombuffer(data, dtype=torch.uint8) if sends else None
        if flat is None:
            flat = torch.empty(int(size), dtype=torch.uint8)
        broadcast(flat, source, group=self.group)
        return value if sends else pickle.loads(bytes(flat.tolist()))

    def on_any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is true on any rank."""
        anywhere = all_reduce(torch.tensor(flags, dtype=torch.uint8), "max", group=self.group)
        return [bool(flag) for flag in anywhere.tolist()]

    def share_tensor(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        """One rank's elements of a tensor of the same shape and type on all ranks."""
        if self.group.rank == source:
            values = tensor.data.contiguous()  # a broadcast counts as a write
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
        if values.numel():
            broadcast(values.view(-1).view(torch.uint8), source, group=self.group)
        return values

    def settle(self, error: Exception | None) -> None:
        """Raises an error of any rank on all ranks."""
        failing = torch.tensor([-1 if error is None else self.group.rank])
        rank = int(all_reduce(failing, "max", group=self.group))
        if rank < 0:
            return
        self.failed = True
        text = self.share(rank, str(error))
        raise RuntimeError(f"rank {rank} cannot take part in join() any more: {text}") from error
