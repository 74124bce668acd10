"""The rendezvous: the processes of a group find each other and set up shared memory.

Over the group's torch.distributed Store, ranks exchange addresses and identities, which show the
ranks that share a node. The first rank of a node makes its window, an anonymous file, and hands the
file's descriptor to each peer over an abstract Unix socket, so nothing ever has a name in a file
system. A peer must run as the same user and know the secret that only the Store's users can read.
Then the nodes connect. No rank continues before all ranks have everything, so the failure of one
rank is an error on all ranks at once. Once the ranks know each other, every wait also checks for
deaths and failures (pycomm/_runtime/failure_detector.py).
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from pycomm import _C
from pycomm._runtime.failure_detector import Peers, error_of, tell, word_of_interrupt
from pycomm._runtime.lifetime import Nodes
from pycomm._runtime.threads import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.internode import GlooTransport
    from pycomm._runtime.sockets import Listener

# A meeting of ranks over a Store that may contain entries of earlier processes.

_FIRST_PATIENCE = 1.0  # seconds until a rank checks whether others have restarted
_MEETING = "meeting"  # key in the Store: the number of the next meeting


def store_all_gather(
    store: Store, rank: int, size: int, mine: str, deadline: Deadline
) -> tuple[list[str], Store]:
    """Exchanges a string; returns all ranks' strings, in rank order, and an empty store.

    torchrun gives restarted processes the Store of their predecessors, with all its contents
    (github.com/pytorch/pytorch/issues/135712). So each rank adds a random number to its string, and
    strings count only once all ranks have read the same strings. The Store counts meetings, so
    ranks with different numbers of attempts still come to the same meeting.

    A meeting ends with one word: a hash of the strings that all have read, or the report that a
    rank was interrupted. A rank that arrives after the end goes to the next meeting.

    Raises:
        pycomm.Timeout: a rank did not come in time.
        pycomm.Aborted: a rank was interrupted while this one was waiting.
    """
    string = json.dumps([mine, secrets.token_hex(16)])
    while True:
        with deadline.guarding("reaching the Store"):
            meeting = _AllGather(store, rank, size, deadline)
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


class _AllGather:
    """One rank's part in the next meeting. Ranks that have read the same agree on its name."""

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
            if self._number > 1:  # no rank reads the meeting before the last one
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
        """Ends the meeting for all ranks, or the rendezvous that has followed it."""
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


# The rendezvous: the processes of a group find each other and set up shared memory.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")
_FAILED = "failed"  # instead of an introduction
_NAMESPACES = ("net", "pid", "ipc")
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # tell a process how to meet others


@dataclass(frozen=True)
class RendezvousResult:
    """The results of the rendezvous for one rank.

    Attributes:
        nodes: the ranks of each node.
        window: the window of this node.
        pids: the process id of every rank.
        processes: the processes of this node's ranks; None for ranks in this process.
        cores: the number of cores that the ranks of this node may run on, all together.
        link: the transport to other nodes; None if this rank does not exchange with them.
        port: where other ranks reach this one with messages; None if there is only one node.
        store: a Store that only this group uses.
        listener: accepts connections from other nodes after a failure; None without `listens`, or
            if there is only one node.
        nccl: True if every rank can use NCCL between nodes, for CUDA tensors.
        everyone: the introductions of all ranks, if they have introduced themselves.
    """

    nodes: Nodes
    window: _C.Window
    pids: list[int]
    processes: list[_C.Process | None]
    cores: int
    link: GlooTransport | None
    port: _C.Port | None
    store: Store
    listener: Listener | None
    nccl: bool = False
    everyone: Sequence[Mapping[str, Any]] = ()

    def leave(self, rank: int) -> None:
        """Tells the others that this rank leaves because it cannot make its group."""
        self.window.leave(self.nodes.local.index(rank))
        if self.link is not None:
            self.link.end()
        if self.listener is not None:
            self.listener.close()


def node_identity() -> str:
    """A string that two processes share only if they can share memory and watch each other."""
    emulated = os.environ.get("PYCOMM_NODE", "")
    return " ".join([_boot(), *map(_namespace, _NAMESPACES), emulated]).rstrip()


def _boot() -> str:
    """Identifies the running kernel; without a boot id, by the host's name, as in NCCL."""
    with contextlib.suppress(OSError):  # /proc may be mounted with subset=pid
        return _BOOT_ID.read_text().strip()
    system, machine = os.uname(), ""
    with contextlib.suppress(OSError):
        machine = _MACHINE_ID.read_text().strip()
    return json.dumps(["no boot id", system.nodename, system.release, system.version, machine])


