"""Watches the ranks of a group that is being made, and finds missing ranks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from pycomm import _C
from pycomm._runtime.threads import Deadline, start_thread
from pycomm.errors import Aborted, CollectiveError, PeerDied, PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.lifetime import Nodes

# Watches the ranks of a group that is being made for deaths and failures.
#
# The first failure that a rank reports over the group's Store ends the rendezvous on all ranks.

_FAILED = "failed"  # the key
_KINDS = {kind.__name__: kind for kind in (Aborted, PeerDied, Timeout)}
_NOTICED_WITHIN = 0.5  # seconds from the end of a dead rank's connections to its process's end


class Peers:
    """Reports failures that end the rendezvous.

    Args:
        store: a Store that only this group uses.
        rank: the rank of this process.
        pids: the process id of every rank.
        lost: returns ranks that are known by other means to have ended.

    Attributes:
        processes: the other processes on this node, by rank. Ranks that are threads of this
            process end with it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        pids: Sequence[int],
        lost: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._store, self._rank, self._pids, self._lost = store, rank, pids, lost
        self.processes: dict[int, _C.Process] = {}

    @contextlib.contextmanager
    def watching(self, nodes: Nodes) -> Iterator[None]:
        """Watches for deaths in its block: on this node directly, elsewhere by a long silence."""
        for rank in nodes.local:
            if self._pids[rank] != self._pids[self._rank]:
                if (process := _C.Process.find(self._pids[rank])) is None:
                    raise self._died(rank)
                self.processes[rank] = process
        if len(nodes.ranks) == 1 or self._rank != nodes.local[0]:
            yield
            return
        from pycomm._runtime.internode import Heartbeat

        neighbour = nodes.ranks[(nodes.here + 1) % len(nodes.ranks)][0]
        pulse = Heartbeat(self._store, self._rank, neighbour, self._tell_of)
        start_thread(pulse)
        try:
            yield
        finally:
            pulse.close()

    def look(self) -> None:
        """Raises the failure that has ended the rendezvous, the same on every rank, if any."""
        ended = [rank for rank, process in self.processes.items() if process.ended]
        for rank in ended or self._lost():
            self._fail(self._died(rank))
        if self._store.check([_FAILED]):
            raise error_of(self._store.get(_FAILED).decode())

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Reports exceptions in its block. Raises the failure that was reported first instead."""
        try:
            yield
        except CollectiveError as error:
            if isinstance(error, Timeout):
                self.look_for_a_while()
            self._fail(error)
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                what = f"rank {self._rank} could not set up the group: {error}"
                tell(self._store, _word("ValueError", what))
            raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                tell(self._store, word_of_interrupt(error, self._rank, self._pids[self._rank]))
            raise

    def look_for_a_while(self) -> None:
        """Looks for a death that may have caused a failure; connections end before processes."""
        end = time.monotonic() + _NOTICED_WITHIN
        while time.monotonic() < end:
            try:
                self.look()
            except PycommError:
                raise
            except RuntimeError:  # the Store is gone
                pass
            time.sleep(0.02)

    def _tell_of(self, rank: int) -> None:
        """Reports that a rank on another node seems to be dead."""
        error = self._died(rank)
        tell(self._store, _word("PeerDied", str(error), rank, error.pid))

    def _fail(self, error: CollectiveError) -> NoReturn:
        try:
            told = tell(self._store, _word(type(error).__name__, str(error), error.rank, error.pid))
        except RuntimeError:  # the Store is gone
            raise error from None
        raise error_of(told)

    def _died(self, rank: int) -> PeerDied:
        pid = self._pids[rank]
        what = f"rank {rank} (pid {pid}) died during the rendezvous"
        return PeerDied(what, rank=rank, pid=pid, operation="rendezvous")


def tell(store: Store, word: str) -> str:
    """Reports the end of the rendezvous to all ranks; returns the first report."""
    return str(store.compare_set(_FAILED, "", word).decode())


def word_of_interrupt(error: BaseException, rank: int, pid: int) -> str:
    """The report of an interrupt, for :func:`tell`."""
    what = f"rank {rank} was interrupted during the rendezvous: {error!r}"
    return _word("Aborted", what, rank, pid)


def _word(kind: str, message: str, rank: int = -1, pid: int = -1) -> str:
    return json.dumps([kind, message, rank, pid])


def error_of(word: str) -> Exception:
    """The exception for a report."""
    kind, message, rank, pid = json.loads(word)
    if kind not in _KINDS:
        return ValueError(message)
    return _KINDS[kind](message, rank=rank, pid=pid, operation="rendezvous")


# A barrier over the Store that finds out which ranks are missing.


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: float, wait_all_ranks: bool
) -> None:
    """A barrier in which rank 0 finds out which ranks are missing.

    Args:
        store: a Store that only this barrier uses.
        rank: the rank of this process.
        size: the number of ranks.
        timeout: in seconds.
        wait_all_ranks: report all missing ranks, instead of the first one.

    Raises:
        pycomm.Timeout: ranks are missing; on every rank that has come.
    """
    deadline = Deadline(timeout)
    if rank != 0:
        mine = str(rank)
        store.set(mine, "")
        outcome = store.get("over") if _comes(store, "over", deadline) else None
        if outcome is not None:  # rank 0 no longer looks for keys
            store.delete_key(mine)
            if store.add("readers", 1) == size - 1:  # the last one
                store.delete_key("over")
                store.delete_key("readers")
        if outcome != b"complete":
            raise Timeout(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
                "rank.",
                rank=0,
                operation="monitored_barrier",
            )
        return
    missing: list[int] = []
    for other in range(1, size):
        if not _comes(store, str(other), deadline):
            missing.append(other)
            if not wait_all_ranks:
                break
    if size > 1:
        store.set("over", "incomplete" if missing else "complete")
    if missing:
        ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        late = "Rank 0 timed out in monitoredBarrier: " if timeout <= 0 else ""
        raise Timeout(
            f"{late}{ranks} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms",
            rank=missing[0],
            operation="monitored_barrier",
        )


def _comes(store: Store, key: str, deadline: Deadline) -> bool:
    """Waits for a key in the Store; returns False if the deadline passes first."""
    try:
        deadline.await_keys(store, [key], lambda: None)
    except TimeoutError:
        return False
    return True
