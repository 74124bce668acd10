"""How the state of a communication hook is saved, pickled and copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pycomm._training.exchange import StepStatistics
from pycomm._training.hook_state import HookState
from pycomm._training.residuals import FORMAT

if TYPE_CHECKING:
    from typing_extensions import Self

    from pycomm._training.exchange import PendingExchanges
    from pycomm._training.residuals import Residuals
    from pycomm.compression import Compression
    from pycomm.group import Group

# Attributes that belong to this process or to a running exchange, which are not copied.
_NOT_COPIED = ("_group", "_planner", "_flying", "_now", "_stream", "_placed")


LOCAL_SGD, UNKNOWN = "local SGD", "unknown"  # kinds of saved states; earlier versions saved none


class SavedState(HookState):
    """The methods of :class:`pycomm._training.comm_state.CommState` to save and copy a state."""

    step: int
    compression: Compression | None
    _group: Group | None
    _residuals: Residuals
    _now: StepStatistics
    _flying: PendingExchanges

    if TYPE_CHECKING:  # what CommState has

        def _settle(self) -> None: ...
        def _begin_anew(self) -> None: ...

    def state_dict(self, gathered: bool = False) -> dict[str, Any]:
        """Returns what must be saved with the model, at the end of a step.

        Args:
            gathered: collect the residuals of all ranks on rank 0, so that only rank 0 needs to
                save. All ranks must call this; ranks other than 0 get an empty dict.

        Returns:
            Copies of this rank's residuals. Every rank must save its own, in a file of its own or
            with torch.distributed.checkpoint. That keeps only one tensor of each name, so residuals
            are stored under the rank's number.
        """
        self._settle()
        kept = {
            "format": FORMAT,
            "compression": _kind(self.compression),
            "size": self.group.size,
            "step": self.step,
        }
        if not gathered:
            return kept | {"kept": {str(self.group.rank): self._residuals.dump()}}
        dumps = self._residuals.gather(self.group)
        return kept | {"gathered": dumps} if self.group.rank == 0 else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`, bit for bit.

        From a gathered one, every rank picks its own residuals. If the number of ranks has changed,
        every rank gets the mean of the old residuals, so the mean that is still to be sent stays
        the same.

        Raises:
            ValueError: it is of another model, of another rank, or of another kind of state.
        """
        if (kind := saved_kind(state_dict)) is None:
            raise ValueError("state_dict must come from state_dict() of a state of pycomm.hooks")
        if kind not in (own := _kind(self.compression), UNKNOWN):
            raise ValueError(
                f"state_dict must be that of a state of compression {own}, got that of {kind}"
            )
        (rank, size), saved = place_in(self.group), state_dict["size"]
        if "gathered" in state_dict:
            dumps = state_dict["gathered"]
            if len(dumps) != saved:
                raise ValueError(f"state_dict must be of all {saved} ranks, got {len(dumps)}")
            self._residuals.load([dumps[rank]] if saved == size else dumps)
        else:
            ((owner, dump),) = state_dict["kept"].items()
            self._residuals.check_owner((int(owner), saved), (rank, size))
            self._residuals.load([dump])
        self.step = state_dict["step"]
        self._now = StepStatistics()
        self._flying.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying, between two backwards."""
        self._settle()
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        return kept if self._group is None else kept | {"_owner": place_in(self._group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An unpickled state belongs to the default group, which it looks up at its first use."""
        vars(self).update(state)
        self._group = None
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy has residuals of its own and belongs to the same group."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied._group = self._group
        return copied


def _kind(compression: Compression | None) -> str:
    return "none" if compression is None else type(compression).__name__


def saved_kind(state_dict: object) -> str | None:
    """The kind of state that a dict is of: its compression, local SGD, or one that is unknown.

    States of different kinds keep different things under the same names. None if it is no state's.
    """
    if not isinstance(state_dict, dict) or state_dict.get("format") != FORMAT:
        return None
    return LOCAL_SGD if "outer" in state_dict else state_dict.get("compression", UNKNOWN)


def place_in(group: Group) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return group.rank, group.size
