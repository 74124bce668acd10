"""How ranks connect over Gloo when they need to, and how its operations are ended."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pycomm._inputs import host
from pycomm._runtime.waiting import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

_AT_ONCE = timedelta(milliseconds=1)


def interfaces() -> int:
    """The number of network interfaces over which Gloo connects ranks now."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1


class Addresses(Store):
    """A Store for Gloo with waits that :meth:`end` ends: a rank that has died will publish nothing.

    Args:
        store: where ranks publish their addresses.
        seconds: how long to wait for one, unless Gloo says it.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store, self._seconds, self._ended = store, seconds, False

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout else self._seconds
        try:
            found = Deadline(seconds).await_keys(self._store, keys, lambda: self._ended)
        except TimeoutError:
            found = False
        if not found:
            why = "the group shrinks" if self._ended else f"waited for {seconds:g} s"
            raise RuntimeError(f"another rank has not published its address over Gloo: {why}")

    def end(self) -> None:
        """Ends waits for ranks that have published nothing yet."""
        self._ended = True


def connect_lazily(store: Store, rank: int, size: int, timeout: float) -> Any:
    """A Gloo backend that connects two ranks when they first exchange something.

    It uses the interfaces of ``GLOO_SOCKET_IFNAME``, as torch's own Gloo groups do.
    """
    made: Any = dist.ProcessGroupGloo
    options = made._Options()
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    options._devices = [
        made.create_device(interface=name, lazy_init=True)
        if name
        else made.create_default_device(lazy_init=True)
        for name in names
    ]
    options._timeout = timedelta(seconds=timeout)
    return made(store, rank, size, options)


def disconnect(gloo: Any, nodes: Sequence[int], interfaces: int) -> None:
    """Closes connections, which ends all operations over them, on both sides.

    Gloo has no abort, but it closes a connection if a receive over it is given up. It has one for
    each network interface, which tags choose.

    Args:
        gloo: a process group or backend.
        nodes: the ranks in it that this one may be connected with.
        interfaces: over how many interfaces.
    """
    for node in nodes:
        for tag in range(interfaces):
            finish(start(gloo.recv, node, host.empty(1, dtype=torch.float32), tag), _AT_ONCE)


def start(operation: Any, node: int, memory: torch.Tensor, tag: int) -> Any:
    """Starts a send or receive; returns None if the connection is lost."""
    try:
        return operation([memory], node, tag)
    except RuntimeError:
        return None


def finish(work: Any, patience: timedelta) -> bool:
    """Waits for a send or receive; returns True if it has completed."""
    try:
        return work is not None and bool(work.wait(patience))
    except RuntimeError:
        return False
