"""Sockets on which ranks listen, so that other nodes can reach them after a failure.

Gloo's connections end with a failure, and torch.distributed's Store may have died with its host. So
every rank of a group that spans nodes listens on a port. The kernel tells others about the rank as
long as its host runs: it accepts connections while the process lives, even if it is suspended; it
refuses or ends connections once the process has ended or the group was closed.
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
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pycomm._runtime.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.threads import Deadline

LEFT_OUT = "group has shrunk without this rank"
_REACHED_WITHIN = 3.0  # seconds; later the host counts as unreachable
_LONGEST_MESSAGE = 1 << 16
_ENDED = {errno.ECONNREFUSED, errno.ECONNRESET}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BACKLOG = 4096  # connections that wait for accept(); a full queue would look like a lost host
_TRY_AGAIN_AFTER = 100  # milliseconds, if there are no descriptors for new connections
_MOST_ACCEPTED = 256  # at once
_MOST_STRANGERS = 256  # besides ranks; each takes a descriptor
_MOST_TRIED = 1 << 16  # descriptors, if the system does not list open ones
_LOOPBACK = ("127.0.0.1", "::1")
_CROWDED = "there are too many connections, connect again"
# With these options the kernel notices within seconds if the other host is lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 6000}


class Alarm(NamedTuple):
    """The message of a rank that gives up the group.

    Attributes:
        rank: the rank.
        word: the reason, as an abort word.
        group: the group's name at the listeners.
    """

    rank: int
    word: int
    group: str

    @classmethod
    def parse(cls, said: object) -> Alarm | None:
        """The alarm in a message; None if it has none."""
        if not isinstance(said, list) or list(map(type, said)) != [int, int, str]:
            return None
        return cls(*said) if 0 < said[1] < 1 << 64 else None


class Acceptor:
    """A socket that others connect to.

    Args:
        host: the address of this node.
        port: the port; by default any free port.

    Attributes:
        lacks_descriptors: True if the last :meth:`accept` has left a connection for lack of
            descriptors. A wait for arrivals would then return at once.
    """

    closed = True
    lacks_descriptors = False

    def __init__(self, host: str, port: int = 0) -> None:
        self.socket = socket.create_server((host, port), family=_family_of(host), backlog=_BACKLOG)
        self.socket.setblocking(False)
        self.strangers: list[Connection] = []  # connections without an introduction
        self.closed = False
        _acceptors.add(self)

    @property
    def port(self) -> int:
        """The port's number."""
        return int(self.socket.getsockname()[1])

    def accept(self) -> None:
        """Accepts connections, and forgets strangers that have gone."""
        self.lacks_descriptors = False
        try:
            for _ in range(_MOST_ACCEPTED):
                self.strangers.append(Connection(self.socket.accept()[0]))
        except OSError as error:  # usually no connection waits, or another thread closes the socket
            self.lacks_descriptors = error.errno in _NO_DESCRIPTORS
        known = []
        for stranger in self.strangers:
            stranger.hear()
            if stranger.ended and stranger.said is None:
                stranger.close()
            else:
                known.append(stranger)
        self.strangers = known

    def close_sockets(self) -> None:
        """Closes the socket and all connections, without a message."""
        self.closed = True
        self.socket.close()
        for connection in self.strangers:
            connection.close()


