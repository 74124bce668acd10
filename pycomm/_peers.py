"""The ranks of a group that is being made, from when they know each other: who dies, and who fails.

One failure ends the rendezvous of all: the first that a rank tells, over the group's Store.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from pycomm.errors import Aborted, CollectiveError, PeerDied, PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_FAILED = "failed"  # the key
_KINDS = {kind.__name__: kind for kind in (Aborted, PeerDied, Timeout)}
_NOTICED_WITHIN = 0.5  # seconds from the loss of a dead rank's connections to that of its process


class Peers:
    """Tells of what ends the rendezvous.

    Args:
        store: of this group alone.
        rank: this process.
        pids: every rank's.

    Attributes:
        pidfds: what tells of the ends of other ranks on this machine, by rank.
    """

    def __init__(self, store: Store, rank: int, pids: Sequence[int]) -> None:
        self._store, self._rank, self._pids = store, rank, pids
        self._ends = select.poll()
        self.pidfds: dict[int, int] = {}

    def watch(self, ranks: Sequence[int]) -> None:
        """Notices from now on when one of these dies, the ranks of this machine."""
        for rank in ranks:
            if rank == self._rank:
                continue
            try:
                self.pidfds[rank] = os.pidfd_open(self._pids[rank])
            except ProcessLookupError as error:
                raise self._died(rank) from error
            self._ends.register(self.pidfds[rank], select.POLLIN)

    def close(self) -> None:
        """Watches nobody any more."""
        for fd in self.pidfds.values():
            os.close(fd)

    def look(self) -> None:
        """Raises what has ended the rendezvous, the same on every rank; if anything has."""
        if ended := {fd for fd, _ in self._ends.poll(0)}:
            self._fail(self._died(next(r for r, fd in self.pidfds.items() if fd in ended)))
        if self._store.check([_FAILED]):
            raise _error_of(self._store.get(_FAILED).decode())

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others of exceptions in its block. Raises what was told first instead."""
        try:
            yield
        except CollectiveError as error:
            if isinstance(error, Timeout):
                self.look_for_a_while()
            self._fail(error)
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                self._tell("ValueError", f"rank {self._rank} could not map the window: {error}")
            raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                what = f"rank {self._rank} was interrupted during the rendezvous: {error!r}"
                self._tell("Aborted", what, self._rank, self._pids[self._rank])
            raise

    def look_for_a_while(self) -> None:
        """After a failure that may follow from a death: connections go before their process."""
        end = time.monotonic() + _NOTICED_WITHIN
        while time.monotonic() < end:
            try:
                self.look()
            except PycommError:
                raise
            except RuntimeError:  # the Store is gone
                pass
            time.sleep(0.02)

    def _fail(self, error: CollectiveError) -> NoReturn:
        try:
            told = self._tell(type(error).__name__, str(error), error.rank, error.pid)
        except RuntimeError:  # the Store is gone
            raise error from None
        raise _error_of(told)

    def _tell(self, kind: str, message: str, rank: int = -1, pid: int = -1) -> str:
        word = json.dumps([kind, message, rank, pid])
        return str(self._store.compare_set(_FAILED, "", word).decode())

    def _died(self, rank: int) -> PeerDied:
        pid = self._pids[rank]
        what = f"rank {rank} (pid {pid}) died during the rendezvous"
        return PeerDied(what, rank=rank, pid=pid, operation="rendezvous")


def _error_of(word: str) -> Exception:
    kind, message, rank, pid = json.loads(word)
    if kind not in _KINDS:
        return ValueError(message)
    return _KINDS[kind](message, rank=rank, pid=pid, operation="rendezvous")
