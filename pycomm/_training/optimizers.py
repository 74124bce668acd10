"""The fused optimizers of this process, in which wrappers find their parameters' optimizers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from pycomm._training.shards import OwnedRange
    from pycomm.group import Group


class Optimizer(Protocol):
    """A fused optimizer: pycomm/optim/_optimizer.py.

    Attributes:
        in_step: True if it has replicas of its states, and its last step has failed.
    """

    param_groups: list[dict[str, Any]]
    in_step: bool

    def rank_in_division(self) -> int:
        """This rank's number in the division of the states; -1 if it has no part."""

    def lost_parts(self, owners: Collection[int]) -> set[int]:
        """Ranks that have parts of the states and are not in `owners`."""

    def lost_with_replicas(self, owners: Collection[int]) -> set[int]:
        """Lost ranks whose parts have no replicas on `owners`, either."""

    def is_replicated(self) -> bool:
        """True if there are replicas of all sharded states."""

    def undoes_step(self) -> bool:
        """True if this rank has begun a step that does not count, and has copies from before it."""

    def undo_step(self) -> None:
        """Gives parts of the parameters their values before a step that failed."""

    def to_restore(self, owners: Mapping[int, int]) -> list[tuple[torch.Tensor, list[OwnedRange]]]:
        """Parameters that ranks must send each other after :meth:`undo_step`."""

    def follow_parts(self, group: Group, owners: Mapping[int, int], restores: bool) -> None:
        """Records which ranks of another group have the parts; later steps divide them anew."""

    def follow_regroup(self, group: Group, owners: Mapping[int, int]) -> None:
        """Adopts this rank's new parts of the states from the replicas."""


# In the order in which they were made.
_optimizers: list[weakref.ref[Optimizer]] = []
_lock = threading.Lock()


def register(optimizer: Optimizer) -> None:
    """Makes an optimizer known."""
    with _lock:
        _optimizers[:] = [made for made in _optimizers if made() is not None]
        if all(made() is not optimizer for made in _optimizers):
            _optimizers.append(weakref.ref(optimizer))


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """The optimizers of any of these parameters, the last one first."""
    ids = set(map(id, parameters))
    with _lock:
        alive = [made for one in reversed(_optimizers) if (made := one()) is not None]
    return [made for made in alive if any(id(param) in ids for param in _params_of(made))]


def _params_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
