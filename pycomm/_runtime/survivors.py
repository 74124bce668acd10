"""How the group of a rank outlives a failure, if it spans nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pycomm._inputs import host
from pycomm._inputs.dtypes import operation_of
from pycomm._runtime.agreement import Agreement
from pycomm._runtime.rendezvous import set_up
from pycomm._runtime.waiting import Deadline
from pycomm.errors import CollectiveError, PycommError, Timeout

if TYPE_CHECKING:
    from pycomm import _C
    from pycomm._runtime.listener import Listener
    from pycomm._runtime.rendezvous import Membership

Kind = TypeVar("Kind")


class Survivors(Generic[Kind]):
    """How one rank's group outlives a failure.

    Args:
        listener: the listener of this rank.
        rank: this rank.
        ranks: all ranks of the group. They and `rank` have the listener's numbers.
        mine: this rank's introduction (pycomm/_runtime/rendezvous.py).
        make: makes the smaller group of this rank's membership and the ranks.
    """

    def __init__(
        self,
        listener: Listener,
        rank: int,
        ranks: Sequence[int],
        mine: Mapping[str, Any],
        make: Callable[[Membership, list[int]], Kind],
    ) -> None:
        self.listener, self._rank, self._ranks = listener, rank, ranks
        self._mine, self._make = mine, make

    def decide(self, core: _C.Group, ready: bool, patience: float) -> bool:
        """See :meth:`pycomm.Group.should_commit`."""
        listener = self.listener
        number, unready = listener.decisions + 1, host.tensor(not ready, dtype=torch.float32)
        at, operation = unready.data_ptr(), operation_of("all_reduce", "auto", unready.dtype, "max")
        try:
            core.run(operation, 1, at, at, None, "should_commit")
            outcome = unready.item() == 0
        except CollectiveError:
            try:
                with self._agreement(core.unresponsive, (), patience, core.ended_by) as agreement:
                    known = agreement.outcome(number)
            except BaseException:  # nobody knows what the others do: this rank cannot go on
                listener.close()
                raise
            if known is None:
                raise
            core.raise_again()
            outcome = known
        listener.decisions, listener.outcome = number, outcome
        return outcome

    def shrink(
        self, culprit: int, exclude: Collection[int], patience: float, word: int = 0
    ) -> Kind:
        """See :meth:`pycomm.Group.shrink`.

        Args:
            culprit: the rank that has ended the group because it did not answer, or -1.
            exclude: ranks that are left out although they may live.
            patience: seconds to wait for ranks that live but do not come.
            word: the abort word of the group; 0 if it is not known.
        """
        deadline = Deadline(patience)
        while True:
            with self._agreement(culprit, exclude, deadline.left(), word) as agreement:
                try:
                    store, ranks, everyone = agreement.members(self._mine)
                except PycommError:
                    raise
                except RuntimeError as error:  # the coordinator has ended
                    if deadline.over():
                        raise Timeout(f"shrinking: no time is left ({error})") from error
                    continue
                index = ranks.index(self._rank)
                try:
                    members = set_up(store, index, everyone, deadline, agreement.lost)
                    return self._make(members, ranks)
                except CollectiveError:  # a member has ended
                    if deadline.over():
                        raise

    def _agreement(
        self, culprit: int, exclude: Collection[int], patience: float, word: int
    ) -> Agreement:
        self.listener.take_over()
        unresponsive = [self._ranks[culprit]] if culprit >= 0 else []
        excluded = [self._ranks[rank] for rank in exclude]
        return Agreement(
            self.listener, self._rank, self._ranks, unresponsive, excluded, patience, word
        )