class Listener(Acceptor):
    """The socket of this rank, and the addresses of all ranks.

    Args:
        host: the address of this node.
    """

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.token = secrets.token_hex(16)  # a secret that others must send
        self.addresses: Sequence[tuple[str, int, str]] = []  # host, port and token of each rank
        self.members: Sequence[int] = []  # of the present group
        self.group = ""  # its name, which only members know; each smaller group has a new one
        self.alarm: Alarm | None = None  # another rank's, which gives up the group
        self._lookout: Lookout | None = None
        self.store: Store | None = None  # served by this rank
        self.waiting: dict[int, Connection] = {}  # ranks that have come, and wait for an answer
        self.decisions = 0  # the number of decisions of Group.should_commit() that this rank knows
        self.outcome = False  # the last decision

    @classmethod
    def open(
        cls,
        store: Store,
        rank: int,
        size: int,
        host: str,
        deadline: Deadline,
        look: Callable[[], object],
    ) -> Listener:
        """Opens the socket, and tells all ranks; a collective call.

        Args:
            store: a Store that only this group uses.
            rank: this rank.
            size: the number of ranks.
            host: this node's address for other nodes.
            deadline: the deadline for all ranks.
            look: raises the failure that ends the rendezvous, if there is one.
        """
        listener = cls(host)
        keys = [f"listener/{r}" for r in range(size)]
        store.set(keys[rank], json.dumps([host, listener.port, listener.token]))
        deadline.await_keys(store, keys, look)
        listener.addresses = [json.loads(text) for text in store.multi_get(keys)]
        listener.members = range(len(keys))
        return listener

    def accept(self) -> None:
        """See :class:`Acceptor`. Drops the oldest strangers if there are too many.

        A rank may connect silently to see which ranks live. So dropped connections get the reason,
        and ranks connect anew. Each rank has at most two connections.
        """
        super().accept()
        unknown = [stranger for stranger in self.strangers if not self._heard(stranger)]
        most = _MOST_STRANGERS + 2 * len(self.addresses)
        dropped = unknown[: max(len(unknown) - most, 0)]
        for stranger in dropped:
            stranger.say(_CROWDED)
            stranger.close()
        for stranger in self.strangers:
            heard = self._heard(stranger)
            alarm = Alarm.parse(heard.get("failed"))
            if alarm is not None and alarm.group == self.group:
                self.alarm = alarm
            if "failed" in heard and "rank" not in heard and stranger.ended:
                stranger.close()
                dropped.append(stranger)  # it has nothing else to say
        # Read again: another thread, or a signal handler, may close the listener meanwhile.
        self.strangers = [stranger for stranger in self.strangers if stranger not in dropped]

    def enter(self, members: Sequence[int], group: str) -> None:
        """Records the smaller group: its members, and its name."""
        self.members, self.group, self.alarm = members, group, None

    def watch(self, tell: Callable[[Alarm], object]) -> None:
        """Listens in a thread, until :meth:`take_over`, for ranks that give up the group."""
        self._lookout = Lookout(self, tell)

    def take_over(self) -> None:
        """Ends the thread; the caller then uses the listener."""
        lookout, self._lookout = self._lookout, None
        if lookout is not None:
            lookout.end()

    def connect(self, rank: int) -> Connection:
        """A connection to another rank, perhaps not established yet."""
        host, port, _ = self.addresses[rank]
        return Connection.to(host, port)

    def rank_of(self, connection: Connection) -> int | None:
        """The rank that has introduced itself on a connection; None if there is none."""
        rank, ranks = self._heard(connection).get("rank"), range(len(self.addresses))
        return rank if type(rank) is int and rank in ranks else None

    @property
    def left_out(self) -> bool:
        """True if another rank has said that the group has shrunk without this one."""
        return any("unusable" in self._heard(stranger) for stranger in self.strangers)

    def _heard(self, connection: Connection) -> dict[str, Any]:
        """The message of a rank of the group; empty if there is none, or not from a rank."""
        said = connection.said
        return said if isinstance(said, dict) and said.get("token") == self.token else {}

    def close(self) -> None:
        """Shows the others that this rank is gone. Ranks that were left out are told so instead."""
        self.take_over()
        self._turn_away_others()
        self.close_sockets()
        self.waiting, self.strangers, self.store = {}, [], None

    def close_sockets(self) -> None:
        """Closes all sockets, but neither store nor lookout: a forked child lacks their threads."""
        super().close_sockets()
        self._lookout = None
        for connection in self.waiting.values():
            connection.close()

    def __del__(self) -> None:  # of a group that was dropped
        if not self.closed:
            self.take_over()
            self._turn_away_others()
            self.close_sockets()

    def _turn_away_others(self) -> None:
        self.accept()
        for stranger in self.strangers:
            rank = self.rank_of(stranger)
            if rank is not None and rank not in self.members:
                stranger.turn_away()


