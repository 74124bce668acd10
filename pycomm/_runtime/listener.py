"""A socket of each rank, over which the ranks of other nodes reach it after a failure.

Gloo's connections end with a failure, and torch.distributed's Store may have died with its host. So
every rank of a group that spans nodes listens on a port. The kernel tells others about the rank as
long as its host runs: it accepts their connections while the process lives, even if it is closed;
it refuses or ends them once the process has ended or the group was closed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import stat
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.waiting import Deadline

LEFT_OUT = "group has shrunk without this rank"
_REACHED_WITHIN = 3.0  # seconds; later the host counts as unreachable
_LONGEST_MESSAGE = 1 << 16
_ENDED = {errno.ECONNREFUSED, errno.ECONNRESET}
_BACKLOG = 4096  # connections that wait for accept(); a full queue would look like a lost host
_MOST_ACCEPTED = 256  # at once
# So that the kernel notices within seconds if the other host is lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 6000}


class Listener:
    """The socket of this rank, and the addresses of all.

    Args:
        listening: the socket.
        token: what others must know to be heard.
        addresses: host, port and token of each rank.
    """

    def __init__(
        self, listening: socket.socket, token: str, addresses: Sequence[tuple[str, int, str]]
    ) -> None:
        self.token, self.addresses = token, addresses
        self.socket = listening
        self.store: Store | None = None  # one that this rank serves
        self.strangers: list[Connection] = []  # have not said who they are
        self.waiting: dict[int, Connection] = {}  # ranks that have come, and wait for an answer
        self.decisions = 0  # how many of Group.should_commit() this rank knows,
        self.outcome = False  # and the last one
        self.members: Sequence[int] = range(len(addresses))  # of the group that is left
        self.closed = False
        _listeners.add(self)

    @classmethod
    def open(
        cls,
        store: Store,
        rank: int,
        nodes: Sequence[Sequence[int]],
        host: str | None,
        deadline: Deadline,
        look: Callable[[], object],
    ) -> Listener:
        """Opens the socket, and tells all ranks; a collective call.

        Args:
            store: a Store that only this group uses.
            rank: this rank.
            nodes: the ranks of each node.
            host: this node's address for other nodes; None if this rank does not know it.
            deadline: the deadline for all ranks.
            look: raises the failure that ends the rendezvous, if there is one.
        """
        here = next(local for local in nodes if rank in local)
        if rank == here[0]:
            store.set(f"host/{rank}", host or socket.gethostbyname(socket.gethostname()))
        deadline.await_keys(store, [f"host/{here[0]}"], look)
        host = store.get(f"host/{here[0]}").decode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        size = sum(map(len, nodes))
        listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        listening.setblocking(False)
        token = secrets.token_hex(16)
        keys = [f"listener/{r}" for r in range(size)]
        store.set(keys[rank], json.dumps([host, listening.getsockname()[1], token]))
        deadline.await_keys(store, keys, look)
        addresses = [json.loads(text) for text in store.multi_get(keys)]
        return cls(listening, token, addresses)

    def accept(self) -> None:
        """Takes in those who have connected, and forgets strangers that have gone."""
        with contextlib.suppress(OSError):  # nobody is there, or another thread closes the socket
            for _ in range(_MOST_ACCEPTED):
                self.strangers.append(Connection(self.socket.accept()[0]))
        known = []
        for stranger in self.strangers:
            stranger.hear()
            if stranger.ended and stranger.said is None:
                stranger.close()
            else:
                known.append(stranger)
        self.strangers = known

    def connect(self, rank: int) -> Connection:
        """A connection to another rank, perhaps not established yet."""
        host, port, _ = self.addresses[rank]
        other = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        other.setblocking(False)
        error = other.connect_ex((host, port))
        return Connection(other, 0 if error == errno.EINPROGRESS else error)

    def rank_of(self, connection: Connection) -> int | None:
        """The rank that has introduced itself; None if it is not one."""
        rank, ranks = self._heard(connection).get("rank"), range(len(self.addresses))
        return rank if type(rank) is int and rank in ranks else None

    @property
    def left_out(self) -> bool:
        """True if another rank has said that the group has shrunk without this one."""
        return any("unusable" in self._heard(stranger) for stranger in self.strangers)

    def _heard(self, connection: Connection) -> dict[str, Any]:
        """What a rank of the group has said; empty if it is none, or has said nothing yet."""
        said = connection.said
        return said if isinstance(said, dict) and said.get("token") == self.token else {}

    def close(self) -> None:
        """Says that this rank is gone. Ranks that were left out before learn that instead."""
        self._turn_away_others()
        self.close_sockets()
        self.waiting, self.strangers, self.store = {}, [], None

    def close_sockets(self) -> None:
        """Leaves the store alone, whose thread a forked child lacks."""
        self.closed = True
        self.socket.close()
        for connection in (*self.waiting.values(), *self.strangers):
            connection.close()

    def __del__(self) -> None:  # of a group that was dropped
        if not self.closed:
            self._turn_away_others()
            self.close_sockets()

    def _turn_away_others(self) -> None:
        self.accept()
        for stranger in self.strangers:
            rank = self.rank_of(stranger)
            if rank is not None and rank not in self.members:
                stranger.turn_away()


class Connection:
    """A connection that carries one line of JSON each way. It never blocks.

    Attributes:
        said: the other side's message, once it is whole.
        ended: True if the other side is gone.
        unreachable: True if its host does not answer.
    """

    def __init__(self, connected: socket.socket, error: int = 0) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket, self._begin = connected, time.monotonic()
        self._text = b""
        self._established = False
        self.said: Any = None
        self.ended = self.unreachable = False
        self._note(error)
        _connections.add(self)

    def fileno(self) -> int:
        """For select.poll."""
        return self._socket.fileno()

    @property
    def established(self) -> bool:
        """True once the other side's host has accepted it."""
        if not (self._established or self.ended or self.unreachable):
            ready = select.poll()
            ready.register(self, select.POLLOUT)
            if ready.poll(0):
                self._note(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                self._established = not (self.ended or self.unreachable)
            elif time.monotonic() - self._begin > _REACHED_WITHIN:
                self.unreachable = True
        return self._established

    def say(self, message: object) -> bool:
        """Sends the message; False if the other side is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self._note(error.errno or errno.ECONNRESET)
            return False
        return True

    def hear(self) -> None:
        """Reads what has arrived; malformed bytes end the connection."""
        while not self.ended:
            try:
                part = self._socket.recv(_LONGEST_MESSAGE)
            except BlockingIOError:
                return
            except OSError as error:
                self._note(error.errno or errno.ECONNRESET)
                return
            self._text += part
            self.ended = not part or len(self._text) > _LONGEST_MESSAGE
            if self.said is None and self._text.endswith(b"\n"):
                try:
                    self.said = json.loads(self._text)
                except ValueError:
                    self.ended = True

    def turn_away(self, token: str = "") -> None:
        """Tells a rank that it is no member any more; with its token, if it has not asked."""
        self.say({"unusable": LEFT_OUT, "token": token})
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._socket.close()

    def _note(self, error: int) -> None:
        broken = error == errno.EPIPE and self._established  # the other side has closed it
        self.ended = self.ended or error in _ENDED or broken
        self.unreachable = error != 0 and not self.ended


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forget() -> None:
    """Closes a forked child's copies, with which it would seem to be the rank."""
    for listener in list(_listeners):
        listener.close_sockets()
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_forget)


def local_address(descriptors: set[int]) -> str | None:
    """The address of this node, as sockets that are connected to other nodes know it."""
    for descriptor in sorted(descriptors):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
            connected.getpeername()
            if connected.family in (socket.AF_INET, socket.AF_INET6):
                return _plain(connected.getsockname()[0])
    return None


def limit_receives(address: tuple[str, int], seconds: float) -> None:
    """Lets receives from an address fail after a time.

    Some calls of torch's Store would wait for ever for an answer of a server that was stopped.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) + 1)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            descriptor = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as other:
                peer = other.getpeername()  # of an Internet socket a tuple, of others a string
                if other.family != socket.AF_UNIX and (_plain(peer[0]), peer[1]) == address:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _plain(host: str) -> str:
    """An address of IPv4 as such, although an IPv6 socket is connected to it."""
    return host.removeprefix("::ffff:")
