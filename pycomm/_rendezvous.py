"""How the processes of a group find each other and come to share memory.

The group's torch.distributed Store carries the ranks' identities, by which those find each other
that share a machine, and addresses. The first rank of a machine makes its window, an anonymous
file, and hands its descriptor to each peer over an abstract Unix socket, so that nothing ever has a
name in a file system. Who connects must run as the same user and know the secret that only the
Store's users can read. Each peer answers whether it could map the window, so that the failure of
one rank is an error of all ranks, at once. From when the ranks know each other every wait looks for
deaths and failures, too (pycomm/_peers.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore

from pycomm._hosts import Machines
from pycomm._peers import Peers
from pycomm.errors import PycommError, Timeout

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from pycomm import _C

_NAMESPACES = ("net", "pid", "ipc")
_FIRST_PATIENCE = 1.0  # seconds until a rank looks whether others have come anew
_MAPPED = "mapped"
_MEETING = "meeting"  # the number of the meeting to come, in the Store
_SLICE = 0.05  # seconds that a wait takes before it looks at other things
_NAP = 0.005
_LONGEST_SLICE = 0.2  # if it took longer, this process was stopped meanwhile


class Deadline:
    """Seconds that a rendezvous may still take, as far as this process runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never less than a millisecond (zero would mean "do not wait at all")."""
        return max(self._end - time.monotonic(), 1e-3)

    def sees(self, store: Store, key: str) -> bool:
        """Waits a moment for a key; whether it is there."""
        with self._slice() as seconds:
            end = time.monotonic() + seconds
            while not (there := store.check([key])) and time.monotonic() < end:
                time.sleep(_NAP)
            return there

    def readable(self, connection: socket.socket) -> bool:
        """Waits a moment for a connection or bytes; whether there are any."""
        with self._slice() as seconds:
            arrivals = select.poll()
            arrivals.register(connection, select.POLLIN)
            return bool(arrivals.poll(1e3 * seconds))

    @contextlib.contextmanager
    def _slice(self) -> Iterator[float]:
        """The seconds that a wait may take; raises TimeoutError if no time is left."""
        begin = time.monotonic()
        if begin >= self._end:
            raise TimeoutError("timed out")
        yield min(_SLICE, self._end - begin)
        self._end += max(0, time.monotonic() - begin - _LONGEST_SLICE)

    @contextlib.contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Turns the transports' own ways of failing into pycomm.Timeout."""
        try:
            yield
        except PycommError:
            raise
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


