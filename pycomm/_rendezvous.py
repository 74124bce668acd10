"""How the processes of a group find each other and come to share memory.

The group's torch.distributed Store carries one address and the ranks' identities. Rank 0 makes the
window, an anonymous file, and hands its descriptor to each peer over an abstract Unix socket, so
that nothing ever has a name in a file system. Who connects must run as the same user and know the
secret that only the Store's users can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pycomm.errors import PeerDied, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAMESPACES = ("net", "pid", "ipc")


class Deadline:
    """Seconds that a rendezvous may still take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never less than a millisecond (zero would mean "do not wait at all")."""
        return max(self._end - time.monotonic(), 1e-3)

    @contextlib.contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Turns the transports' own ways of failing into pycomm.Timeout."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise Timeout(
                f"rendezvous: {what} did not happen within {self._seconds} s ({error})",
                operation="rendezvous",
            ) from error


@dataclass(frozen=True)
class Membership:
    """What a rank knows after the rendezvous.

    Attributes:
        window_fd: the shared file.
        pids: every rank's process.
        pidfds: what tells of their ends; -1 for this rank itself.
        cores: how many the ranks may run on, all together.
    """

    window_fd: int
    pids: list[int]
    pidfds: list[int]
    cores: int


def machine_identity() -> str:
    """Equal for two processes only if they can share memory and watch each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{n}").readlink()) for n in _NAMESPACES)])


def _exchange(
    store: Store, key: str, mine: str, rank: int, size: int, deadline: Deadline
) -> list[str]:
    """All ranks' strings, in rank order."""
    with deadline.guarding("reaching the Store"):
        store.set(f"{key}/{rank}", mine)
    values = []
    for r in range(size):
        with deadline.guarding(f"rank {r} joining"):
            store.wait([f"{key}/{r}"], timedelta(seconds=deadline.left()))
            values.append(store.get(f"{key}/{r}").decode())
    return values


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def _hand_out(
    listener: socket.socket, fd: int, secret: bytes, peers: int, deadline: Deadline
) -> None:
    """Gives the descriptor to `peers` peers, and nothing to anyone else who connects."""
    while peers > 0:
        with deadline.guarding("every rank taking the window"):
            listener.settimeout(deadline.left())
            connection, _ = listener.accept()
            # Who dies in the middle of it is missed later, by the deadline.
            with connection, contextlib.suppress(ConnectionError):
                connection.settimeout(deadline.left())
                if _peer_uid(connection) != os.getuid() or connection.recv(64) != secret:
                    continue
                socket.send_fds(connection, [b"w"], [fd])
                peers -= 1


def _take(address: str, secret: bytes, deadline: Deadline) -> int:
    with (
        deadline.guarding("rank 0 handing out the window"),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.settimeout(deadline.left())
        connection.connect(f"\0{address}")
        connection.send(secret)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not fds:
            raise ConnectionError("rank 0 closed the connection without handing out the window")
        os.set_inheritable(fds[0], False)
        return fds[0]


def _watch(rank: int, pid: int) -> int:
    """A descriptor that tells of the end of a process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise PeerDied(
            f"rank {rank} (pid {pid}) died during the rendezvous",
            rank=rank,
            pid=pid,
            operation="rendezvous",
        ) from error


def join(
    store: Store, rank: int, size: int, make_window: Callable[[], int], timeout: float
) -> Membership:
    """Meets the other ranks over `store`.

    Args:
        store: the process group's own Store, under a prefix that only this group uses.
        rank: this process.
        size: how many processes.
        make_window: called on rank 0 only; returns the descriptor of a new window.
        timeout: seconds for the whole of it.

    Raises:
        pycomm.Timeout: a rank did not come in time.
        pycomm.PeerDied: a rank died after it had come, where that was seen.
        ValueError: the ranks do not share one machine.
    """
    deadline = Deadline(timeout)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        address, secret = f"pycomm-{secrets.token_hex(16)}", secrets.token_hex(16)
        if rank == 0:
            listener.bind(f"\0{address}")
            listener.listen(size)
        mine = {
            "pid": os.getpid(),
            "machine": machine_identity(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        if rank == 0:
            mine |= {"address": address, "secret": secret}
        everyone = [
            json.loads(text)
            for text in _exchange(store, "member", json.dumps(mine), rank, size, deadline)
        ]
        apart = [r for r in range(size) if everyone[r]["machine"] != everyone[0]["machine"]]
        if apart:
            raise ValueError(
                f"group must lie on one machine (same boot and network, pid and ipc namespaces); "
                f"ranks {apart} share none with rank 0"
            )
        pids = [int(member["pid"]) for member in everyone]
        cores = set().union(*(member["cores"] for member in everyone))
        with contextlib.ExitStack() as on_failure:
            pidfds = []
            for r, pid in enumerate(pids):
                pidfds.append(_watch(r, pid) if r != rank else -1)
                if r != rank:
                    on_failure.callback(os.close, pidfds[-1])
            if rank == 0:
                window_fd = make_window()
                on_failure.callback(os.close, window_fd)
                _hand_out(listener, window_fd, secret.encode(), size - 1, deadline)
                store.set("complete", "")
            else:
                window_fd = _take(everyone[0]["address"], everyone[0]["secret"].encode(), deadline)
                on_failure.callback(os.close, window_fd)
                # Who goes on before all are there would blame rank 0 for somebody else's death.
                with deadline.guarding("every rank taking the window"):
                    store.wait(["complete"], timedelta(seconds=deadline.left()))
            on_failure.pop_all()
    return Membership(window_fd, pids, pidfds, len(cores))