def _namespace(name: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/ns/{name}").readlink())
    return f"{name}:unknown"


def _get(store: Store, key: str, deadline: Deadline, peers: Peers) -> str:
    deadline.await_keys(store, [key], peers.look)
    return str(store.get(key).decode())


def _receive(connection: socket.socket, length: int, deadline: Deadline, peers: Peers) -> bytes:
    """The first bytes that arrive; empty if the peer is gone."""
    deadline.await_bytes(connection, peers.look)
    try:
        return connection.recv(length)
    except ConnectionError:
        return b""


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def slice_bytes() -> int:
    """Bytes for one rank in a window's file: as much as the node has memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return -(-memory // (1 << 30)) << 30


def _create_window(ranks: int, staging_bytes: int) -> int:
    """Makes the window of a number of ranks, and returns its descriptor."""
    return _C.create_window(ranks, slice_bytes(), staging_bytes)


def _map_window(fd: int, ranks: int, staging_bytes: int) -> _C.Window:
    """Maps a window, and takes ownership of its descriptor."""
    return _C.Window(fd, ranks, slice_bytes(), staging_bytes)


def _hand_out(
    listener: socket.socket, fd: int, secret: bytes, count: int, deadline: Deadline, peers: Peers
) -> None:
    """Gives the descriptor to `count` peers, and refuses all other connections."""
    given = 0
    while given < count:
        with deadline.guarding("every rank taking the window"):
            deadline.await_bytes(listener, peers.look)
            with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                if _peer_uid(connection) == os.getuid() and (
                    _receive(connection, 64, deadline, peers) == secret
                ):
                    socket.send_fds(connection, [b"w"], [fd])
                    given += 1


def _take(address: str, secret: bytes, deadline: Deadline, peers: Peers) -> int:
    """Gets the window's descriptor from the first rank."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        deadline.guarding("the first rank handing out the window"),
    ):
        connection.connect(f"\0{address}")
        connection.send(secret)
        deadline.await_bytes(connection, peers.look)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not fds:
            raise ConnectionError("the connection was closed before the window was handed out")
        os.set_inheritable(fds[0], False)
    return fds[0]


def build() -> dict[str, int]:
    """Versions that must be the same in all processes."""
    return {
        "the window layout of pycomm's build": _C.window_layout,
        "the message format of pycomm's build": _C.message_version,
    }


