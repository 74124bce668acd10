"""How the processes of a group find each other and come to share memory.

The group's torch.distributed Store carries the ranks' identities, by which those find each other
that share a machine, and addresses. The first rank of a machine makes its window, an anonymous
file, and hands its descriptor to each peer over an abstract Unix socket, so that nothing ever has a
name in a file system. Who connects must run as the same user and know the secret that only the
Store's users can read.
"""

from __future__ import annotations

import contextlib
import hashlib
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

from torch.distributed.distributed_c10d import PrefixStore

from pycomm._hosts import Machines
from pycomm.errors import PeerDied, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAMESPACES = ("net", "pid", "ipc")
_FIRST_PATIENCE = 1.0  # seconds until a rank looks whether others have come anew


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
        machines: which ranks share one.
        window_fd: this machine's shared file.
        pids: every rank's process.
        pidfds: what tells of the ends of this machine's; -1 for this rank itself.
        cores: how many the ranks of this machine may run on, all together.
        store: of this group alone.
    """

    machines: Machines
    window_fd: int
    pids: list[int]
    pidfds: list[int]
    cores: int
    store: Store


def machine_identity(rank: int) -> str:
    """Equal for two processes only if they can share memory and watch each other.

    For tests, ``PYCOMM_TEST_HOSTS=aab`` puts ranks 0 and 1 on one machine and rank 2 on another.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    parts = [boot, *(str(Path(f"/proc/self/ns/{n}").readlink()) for n in _NAMESPACES)]
    if imagined := os.environ.get("PYCOMM_TEST_HOSTS"):
        parts.append(imagined[rank])
    return " ".join(parts)


def meet(
    store: Store, rank: int, size: int, mine: str, deadline: Deadline
) -> tuple[list[str], Store]:
    """Exchanges a string; returns all ranks', in rank order, and a store with nothing in it.

    torchrun gives processes that it has restarted the Store of those before them, with all that is
    in it (github.com/pytorch/pytorch/issues/135712). So each rank adds a number of its own to its
    string, and what has been read counts once all have read the same.
    """
    with deadline.guarding("reaching the Store"):
        store.set(f"member/{rank}", json.dumps([mine, secrets.token_hex(16)]))
    patience, counted = _FIRST_PATIENCE, set()
    while True:
        members = []
        for r in range(size):
            with deadline.guarding(f"rank {r} joining"):
                members.append(_get(store, f"member/{r}", deadline))
        name = hashlib.sha256("".join(members).encode()).hexdigest()
        with deadline.guarding("every rank joining"):
            if name not in counted and store.add(f"{name}/readers", 1) == size:
                store.set(f"{name}/agreed", "")
            counted.add(name)
            left = deadline.left()
            try:
                store.wait([f"{name}/agreed"], timedelta(seconds=min(patience, left)))
            except RuntimeError:
                if left <= patience:
                    raise
                patience *= 2
                continue
            fresh = PrefixStore(name, store)
            if fresh.add("met", 1) == size:  # nobody reads them any more, or needs to see through
                for r in range(size):
                    store.delete_key(f"member/{r}")
        return [json.loads(member)[0] for member in members], fresh


def _get(store: Store, key: str, deadline: Deadline) -> str:
    store.wait([key], timedelta(seconds=deadline.left()))
    return str(store.get(key).decode())


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
        deadline.guarding("the first rank handing out the window"),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.settimeout(deadline.left())
        connection.connect(f"\0{address}")
        connection.send(secret)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not fds:
            raise ConnectionError("the connection was closed before the window was handed out")
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
    store: Store, rank: int, size: int, make_window: Callable[[int], int], timeout: float
) -> Membership:
    """Meets the other ranks over `store`.

    Args:
        store: the process group's own Store, under a prefix that only this group uses, now or
            in an earlier life of its processes.
        rank: this process.
        size: how many processes.
        make_window: returns the descriptor of a new window for so many ranks; called on the first
            rank of each machine.
        timeout: seconds for the whole of it.

    Raises:
        pycomm.Timeout: a rank did not come in time.
        pycomm.PeerDied: a rank died after it had come, where that was seen.
    """
    deadline = Deadline(timeout)
    mine = {
        "pid": os.getpid(),
        "machine": machine_identity(rank),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    texts, store = meet(store, rank, size, json.dumps(mine), deadline)
    everyone = [json.loads(text) for text in texts]
    machines = Machines.of([member["machine"] for member in everyone], rank)
    pids = [int(member["pid"]) for member in everyone]
    cores = set().union(*(everyone[r]["cores"] for r in machines.local))
    with contextlib.ExitStack() as on_failure:
        pidfds = []
        for r in machines.local:
            pidfds.append(_watch(r, pids[r]) if r != rank else -1)
            if r != rank:
                on_failure.callback(os.close, pidfds[-1])
        window_fd = _share_window(store, rank, machines.local, make_window, deadline)
        on_failure.pop_all()
    return Membership(machines, window_fd, pids, pidfds, len(cores), store)


def _share_window(
    store: Store,
    rank: int,
    local: tuple[int, ...],
    make_window: Callable[[int], int],
    deadline: Deadline,
) -> int:
    """The descriptor of the window of the ranks of this machine, once all of them have it."""
    first = local[0]
    with contextlib.ExitStack() as on_failure:
        if rank == first:
            address, secret = f"pycomm-{secrets.token_hex(16)}", secrets.token_hex(16)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"\0{address}")
                listener.listen(len(local))
                with deadline.guarding("reaching the Store"):
                    store.set(f"window/{first}", json.dumps([address, secret]))
                window_fd = make_window(len(local))
                on_failure.callback(os.close, window_fd)
                _hand_out(listener, window_fd, secret.encode(), len(local) - 1, deadline)
            with deadline.guarding("reaching the Store"):
                store.set(f"complete/{first}", "")
        else:
            with deadline.guarding(f"rank {first} offering the window"):
                address, secret = json.loads(_get(store, f"window/{first}", deadline))
            window_fd = _take(address, secret.encode(), deadline)
            on_failure.callback(os.close, window_fd)
            # Who goes on before all are there would blame the first for somebody else's death.
            with deadline.guarding("every rank taking the window"):
                store.wait([f"complete/{first}"], timedelta(seconds=deadline.left()))
        on_failure.pop_all()
    return window_fd
