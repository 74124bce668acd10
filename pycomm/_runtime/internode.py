"""Groups that span nodes: the transport over torch.distributed.

C++ decides what each node does and sends (csrc/cpu/internode/group.h); this module transports it.
The ranks that carry a stripe, one of each node, have a torch.distributed process group of their
own, without other traffic. Sends and receives are posted in the order of the group's operations,
and a thread waits for them in that order.

Gloo matches sends with receives by their tags, and ends a process that receives more than fits into
its buffer. So every message's tag contains its length: a message that is too long matches no
receive. C++ parses the messages (csrc/core/message.h). A secret from the group's Store proves that
their senders are members.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pycomm import _C
from pycomm._runtime import host
from pycomm._runtime.lifetime import open_groups
from pycomm._runtime.sockets import local_address, open_sockets
from pycomm._runtime.threads import Deadline, start_thread, with_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycomm._runtime.lifetime import Nodes

# Detects by its silence that a node is gone while a group is made.
#
# A pidfd reports only processes of the same node, and all ranks of a node may die at once.

_INTERVAL = 0.25  # seconds between beats
# A beat comes from a thread of its own, so only a suspended process, node or network delays it.
# Swapping, a lost packet or the migration of a node seldom takes seconds.
SILENCE = 10.0


class Heartbeat(threading.Thread):
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


# How ranks connect over Gloo when they need to, and how its operations are ended.

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


# Groups that span nodes: the transport over torch.distributed.

Transfer = tuple[int, int, int]  # node, address, bytes

_DATA, _FAREWELL = 1 << 29, 1 << 30  # tags, to which a message's length is added
_SECRET_BYTES = 16
_ALWAYS = timedelta(days=365)  # as long as the group lives
_PATIENCE_AT_END = timedelta(milliseconds=200)


@dataclass(frozen=True)
class CarrierLinks:
    """The connections of a rank to the ranks that carry the same stripe on other nodes.

    Attributes:
        process_group: these ranks, in the order of nodes.
        nodes: the other nodes.
        secret: the secret in all messages of the stripe.
        host: this node's address, as other nodes know it.
    """

    process_group: Any
    nodes: list[int]
    secret: bytes
    host: str | None


def connect(
    nodes: Nodes, rank: int, store: Store, deadline: Deadline, look: Callable[[], object]
) -> CarrierLinks | None:
    """Connects this rank to the ranks that carry the same stripe on other nodes.

    All carriers of the stripe call this together. Their process group is independent of
    torch.distributed's other groups in these processes.

    Args:
        nodes: the ranks of each node.
        rank: the rank of this process.
        store: a Store that only this group uses.
        deadline: the deadline for connecting.
        look: raises the failure that ends the rendezvous, if there is one.

    Returns:
        None if this rank carries no stripe.
    """
    stripe = nodes.local.index(rank)
    if stripe >= nodes.stripes:
        return None
    count = len(nodes.ranks)
    ended, over = threading.Event(), threading.Event()

    def look_for_end() -> None:
        if over.is_set():
            raise RuntimeError("the rendezvous is over")
        look()

    carriers = InterruptibleStore(PrefixStore(f"link/{stripe}", store), deadline, look_for_end)
    if nodes.here == 0:
        carriers.set("secret", secrets.token_hex(_SECRET_BYTES))
    secret = bytes.fromhex(carriers.get("secret").decode())
    made: list[Any] = []
    hosts: list[str | None] = []

    def construct() -> None:
        left = timedelta(seconds=deadline.left())
        try:
            before = _inheritable_sockets()
            gloo = dist.ProcessGroupGloo(carriers, nodes.here, count, left)
            new = _inheritable_sockets() - before
            for fd in new:
                os.set_inheritable(fd, False)  # so that exec closes the connections,
            _C.close_in_children(list(new))  # and a fork does
            hosts.append(local_address(new))
            made.append(gloo)
        except Exception as error:
            made.append(error)
        ended.set()

    # A thread, because construct() waits for connections and cannot be interrupted.
    thread = threading.Thread(target=construct, name="pycomm-connect", daemon=True)
    try:
        start_thread(thread)
        deadline.await_event(ended, look)
    except BaseException:  # the interpreter may exit now, see _end_links
        over.set()
        ended.wait(_PATIENCE_AT_END.total_seconds())
        raise
    if isinstance(made[0], Exception):
        if carriers.has_address:  # a death may have caused this, and is detected later
            deadline.look_for(SILENCE + 1, look)
        raise with_limits(made[0])
    others = [node for node in range(count) if node != nodes.here]
    return CarrierLinks(made[0], others, secret, hosts[0])


class InterruptibleStore(Store):
    """A Store for Gloo with waits that end when the rendezvous does."""

    def __init__(self, store: Store, deadline: Deadline, look: Callable[[], object]) -> None:
        super().__init__()
        self._store, self._deadline, self._look = store, deadline, look
        self.has_address = False  # True once this rank has published its address

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self.has_address = key != "secret"

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], _timeout: object = None) -> None:
        self._deadline.await_keys(self._store, keys, self._look)


def _inheritable_sockets() -> set[int]:
    """Sockets that would survive exec. Python opens none, so new ones are Gloo's."""
    found = set()
    for fd in open_sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.get_inheritable(fd):
                found.add(fd)
    return found


