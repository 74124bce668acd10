"""Stores that a rank serves to others when torch.distributed's Store may be gone."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it

from pycomm._runtime.sockets import open_sockets, plain_address
from pycomm._runtime.threads import Deadline, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.distributed_c10d import Store

_FIRST_TRY = 0.5  # seconds
_ANSWER = 10.0  # seconds that a server may take for its first answer


def serve(host: str, seconds: float) -> tuple[Store, int]:
    """A new Store, which lives as long as the object, and its port.

    Args:
        host: this rank's address.
        seconds: how long an operation on it may take.
    """
    patience = timedelta(seconds=seconds)
    store = TCPStore(host, 0, None, True, patience, wait_for_workers=False)
    return store, int(store.port)


def reach(where: Sequence[Any], seconds: float, given_up: Callable[[], object]) -> Store:
    """Another rank's Store.

    Args:
        where: the rank's host and the Store's port.
        seconds: for reaching it, and then for each operation.
        given_up: called between two tries; returns True, or raises, to end them.

    Raises:
        RuntimeError: it was not reached.
    """
    (host, port), deadline, longest = where, Deadline(seconds), _FIRST_TRY
    while True:
        began, patience = time.monotonic(), min(longest, deadline.left())
        try:
            # Torch would retry, and print that, even if no server listens.
            socket.create_connection((host, port), patience).close()
            with _answers_within((host, port), min(max(patience, _ANSWER), deadline.left())):
                store = TCPStore(host, port, None, False, timedelta(seconds=patience))
            store.set_timeout(timedelta(seconds=seconds))
            limit_receives((host, port), seconds)
            return store
        except (OSError, RuntimeError) as error:
            ended = isinstance(error, ConnectionRefusedError)
            if ended or given_up() or deadline.over():
                raise RuntimeError(f"no Store was reached at {host}:{port}: {error}") from error
            # Torch asks for the name of the host, and a name server may take seconds to answer.
            longest = max(longest, 2 * (time.monotonic() - began))


@contextlib.contextmanager
def _answers_within(address: tuple[str, int], seconds: float) -> Iterator[None]:
    """Ends the connections that the block makes to an address if the block takes too long.

    Torch's constructor would wait forever for an answer from a suspended server.

    Raises:
        TimeoutError: the block took too long.
    """
    done, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(seconds):  # torch may try once more
            ended.set()
            for connection in _connections(address):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="pycomm-store", daemon=True)
    start_thread(watcher)
    try:
        yield
    finally:
        done.set()
        watcher.join()
    if ended.is_set():
        raise TimeoutError("it has not answered in time")


def limit_receives(address: tuple[str, int], seconds: float) -> None:
    """Lets receives from an address fail after a time.

    Some calls of torch's Store would wait forever for an answer from a suspended server.
    """
    limit = struct.pack("ll", *divmod(int(seconds * 1e6) + 1, 10**6))
    for connection in _connections(address):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _connections(address: tuple[str, int]) -> Iterator[socket.socket]:
    """This process's connections to an address."""
    for descriptor in open_sockets():
        with (
            contextlib.suppress(OSError),  # closed meanwhile, or not connected
            socket.socket(fileno=os.dup(descriptor)) as other,
        ):
            peer = other.getpeername()  # of an Internet socket a tuple, of others a string
            if other.family != socket.AF_UNIX and (plain_address(peer[0]), peer[1]) == address:
                yield other