def introduction(
    staging_bytes: int,
    cuda_heap_bytes: int = 0,
    transport: str = "gloo",
    nccl: bool = False,
    algorithms: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """This rank's introduction: what other ranks must know of it.

    Args:
        staging_bytes: shared memory of every rank for tensors that are not in the window.
        cuda_heap_bytes: device memory of every rank for tensors in the window.
        transport: the caller's transport between nodes.
        nccl: True if this rank can use NCCL between nodes, for CUDA tensors.
        algorithms: the path of a table of algorithms between nodes; None for no table.
    """
    rows: Sequence[Mapping[str, Any]] = []
    if algorithms is not None:
        from pycomm._runtime import algorithm_table

        rows = algorithm_table.read(algorithms)
    return {
        "pid": os.getpid(),
        "user": os.getuid(),
        "node": node_identity(),
        "cores": sorted(os.sched_getaffinity(0)),
        "nccl": nccl,
        "settings": {
            **build(),
            "staging_bytes": int(staging_bytes),
            "cuda_heap_bytes": int(cuda_heap_bytes),
            "transport": transport,
            "algorithms": rows,
        },
    }


def join(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    introduce: Callable[[], Mapping[str, Any]],
    listens: bool = False,
) -> RendezvousResult:
    """Meets the other ranks over `store`, and sets up memory and connections with them.

    Args:
        store: the process group's own Store, under a prefix that only this group uses, also before
            its processes were restarted.
        rank: the rank of this process.
        size: the number of processes.
        timeout: seconds for the whole rendezvous.
        introduce: returns the introduction of this rank. If it raises an error, all ranks do.
        listens: True to make listeners, by which other nodes reach the ranks after a failure.

    Raises:
        As :func:`set_up`.
        ValueError: another rank could not introduce itself.
        pycomm.Timeout: a rank did not arrive in time.
    """
    deadline = Deadline(timeout)
    try:
        mine = json.dumps(introduce())
    except Exception as error:
        told = json.dumps({_FAILED: f"{type(error).__name__}: {error}"})
        with contextlib.suppress(Exception):  # the others learn of it once all have come
            store_all_gather(store, rank, size, told, deadline)
        raise
    texts, store = store_all_gather(store, rank, size, mine, deadline)
    everyone = [json.loads(text) for text in texts]
    for number, member in enumerate(everyone):
        if _FAILED in member:
            raise ValueError(f"rank {number} could not introduce itself: {member[_FAILED]}")
    return set_up(store, rank, everyone, deadline, listens=listens)


def set_up(
    store: Store,
    rank: int,
    everyone: Sequence[Mapping[str, Any]],
    deadline: Deadline,
    lost: Callable[[], Sequence[int]] = tuple,
    listens: bool = False,
) -> RendezvousResult:
    """Sets up memory and connections with ranks that have introduced themselves.

    Args:
        store: an empty Store that only this group uses.
        rank: the rank of this process.
        everyone: the introductions of all ranks.
        deadline: the deadline of all ranks.
        lost: returns ranks that are known by other means to have ended.
        listens: as for :func:`join`.

    Raises:
        ValueError: the ranks' settings differ, or a rank could not set up the group; on all ranks.
        pycomm.PeerDied: a rank died; on all ranks.
        pycomm.Aborted: a rank was interrupted.
    """
    check_same([member["settings"] for member in everyone])
    nodes = Nodes.of([member["node"] for member in everyone], rank)
    pids = [int(member["pid"]) for member in everyone]
    cores = set().union(*(everyone[r]["cores"] for r in nodes.local))
    staging_bytes = everyone[rank]["settings"]["staging_bytes"]
    peers = Peers(store, rank, pids, lost)
    link, listener, port = None, None, None
    with contextlib.ExitStack() as failed, peers.telling(), peers.watching(nodes):
        window = _share_window(store, rank, nodes, staging_bytes, deadline, peers)
        # Others may have completed the rendezvous just before this rank fails.
        failed.callback(window.leave, nodes.local.index(rank))
        if len(nodes.ranks) > 1:
            link, port, listener = _connect_nodes(store, rank, nodes, deadline, peers, listens)
        if link is not None:
            failed.callback(link.end)
        with deadline.guarding("every rank taking the window"):
            _await_all(store, len(everyone), deadline, peers)
        failed.pop_all()
    processes = [peers.processes.get(r) for r in nodes.local]
    nccl = all(member["nccl"] for member in everyone)
    return RendezvousResult(
        nodes, window, pids, processes, len(cores), link, port, store, listener, nccl, everyone
    )


def _connect_nodes(
    store: Store, rank: int, nodes: Nodes, deadline: Deadline, peers: Peers, listens: bool
) -> tuple[GlooTransport | None, _C.Port, Listener | None]:
    """This rank's link to other nodes, if it carries a stripe, its port, and a listener if asked.

    Messages go through the port. The listener is for what survivors of a failure tell each other.
    """
    from pycomm._runtime.internode import GlooTransport, connect
    from pycomm._runtime.sockets import Listener, node_address

    listener, size = None, sum(map(len, nodes.ranks))
    with deadline.guarding("every node connecting"):
        carriers = connect(nodes, rank, store, deadline, peers.look)
        known = None if carriers is None else carriers.host
        host = node_address(store, rank, nodes.local, known, deadline, peers.look)
        port = _open_port(store, rank, size, host, deadline, peers)
        if listens:
            listener = Listener.open(store, rank, size, host, deadline, peers.look)
    return None if carriers is None else GlooTransport(carriers), port, listener


def check_same(settings: Sequence[Mapping[str, object]]) -> None:
    """Raises ValueError if ranks differ; it names the first one that differs from rank 0."""
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
    nodes: Nodes,
    staging_bytes: int,
    deadline: Deadline,
    peers: Peers,
) -> _C.Window:
    """Makes or takes the window of this node's ranks."""
    first, count = nodes.local[0], len(nodes.local)
    if rank == first:
        return _offer(store, rank, count, staging_bytes, deadline, peers)
    with deadline.guarding(f"rank {first} offering the window"):
        address, secret = json.loads(_get(store, f"window/{first}", deadline, peers))
    fd = _take(address, secret.encode(), deadline, peers)
    return _map_window(fd, count, staging_bytes)


def _open_port(
    store: Store, rank: int, size: int, host: str, deadline: Deadline, peers: Peers
) -> _C.Port:
    """Opens the port for messages from other nodes, and exchanges addresses with all ranks."""
    port = _C.Port(host)
    _, number, secret, knock = port.address
    keys = [f"port/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps([host, number, secret.hex(), knock]))
    deadline.await_keys(store, keys, peers.look)
    addresses = [json.loads(text) for text in store.multi_get(keys)]
    port.meet(
        [(host, number, bytes.fromhex(text), knock) for host, number, text, knock in addresses]
    )
    return port


def _await_all(store: Store, size: int, deadline: Deadline, peers: Peers) -> None:
    """Waits for all ranks; a rank that continued earlier could blame the wrong rank for a death."""
    if store.add("ready", 1) == size:
        store.set("complete", "")
    deadline.await_keys(store, ["complete"], peers.look)


def _offer(
    store: Store, rank: int, count: int, staging_bytes: int, deadline: Deadline, peers: Peers
) -> _C.Window:
    """Makes the window and hands it out."""
    address, secret = f"pycomm-{secrets.token_hex(16)}", secrets.token_hex(16)
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0{address}")
        listener.listen(count)
        with deadline.guarding("reaching the Store"):
            store.set(f"window/{rank}", json.dumps([address, secret]))
        with contextlib.ExitStack() as on_failure:
            fd = _create_window(count, staging_bytes)
            on_failure.callback(os.close, fd)
            _hand_out(listener, fd, secret.encode(), count - 1, deadline, peers)
            on_failure.pop_all()
    return _map_window(fd, count, staging_bytes)