def machine_identity() -> str:
    """Equal for two processes only if they can share memory and watch each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{n}").readlink()) for n in _NAMESPACES)])


def meet(
    store: Store, rank: int, size: int, mine: str, deadline: Deadline
) -> tuple[list[str], Store]:
    """Exchanges a string; returns all ranks', in rank order, and a store with nothing in it.

    torchrun gives processes that it has restarted the Store of those before them, with all that is
    in it (github.com/pytorch/pytorch/issues/135712). So each rank adds a number of its own to its
    string, and what has been read counts once all have read the same. Every meeting has a number,
    which the Store counts: ranks that have tried unequally often come to the same one.
    """
    string, meeting = json.dumps([mine, secrets.token_hex(16)]), -1
    patience, counted = _FIRST_PATIENCE, set()
    while True:
        with deadline.guarding("reaching the Store"):
            if (now := _meeting(store)) != meeting:
                meeting = now
                store.set(f"{meeting}/member/{rank}", string)
        members = _members(store, meeting, size, deadline)
        if len(members) < size:
            continue  # those have met without this rank's new life
        name = hashlib.sha256("".join(members).encode()).hexdigest()
        with deadline.guarding("every rank joining"):
            if name not in counted and store.add(f"{name}/readers", 1) == size:
                store.set(f"{name}/agreed", "")
            counted.add(name)
            end = time.monotonic() + patience
            while not (agreed := deadline.sees(store, f"{name}/agreed")):
                if time.monotonic() > end or _meeting(store) != meeting:
                    break
            if not agreed:
                patience *= 2
                continue
            fresh = PrefixStore(name, store)
            if fresh.add("met", 1) == size:
                store.add(_MEETING, 1)
                for r in range(size):  # nobody reads those of the meeting before any more
                    store.delete_key(f"{meeting - 1}/member/{r}")
        return [json.loads(member)[0] for member in members], fresh


def _meeting(store: Store) -> int:
    return int(store.add(_MEETING, 0))


def _members(store: Store, meeting: int, size: int, deadline: Deadline) -> list[str]:
    """What all ranks have said; less once the meeting is over."""
    members: list[str] = []
    for r in range(size):
        key = f"{meeting}/member/{r}"
        with deadline.guarding(f"rank {r} joining"):
            while not deadline.sees(store, key):
                if _meeting(store) != meeting:
                    return members
            members.append(store.get(key).decode())
    return members


def _get(store: Store, key: str, deadline: Deadline, peers: Peers) -> str:
    while not deadline.sees(store, key):
        peers.look()
    return str(store.get(key).decode())


def _receive(connection: socket.socket, length: int, deadline: Deadline, peers: Peers) -> bytes:
    """What comes first, or nothing from who is gone."""
    while not deadline.readable(connection):
        peers.look()
    try:
        return connection.recv(length)
    except ConnectionError:
        return b""


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
    count: int,
    deadline: Deadline,
    peers: Peers,
    connections: contextlib.ExitStack,
) -> list[socket.socket]:
    """Gives the descriptor to `count` peers, and nothing to anyone else who connects."""
    given: list[socket.socket] = []
    while len(given) < count:
        with deadline.guarding("every rank taking the window"):
            while not deadline.readable(listener):
                peers.look()
            connection = connections.enter_context(listener.accept()[0])
            if (
                _peer_uid(connection) != os.getuid()
                or _receive(connection, 64, deadline, peers) != secret
            ):
                connection.close()
            else:
                with contextlib.suppress(ConnectionError):  # it has died, which peers will tell
                    socket.send_fds(connection, [b"w"], [fd])
                    given.append(connection)
    return given


def _take(
    address: str,
    secret: bytes,
    map_window: Callable[[int], _C.Window],
    deadline: Deadline,
    peers: Peers,
) -> _C.Window:
    """Gets the descriptor, maps the window, and says so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with deadline.guarding("the first rank handing out the window"):
            connection.connect(f"\0{address}")
            connection.send(secret)
            while not deadline.readable(connection):
                peers.look()
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if not fds:
                raise ConnectionError("the connection was closed before the window was handed out")
            os.set_inheritable(fds[0], False)
        window = map_window(fds[0])
        with contextlib.suppress(OSError):
            connection.sendall(_MAPPED.encode())
        return window


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
        pycomm.PeerDied: a rank of some machine's died after all had come; on all ranks.
        pycomm.Aborted: a rank was interrupted.
    """
    deadline = Deadline(timeout)
    mine = {
        "pid": os.getpid(),
        "machine": machine_identity(),
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
        peers = Peers(store, rank, pids)
        on_failure.callback(peers.close)
        with peers.telling():
            peers.watch(machines.local)
            window = _share_window(store, rank, machines, windows, deadline, peers)
        on_failure.pop_all()
    pidfds = [peers.pidfds.get(r, -1) for r in machines.local]
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
    store: Store,
    rank: int,
    machines: Machines,
    windows: WindowMaker,
    deadline: Deadline,
    peers: Peers,
) -> _C.Window:
    """The window of the ranks of this machine, once every rank of every machine has its own."""
    first, count = machines.local[0], len(machines.local)
    if rank == first:
        window = _offer(store, rank, count, windows, deadline, peers)
        with deadline.guarding("reaching the Store"):
            store.set(f"complete/{rank}", _MAPPED)
    else:
        with deadline.guarding(f"rank {first} offering the window"):
            address, secret = json.loads(_get(store, f"window/{first}", deadline, peers))
        window = _take(address, secret.encode(), lambda fd: windows.map(fd, count), deadline, peers)
    # Who goes on before all are there would blame the first for somebody else's death.
    for ranks in machines.ranks:
        with deadline.guarding("every rank taking the window"):
            _get(store, f"complete/{ranks[0]}", deadline, peers)
    return window


def _offer(
    store: Store, rank: int, count: int, windows: WindowMaker, deadline: Deadline, peers: Peers
) -> _C.Window:
    """Makes the window and hands it out, until all have mapped it."""
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
            given = _hand_out(
                listener, fd, secret.encode(), count - 1, deadline, peers, open_sockets
            )
            on_failure.pop_all()
        window = windows.map(fd, count)
        for connection in given:
            with deadline.guarding("every rank mapping the window"):
                if _receive(connection, 64, deadline, peers) != _MAPPED.encode():
                    peers.look_for_a_while()
                    raise ConnectionError("a rank closed the connection")
    return window