class Lookout:
    """A thread that waits for alarms of ranks of other nodes, which give up the group.

    Ranks that carry the same stripe send farewells to other nodes (pycomm/_runtime/internode.py).
    If such a rank has died, its node may be unable to send a farewell, and its connections do not
    end as long as another process has copies. But a rank that shrinks the group connects to the
    others' listeners (pycomm/_runtime/shrink.py).

    Only this thread uses the listener until it is ended.

    Args:
        listener: the listener of this rank.
        tell: called, at most once, with the first alarm of the present group.
    """

    def __init__(self, listener: Listener, tell: Callable[[Alarm], object]) -> None:
        self._listener, self._tell = weakref.ref(listener), tell
        self._over = False
        self._patience: int | None = None  # milliseconds; None waits for arrivals only
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="pycomm-lookout", daemon=True)
        start_thread(self._thread)

    def end(self) -> None:
        """Ends the thread."""
        self._over = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake.send(b"\0")
        if threading.current_thread() is not self._thread:  # garbage collection may run there
            self._thread.join()

    def _run(self) -> None:
        with self._wake, self._woken:
            while (arrivals := self._look()) is not None:
                arrivals.poll(self._patience)

    def _look(self) -> select.poll | None:
        """Reads new messages; returns what to wait for next, or None to end the thread."""
        listener = self._listener()
        if self._over or listener is None or listener.closed:
            return None
        listener.accept()
        self._patience = _TRY_AGAIN_AFTER if listener.lacks_descriptors else None
        if listener.alarm is not None:
            self._tell(listener.alarm)
            return None
        arrivals = select.poll()
        numbers = [each.fileno() for each in listener.strangers if not each.ended]
        if not listener.lacks_descriptors:
            numbers.append(listener.socket.fileno())
        for number in (self._woken.fileno(), *numbers):
            if number >= 0:  # else another thread has closed the socket
                arrivals.register(number, select.POLLIN)
        return arrivals


