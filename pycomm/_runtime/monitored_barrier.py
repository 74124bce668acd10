"""A barrier over the Store that finds out which ranks are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycomm._runtime.waiting import Deadline
from pycomm.errors import Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: float, wait_all_ranks: bool
) -> None:
    """A barrier in which rank 0 finds out who is missing.

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
        if outcome is not None:  # rank 0 looks for no key any more
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
    """Waits for a key in the Store; returns False if it has not come at the deadline."""
    try:
        deadline.await_keys(store, [key], lambda: None)
    except TimeoutError:
        return False
    return True