class GlooTransport(_C.Transport):
    """Transports one stripe over a process group. It has no timeouts; the group has them.

    Args:
        links: the connections.
    """

    def __init__(self, links: CarrierLinks) -> None:
        super().__init__(links.secret)
        self._group = links.process_group
        self._nodes, self._interfaces = links.nodes, interfaces()
        self._batches: queue.SimpleQueue[list[tuple[int, Any]] | None] = queue.SimpleQueue()
        self._ending = threading.RLock()  # a signal's handler may abort the group in the middle
        self._told = False
        self._unfinished: list[tuple[int, Any]] = []  # the batch that has failed
        self._farewells: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._farewells_sent = threading.Event()
        jobs = [("pycomm-link", self._wait), ("pycomm-link-farewell", self._await_farewells)]
        jobs += [("pycomm-link-control", partial(self._listen, node)) for node in links.nodes]
        self._threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs]
        for thread in self._threads:
            start_thread(thread)
        _links.add(self)

    def post(self, sends: list[Transfer], receives: list[Transfer]) -> None:
        """Starts a batch of transfers."""
        works: list[tuple[int, Any]] = []
        for operation, transfers in ((self._group.recv, receives), (self._group.send, sends)):
            for node, address, nbytes in transfers:
                tag = _DATA + nbytes
                works.append((node, self._start(operation, node, _memory(address, nbytes), tag)))
        self._batches.put(works)

    def stop(self, farewell: bytes) -> None:
        """Tells the other nodes why this one stops."""
        with self._ending:
            self._tell(farewell)

    def disconnect(self) -> None:
        """Ends all transfers: when this returns, posted memory is not touched any more."""
        with self._ending:
            disconnect(self._group, self._nodes, self._interfaces)
            self._batches.put(None)
            self._farewells.put([])

    def leave(self, farewell: bytes) -> None:
        """Tells the other nodes that no batch will follow."""
        with self._ending:
            self._tell(farewell)
            self._batches.put(None)

    def end(self) -> None:
        """Disconnects, and waits for a short time until its threads have ended."""
        self.disconnect()
        for thread in self._threads:
            thread.join(_PATIENCE_AT_END.total_seconds())

    def _tell(self, farewell: bytes) -> None:
        """Sends a farewell to all nodes; only the first call has an effect."""
        if self._told:
            return
        message, tag = host.tensor(list(farewell), dtype=torch.uint8), _FAREWELL + len(farewell)
        works = [self._start(self._group.send, node, message, tag) for node in self._nodes]
        self._told = True
        self._farewells.put(works)
        self._farewells_sent.wait(_PATIENCE_AT_END.total_seconds())

    def _await_farewells(self) -> None:
        """In a thread, because Gloo closes connections if a send is given up."""
        for work in self._farewells.get():
            finish(work, _ALWAYS)
        self._farewells_sent.set()

    def _start(self, operation: Any, node: int, memory: torch.Tensor, tag: int) -> Any:
        """Starts a send or receive; returns None if the connection is lost."""
        work = start(operation, node, memory, tag)
        if work is None:
            self.lose(node)
        return work

    def _wait(self) -> None:
        """Completes batches in their order, up to the first one that fails."""
        while (works := self._batches.get()) is not None:
            for node, work in works:
                self.await_node(node)
                if not finish(work, _ALWAYS):
                    self._unfinished = works  # else Gloo would jam connections with live nodes
                    self.fail(node)
                    return
            self.complete()

    def _listen(self, node: int) -> None:
        """Waits for a node's farewell."""
        farewell = host.zeros(_C.farewell_bytes, dtype=torch.uint8)
        work = self._start(self._group.recv, node, farewell, _FAREWELL + _C.farewell_bytes)
        if finish(work, _ALWAYS):
            self.heard(node, bytes(farewell.tolist()))
        self.lose(node)
        self.finished(node)


_links: weakref.WeakSet[GlooTransport] = weakref.WeakSet()
os.register_at_fork(after_in_child=_links.clear)  # they belong to the parent


def _end_links() -> None:
    """Ends all links; a thread that waits in torch at the interpreter's end aborts the process."""
    for link in list(_links):
        link.end()


open_groups.after_end(_end_links)


def _memory(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
