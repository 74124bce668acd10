"""How the processes of a group find each other and come to share memory.

The group's torch.distributed Store carries the ranks' identities, by which those find each other
that share a machine, and addresses. The first rank of a machine makes its window, an anonymous
file, and hands its descriptor to each peer over an abstract Unix socket, so that nothing ever has a
name in a file system. Who connects must run as the same user and know the secret that only the
Store's users can read. Each peer answers whether it could map the window, so that the failure of
one rank is an error of all ranks, at once.
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

    from pycomm import _C

_NAMESPACES = ("net", "pid", "ipc")
_FIRST_PATIENCE = 1.0  # seconds until a rank looks whether others have come anew
_MAPPED = "mapped"


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
        window: this machine's.
        pids: every rank's process.
        pidfds: what tells of the ends of this machine's; -1 for this rank itself.
        cores: how many the ranks of this machine may run on, all together.
        store: of this group alone.
    """

    machines: Machines
    window: _C.Window
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


@dataclass(frozen=True)
class WindowMaker:
    """How a rank makes a window, and maps one.

    Attributes:
        create: returns the descriptor of a new one for so many ranks.
        map: maps the one behind a descriptor, for so many ranks; owns the descriptor from then on.
    """

    create: Callable[[int], int]
    map: Callable[[int, int], _C.Window]


def _hand_out(
    listener: socket.socket,
    fd: int,
    secret: bytes,
    peers: int,
    deadline: Deadline,
    connections: contextlib.ExitStack,
) -> list[socket.socket]:
    """Gives the descriptor to `peers` peers, and nothing to anyone else who connects."""
    given: list[socket.socket] = []
    while len(given) < peers:
        with deadline.guarding("every rank taking the window"):
            listener.settimeout(deadline.left())
            connection = connections.enter_context(listener.accept()[0])
            # Who dies in the middle of it is missed later, by the deadline.
            with contextlib.suppress(ConnectionError):
                connection.settimeout(deadline.left())
                if _peer_uid(connection) != os.getuid() or connection.recv(64) != secret:
                    connection.close()
                    continue
                socket.send_fds(connection, [b"w"], [fd])
                given.append(connection)
    return given


def _answer(connection: socket.socket, deadline: Deadline) -> str:
    """What a peer says of the window; one that has died since is the first operation's to find."""
    with deadline.guarding("every rank mapping the window"):
        connection.settimeout(deadline.left())
        try:
            return connection.recv(4096).decode() or _MAPPED
        except ConnectionError:
            return _MAPPED


def _refusal(rank: int, error: Exception) -> str:
    return f"rank {rank} could not map the window: {error}"


def _take(
    address: str,
    secret: bytes,
    rank: int,
    map_window: Callable[[int], _C.Window],
    deadline: Deadline,
) -> _C.Window:
    """Gets the descriptor, maps the window, and answers how that went."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with deadline.guarding("the first rank handing out the window"):
            connection.settimeout(deadline.left())
            connection.connect(f"\0{address}")
            connection.send(secret)
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if not fds:
                raise ConnectionError("the connection was closed before the window was handed out")
            os.set_inheritable(fds[0], False)
        answer = _MAPPED
        try:
            return map_window(fds[0])
        except Exception as error:
            answer = _refusal(rank, error)
            raise
        finally:
            with contextlib.suppress(OSError):
                connection.sendall(answer.encode())


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
    store: Store,
    rank: int,
    size: int,
    windows: WindowMaker,
    settings: dict[str, int],
    timeout: float,
) -> Membership:
    """Meets the other ranks over `store`.

    Args:
        store: the process group's own Store, under a prefix that only this group uses, now or
            in an earlier life of its processes.
        rank: this process.
        size: how many processes.
        windows: makes the window on the first rank of each machine, and maps it on all.
        settings: what must be the same on every rank, by its name in messages.
        timeout: seconds for the whole of it.

    Raises:
        ValueError: the ranks' settings differ, or a rank could not map the window; on all ranks.
        pycomm.Timeout: a rank did not come in time.
        pycomm.PeerDied: a rank died after it had come, where that was seen.
    """
    deadline = Deadline(timeout)
    mine = {
        "pid": os.getpid(),
        "machine": machine_identity(rank),
        "cores": sorted(os.sched_getaffinity(0)),
        "settings": settings,
    }
    texts, store = meet(store, rank, size, json.dumps(mine), deadline)
    everyone = [json.loads(text) for text in texts]
    check_same([member["settings"] for member in everyone])
    machines = Machines.of([member["machine"] for member in everyone], rank)
    pids = [int(member["pid"]) for member in everyone]
    cores = set().union(*(everyone[r]["cores"] for r in machines.local))
    with contextlib.ExitStack() as on_failure:
        pidfds = []
        for r in machines.local:
            pidfds.append(_watch(r, pids[r]) if r != rank else -1)
            if r != rank:
                on_failure.callback(os.close, pidfds[-1])
        window = _share_window(store, rank, machines, windows, deadline)
        on_failure.pop_all()
    return Membership(machines, window, pids, pidfds, len(cores), store)


def check_same(settings: list[dict[str, int]]) -> None:
    """Refuses ranks that differ; the error names the first one that differs from rank 0."""
    for name, expected in settings[0].items():
        for rank, others in enumerate(settings):
            if others.get(name) != expected:
                raise ValueError(
                    f"{name} must be the same on every rank: rank 0 has {expected}, "
                    f"rank {rank} has {others.get(name)}"
                )


def _share_window(
    store: Store, rank: int, machines: Machines, windows: WindowMaker, deadline: Deadline
) -> _C.Window:
    """The window of the ranks of this machine, once every rank of every machine has its own."""
    first, count = machines.local[0], len(machines.local)
    if rank == first:
        try:
            window, answer = _offer(store, rank, count, windows, deadline)
        except Timeout:  # the others' own deadlines are near
            raise
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                store.set(f"complete/{rank}", _refusal(rank, error))
            raise
        with deadline.guarding("reaching the Store"):
            store.set(f"complete/{rank}", answer)
    else:
        with deadline.guarding(f"rank {first} offering the window"):
            address, secret = json.loads(_get(store, f"window/{first}", deadline))
        window = _take(address, secret.encode(), rank, lambda fd: windows.map(fd, count), deadline)
    # Who goes on before all are there would blame the first for somebody else's death.
    for ranks in machines.ranks:
        with deadline.guarding("every rank taking the window"):
            answer = _get(store, f"complete/{ranks[0]}", deadline)
        if answer != _MAPPED:
            raise ValueError(answer)
    return window


def _offer(
    store: Store, rank: int, count: int, windows: WindowMaker, deadline: Deadline
) -> tuple[_C.Window, str]:
    """Makes the window and hands it out; and what the peers answer, the first refusal if any."""
    address, secret = f"pycomm-{secrets.token_hex(16)}", secrets.token_hex(16)
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0{address}")
        listener.listen(count)
        with deadline.guarding("reaching the Store"):
            store.set(f"window/{rank}", json.dumps([address, secret]))
        with contextlib.ExitStack() as on_failure:
            fd = windows.create(count)
            on_failure.callback(os.close, fd)
            peers = _hand_out(listener, fd, secret.encode(), count - 1, deadline, open_sockets)
            on_failure.pop_all()
        window = windows.map(fd, count)
        answers = [_answer(connection, deadline) for connection in peers]
    return window, next((answer for answer in answers if answer != _MAPPED), _MAPPED)
