"""Groups of some of a group's ranks, which need no meeting because the ranks know each other.

A subgroup costs nothing until one of its ranks uses it. The first rank to use it reserves memory
for the window in its own heap, and writes the place to the Store. The others read the place when
they use the group. The last rank to leave frees the memory; so a rank that leaves without having
used the group records this in the Store.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore

from pycomm._runtime.lifetime import Nodes
from pycomm._runtime.rendezvous import RendezvousResult
from pycomm.errors import GroupUnusable
from pycomm.report import _listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

    from pycomm import _C

_STATE = "state"  # key in the Store
_LONGEST_LIST = 60  # of ranks in a title, in characters


@dataclass(frozen=True)
class _State:
    """The Store's entry about a group.

    Attributes:
        absent: the ranks that have left without having used the group.
        place: the place of the group's window, for :meth:`_C.Window.part`; None until it is used.
    """

    absent: list[int]
    place: tuple[int, int, int] | None = None

    @classmethod
    def parse(cls, word: str) -> _State:
        if not word:
            return cls([])
        absent, place = json.loads(word)
        return cls(absent, place and tuple(place))

    def word(self) -> str:
        return json.dumps([self.absent, self.place])


class Subgroup:
    """Makes one rank's membership in a group of ranks that are on this node.

    Args:
        whole: the membership in the larger group, which has all of the ranks.
        ranks: their numbers in the larger group.
        rank: the index of this process in `ranks`.
        name: distinguishes the group from all others of the same ranks; the same on every rank.
    """

    def __init__(self, whole: RendezvousResult, ranks: Sequence[int], rank: int, name: str) -> None:
        self._whole = whole
        self._seats = [whole.nodes.local.index(r) for r in ranks]
        self._pids = [whole.pids[r] for r in ranks]
        self._rank = rank
        self._pid = os.getpid()
        self._window: _C.Window | None = None  # once this rank has mapped it
        self._store: Store = PrefixStore(f"subgroup/{name}", whole.store)

    def join(self) -> RendezvousResult:
        """Joins the group, without waiting for other ranks. A rank joins or leaves once.

        Raises:
            pycomm.GroupUnusable: this process is a fork of the rank.
            MemoryError: the node has too little memory.
            RuntimeError: the Store is gone.
        """
        if os.getpid() != self._pid:
            raise GroupUnusable(
                "group belongs to the parent of this forked process; make a new one here"
            )
        word, window = "", self._whole.window
        while (place := (state := _State.parse(word)).place) is None:
            mine = window.reserve(self._seats[self._rank], len(self._seats), state.absent)
            word, told = self._replace(word, _State(state.absent, mine))
            if not told:
                window.cancel(*mine)
        return RendezvousResult(
            nodes=Nodes((tuple(range(len(self._seats))),), 0),
            window=self._map(place),
            pids=self._pids,
            processes=[self._whole.processes[seat] for seat in self._seats],
            cores=self._whole.cores,
            link=None,
            port=None,
            store=self._store,
            listener=None,
        )

    def leave(self) -> None:
        """Leaves the group, also if this rank has joined or has tried to."""
        word, told = "", os.getpid() != self._pid
        while not told:
            state = _State.parse(word)
            if state.place is not None:
                self._map(state.place).depart()
                return
            if self._rank in state.absent:  # recorded before an interrupt
                return
            word, told = self._replace(word, _State([*state.absent, self._rank]))

    def _map(self, place: tuple[int, int, int]) -> _C.Window:
        if self._window is None:
            self._window = self._whole.window.part(self._seats, self._rank, *place)
        return self._window

    def _replace(self, word: str, new: _State) -> tuple[str, bool]:
        """Replaces the word in the Store; returns the present word, and whether it is the new one.

        No two ranks write the same word, because it ends with the rank's number or its place.
        """
        found = self._store.compare_set(_STATE, word, new.word()).decode()
        return found, found == new.word()


def title_of(
    description: str, world_ranks: Sequence[int], world_size: int
) -> tuple[str, Sequence[int]]:
    """What errors tell of a group: its process group's description, and its ranks of the world."""
    told = [description] if description not in ("", "default_pg", "undefined") else []
    if len(world_ranks) < world_size:
        listed = _listed(world_ranks)
        if len(listed) > _LONGEST_LIST:
            listed = f"{len(world_ranks)} ranks, {world_ranks[0]} to {world_ranks[-1]},"
        told.append(f"{listed} of the default process group")
    return ", ".join(told), world_ranks