class Connection:
    """A connection that carries one line of JSON each way. It never blocks.

    If the other side drops it because there are too many connections, it connects anew.

    Attributes:
        said: the other side's message, once it is whole.
        spoken: True if this side has sent its message.
        ended: True if the other side is gone.
        unreachable: True if its host does not answer.
    """

    def __init__(self, connected: socket.socket, error: int = 0) -> None:
        self._address: tuple[str, int] | None = None  # of the other side, if this side connects
        self._use(connected, error)
        _connections.add(self)

    @classmethod
    def to(cls, host: str, port: int) -> Connection:
        """A connection to an address, perhaps not established yet."""
        made = cls(*_begin_to_connect(host, port))
        made._address = host, port
        return made

    def _use(self, connected: socket.socket, error: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket, self._begin = connected, time.monotonic()
        self._text = b""
        self._established = False
        self.said: Any = None
        self.spoken = self.ended = self.unreachable = False
        self._note(error)

    @property
    def age(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

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
                error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self._note(error or self._is_own() * errno.ECONNREFUSED)
                self._established = not (self.ended or self.unreachable)
            elif self.age > _REACHED_WITHIN:
                self.unreachable = True
        return self._established

    def say(self, message: object) -> bool:
        """Sends the message; False if the other side is gone, or this side connects anew."""
        connected = self._socket
        try:
            connected.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.hear()  # the other side may have dropped it
            if self._socket is connected:
                self._note(error.errno or errno.ECONNRESET)
            return False
        self.spoken = True
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
                except (ValueError, RecursionError):  # RecursionError for "[[[[..."
                    self.ended = True
                if self.said == _CROWDED and self._address is not None:
                    self._socket.close()
                    self._use(*_begin_to_connect(*self._address))
                    return

    def hears_end(self) -> bool:
        """Reads what has arrived; True if the other side is gone."""
        self.hear()
        return self.ended

    def wait(self, seconds: float) -> None:
        """Waits until something has arrived, or the connection is established or has ended."""
        news = select.poll()
        news.register(self, select.POLLIN if self.established else select.POLLOUT)
        news.poll(1e3 * seconds)

    def turn_away(self, token: str = "") -> None:
        """Tells a rank that it is no longer a member; with its token if it has not asked."""
        self.say({"unusable": LEFT_OUT, "token": token})
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _is_own(self) -> bool:
        """True if the socket has connected to itself, as can happen if no process listens."""
        with contextlib.suppress(OSError):  # the connection has ended
            return bool(self._socket.getsockname() == self._socket.getpeername())
        return False

    def _note(self, error: int) -> None:
        broken = error == errno.EPIPE and self._established  # the other side has closed it
        self.ended = self.ended or error in _ENDED or broken
        self.unreachable = error != 0 and not self.ended


def _begin_to_connect(host: str, port: int) -> tuple[socket.socket, int]:
    """A socket that connects to an address, and the error if that has failed at once."""
    other = socket.socket(_family_of(host))
    other.setblocking(False)
    error = other.connect_ex((host, port))
    return other, 0 if error == errno.EINPROGRESS else error


_acceptors: weakref.WeakSet[Acceptor] = weakref.WeakSet()
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forget() -> None:
    """Closes a forked child's copies, with which others would take it for the rank."""
    for acceptor in list(_acceptors):
        acceptor.close_sockets()
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_forget)


def node_address(
    store: Store,
    rank: int,
    local: Sequence[int],
    known: str | None,
    deadline: Deadline,
    look: Callable[[], object],
) -> str:
    """This node's address for other nodes, the same for all of its ranks, who call this together.

    Args:
        store: a Store that only this group uses.
        rank: this rank.
        local: the ranks of this node.
        known: the address; None if this rank does not know it.
        deadline: the deadline for all ranks.
        look: raises the failure that ends the rendezvous, if there is one.
    """
    key = f"host/{local[0]}"
    if rank == local[0]:
        store.set(key, known or own_address())
    deadline.await_keys(store, [key], look)
    return str(store.get(key).decode())


def own_address() -> str:
    """The address of this node's name; without one, the loopback address, as in Gloo.

    IPv4 comes first: all nodes have it, except nodes with IPv6 only.
    """
    named: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):
        named = hosts_of(socket.gethostname())
    return first_of_node(sorted(named, key=_family_of))


def first_of_node(hosts: Iterable[str] = ()) -> str:
    """The first address that belongs to this node, or else the loopback address."""
    for host in [*hosts, *_LOOPBACK]:
        with contextlib.suppress(OSError), socket.socket(_family_of(host)) as probe:
            probe.bind((host, 0))
            return host
    return _LOOPBACK[0]


def hosts_of(name: str) -> list[str]:
    """The addresses of a host's name; an address has only itself."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _family_of(host: str) -> socket.AddressFamily:
    """The family of an address, not of a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def local_address(descriptors: set[int]) -> str | None:
    """This node's address, from the sockets that are connected to other nodes."""
    for descriptor in sorted(descriptors):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
            connected.getpeername()
            if connected.family in (socket.AF_INET, socket.AF_INET6):
                return plain_address(connected.getsockname()[0])
    return None


def open_sockets() -> list[int]:
    """The descriptors of this process's sockets."""
    try:
        descriptors: Iterable[int] = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:  # /proc is not mounted
        descriptors = range(min(os.sysconf("SC_OPEN_MAX"), _MOST_TRIED))
    found = []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # not open, or closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
    return found


def plain_address(host: str) -> str:
    """The plain IPv4 address in an address of an IPv6 socket; other addresses as they are."""
    return host.removeprefix("::ffff:")
