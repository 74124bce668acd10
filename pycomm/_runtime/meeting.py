"""A meeting of ranks over a Store that may contain entries of processes that are gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore

from pycomm._runtime.peers import error_of, tell, word_of_interrupt

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.waiting import Deadline

_FIRST_PATIENCE = 1.0  # seconds until a rank checks whether others have restarted
_MEETING = "meeting"  # key in the Store: the number of the next meeting


def meet(
    store: Store, rank: int, size: int, mine: str, deadline: Deadline
) -> tuple[list[str], Store]:
    """Exchanges a string; returns all ranks', in rank order, and an empty store.

    torchrun gives restarted processes the Store of their predecessors, with all its contents
    (github.com/pytorch/pytorch/issues/135712). So each rank adds a random number to its string, and
    strings count only once all ranks have read the same ones. The Store counts meetings, so ranks
    that have tried unequally often still come to the same one.

    A meeting ends with one word: a hash of the strings that all have read, or the news that a rank
    was interrupted. A rank that arrives after the end goes to the next meeting.

    Raises:
        pycomm.Timeout: a rank did not come in time.
        pycomm.Aborted: a rank was interrupted while this one was waiting.
    """
    string = json.dumps([mine, secrets.token_hex(16)])
    while True:
        with deadline.guarding("reaching the Store"):
            meeting = _Meeting(store, rank, size, deadline)
        try:
            name, members = meeting.attend(string)
        except Exception:
            raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the Store is gone
                meeting.interrupt(error)
            raise
        if members:
            return [json.loads(member)[0] for member in members], PrefixStore(name, store)


class _Meeting:
    """The next meeting, as one rank sees it. Ranks that have read the same agree on its name."""

    def __init__(self, store: Store, rank: int, size: int, deadline: Deadline) -> None:
        self._store, self._rank, self._size, self._deadline = store, rank, size, deadline
        self._number = int(store.add(_MEETING, 0))
        self._keys = [f"{self._number}/member/{r}" for r in range(size)]
        self._over = f"{self._number}/over"

    def attend(self, string: str) -> tuple[str, list[str]]:
        """The meeting's name and all strings; empty if it ended without this rank."""
        deadline, store = self._deadline, self._store
        name, members, patience, read = "", [], _FIRST_PATIENCE, set()
        with deadline.guarding("reaching the Store"):
            store.set(self._keys[self._rank], string)
            if self._number > 1:  # no rank reads the meeting before the last any more
                store.delete_key(f"{self._number - 2}/member/{self._rank}")
            if self._is_over():  # before this rank arrived
                self._count()
                return "", []
        while True:
            with deadline.guarding(self._absence):
                if not deadline.await_keys(store, self._keys, self._is_over):
                    break
                members = [text.decode() for text in store.multi_get(self._keys)]
            name = hashlib.sha256("".join(members).encode()).hexdigest()
            with deadline.guarding("every rank joining"):
                if name not in read and store.add(f"{name}/readers", 1) == self._size:
                    self._end(name)
                read.add(name)
                if deadline.await_keys(store, [self._over], _Patience(patience).ended):
                    break
            patience *= 2  # after this time, check again whether others have restarted
        with deadline.guarding("reaching the Store"):
            word = store.get(self._over).decode()
            if word == name:
                return name, members
            self._count()
        if _is_failure(word):
            raise error_of(word)
        return "", []

    def interrupt(self, error: BaseException) -> None:
        """Ends the meeting for all ranks, or the rendezvous that has followed from it."""
        word = word_of_interrupt(error, self._rank, os.getpid())
        first = self._end(word)
        if not _is_failure(first):
            tell(PrefixStore(first, self._store), word)

    def _end(self, word: str) -> str:
        """Ends the meeting with this word unless it has ended; returns the word that ended it."""
        first = self._store.compare_set(self._over, "", word)
        self._count()
        return str(first.decode())

    def _count(self) -> None:
        """Makes the next meeting the current one for all ranks."""
        self._store.compare_set(_MEETING, str(self._number), str(self._number + 1))

    def _is_over(self) -> bool:
        return bool(self._store.check([self._over]))

    def _absence(self) -> str:
        absent = [f"rank {r}" for r, key in enumerate(self._keys) if not self._store.check([key])]
        return f"{' and '.join(absent) or 'every rank'} joining"


class _Patience:
    """Ends after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def ended(self) -> bool:
        return time.monotonic() > self._end


def _is_failure(word: str) -> bool:
    return word.startswith("[")  # unlike a name
