"""Detects by its silence that a node is gone while a group is made.

A pidfd reports only processes of the same node, and all ranks of a node may die at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_INTERVAL = 0.25  # seconds between beats
# A beat comes from a thread of its own, so only a suspended process, node or network delays it.
# Swapping, a lost packet or the migration of a node seldom takes seconds.
SILENCE = 10.0


class Pulse(threading.Thread):
    """Counts in the Store for this node, and detects if the next node stops counting.

    Args:
        store: a Store that only this group uses.
        rank: the rank of this process, the first of its node.
        neighbour: the first rank of the next node.
        silent: called with the neighbour once it has been silent for `SILENCE` seconds. Time in
            which this process was suspended does not count.
    """

    def __init__(
        self, store: Store, rank: int, neighbour: int, silent: Callable[[int], object]
    ) -> None:
        super().__init__(name="pycomm-pulse", daemon=True)
        self._store, self._silent = store, silent
        self._rank, self._next = rank, neighbour
        self._over = threading.Event()

    def run(self) -> None:
        """Counts until closed."""
        with contextlib.suppress(RuntimeError):  # the Store is gone, which all other waits detect
            self._beat()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self.join()

    def _beat(self) -> None:
        last, silence, before = -1, 0.0, time.monotonic()
        while not self._over.is_set():
            self._store.add(f"pulse/{self._rank}", 1)
            count = self._store.add(f"pulse/{self._next}", 0)
            now = time.monotonic()
            silence = 0.0 if count != last else silence + min(now - before, 2 * _INTERVAL)
            last, before = count, now
            if silence > SILENCE:
                self._silent(self._next)
                return
            self._over.wait(_INTERVAL)
