"""How a group grows by processes that wait at the port of its first rank.

1. *Announce.* The first rank looks for waiting processes, and broadcasts the length of its news in
   the group: usually 0. If processes wait, it serves a Store with the introductions of all ranks,
   members first. It sends the Store's address to the members in another broadcast, and to the
   newcomers over their connections.
2. *Set up.* All ranks set up memory and connections over that Store, as in ``pycomm.init()``. The
   first rank watches the connections of all ranks on other nodes; each rank watches its own node.
3. *Decide.* The members decide in their group whether all of them have the larger group. If not,
   they leave the larger group, and continue with theirs.
4. *Enter.* All ranks of the larger group run a barrier in it. After it, a newcomer knows that all
   members have decided to grow, and a member knows that all others know the decision before it
   leaves the old group. If the barrier fails, the members run one more decision for the same
   purpose, whatever its outcome is.

A newcomer that fails before the decision is left out. If it fails later, the larger group has
failed, and can shrink.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import re
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from pycomm._inputs import operation_of
from pycomm._runtime import host
from pycomm._runtime.lifetime import Member
from pycomm._runtime.rendezvous import build, introduction, set_up
from pycomm._runtime.sockets import Acceptor, Connection, hosts_of, own_address
from pycomm._runtime.stores import reach, serve
from pycomm._runtime.threads import Deadline
from pycomm.errors import CollectiveError, PycommError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.distributed_c10d import Store

    from pycomm import _C
    from pycomm._runtime.rendezvous import RendezvousResult

_log = logging.getLogger("pycomm.group")

# The join server of a group: a port of its first rank, on which processes ask to join.

_GREETS_WITHIN = 5.0  # seconds
_MOST_SILENT = 64  # connections without an introduction; each takes a descriptor
_TRIES_EVERY = 0.05  # seconds
_WRITTEN = re.compile(r"\[?([^][/\s\0]+)\]?:(\d+)/([0-9a-f]{32})")


class Address(NamedTuple):
    """The place of a join server. Its text is ``host:port/secret``."""

    host: str
    port: int
    secret: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in a text; ValueError if the text is not an address."""
        found = _WRITTEN.fullmatch(text.strip())
        if found is None or int(found[2]) > 65535:
            raise ValueError(f"address must be a group's, host:port/secret, got {text!r}")
        name, port, secret = found.groups()
        return cls(name, int(port), secret)


def read_addresses(path: Path) -> list[Address]:
    """The addresses in a file; none if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return [Address.parse(line) for line in path.read_text().splitlines()]
    return []


class JoinServer(Acceptor):
    """Lets processes ask to join. Nothing here ever blocks.

    Args:
        host: the address of this node.
        before: the address of the previous join server, whose rank may have died. On the same node,
            the new server takes the same port if it is free, so that the address stays.

    Attributes:
        address: the server's address.
    """

    def __init__(self, host: str, before: Address | None) -> None:
        try:
            super().__init__(host, before.port if before and before.host == host else 0)
        except OSError:  # another process has the port
            super().__init__(host)
        secret = secrets.token_hex(16) if before is None else before.secret
        self.address = Address(host, self.port, secret)
        self._callers: list[Connection] = []

    def callers(self, objection: Callable[[Any], str]) -> list[Connection]:
        """Connections of processes that wait to be admitted.

        Args:
            objection: returns why a process with this message cannot be admitted, or "".
        """
        self.accept()
        strangers, self.strangers = self.strangers, []
        for stranger in strangers:
            if stranger.said is not None:
                why = self._doubt(stranger.said) or objection(stranger.said)
                if why:
                    stranger.say({"refused": why})
                    stranger.close()
                else:
                    self._callers.append(stranger)
            elif stranger.age < _GREETS_WITHIN:
                self.strangers.append(stranger)
            else:
                stranger.close()
        while len(self.strangers) > _MOST_SILENT:  # newcomers greet at once: drop the oldest
            self.strangers.pop(0).close()
        gone = [caller for caller in self._callers if caller.hears_end()]
        for caller in gone:
            caller.close()
        self._callers = [caller for caller in self._callers if caller not in gone]
        return self._callers

    def let_in(self) -> list[Connection]:
        """Hands the waiting connections over to the caller."""
        callers, self._callers = self._callers, []
        return callers

    def close_sockets(self) -> None:
        """Closes all sockets. Waiting processes notice, and try again until their timeout."""
        super().close_sockets()
        for caller in self._callers:
            caller.close()

    def _doubt(self, said: Any) -> str:
        secret = said.get("secret") if isinstance(said, dict) else None
        # JSON may contain half of a surrogate pair, which cannot be encoded.
        if isinstance(secret, str) and hmac.compare_digest(
            secret.encode(errors="replace"), self.address.secret.encode()
        ):
            return ""
        return "the secret in the address is not this group's"


def request_join(
    addresses: Callable[[], Sequence[Address]], mine: object, deadline: Deadline, source: str = ""
) -> tuple[Address, Connection, dict[str, Any]]:
    """Waits until a group lets this process in.

    Args:
        addresses: returns the possible addresses of the group's join server now; this stops waiting
            for an address that is no longer among them.
        mine: this process's introduction.
        deadline: the end of all tries.
        source: where the addresses come from, for the error.

    Returns:
        The join server's address, the connection to it, and the message of the group's first rank.

    Raises:
        ValueError: the group refuses this process.
        pycomm.Timeout: the group has not admitted it; the error tells why the last try failed.
    """
    try:
        while True:
            why = []
            for address in addresses():
                answer = _ask(address, addresses, mine, deadline)
                if isinstance(answer, str):
                    why.append(answer)
                elif "refused" in answer.said:
                    answer.close()
                    raise ValueError(f"the group refuses this process: {answer.said['refused']}")
                else:
                    return address, answer, answer.said
            with deadline.slice():
                time.sleep(_TRIES_EVERY)
    except TimeoutError:
        message = "joining: the group has not let this process in before the timeout"
        last = "; ".join(why) or "no address is known"
        raise Timeout(f"{message}: {last}{source}", operation="join") from None


def _ask(
    address: Address,
    addresses: Callable[[], Sequence[Address]],
    mine: object,
    deadline: Deadline,
) -> Connection | str:
    """The connection to a join server that has answered, or why there is none.

    Args:
        address: the join server's; of its host's addresses, the first that answers is taken.
        addresses: as for :func:`request_join`.
        mine: as for :func:`request_join`.
        deadline: as for :func:`request_join`.
    """
    why = f"{address.host} cannot be reached"
    try:
        for name in hosts_of(address.host):
            try:
                connection = Connection.to(name, address.port)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT:  # this kernel has no IPv6
                    continue
                raise
            why = _await_answer(connection, address, addresses, mine, deadline)
            if not why:
                return connection
            connection.close()
    except (socket.gaierror, UnicodeError) as error:  # the name may become known
        return f"the host name {address.host!r} is unknown ({error})"
    return why


def _await_answer(
    connection: Connection,
    address: Address,
    addresses: Callable[[], Sequence[Address]],
    mine: object,
    deadline: Deadline,
) -> str:
    """Introduces this process. Returns why the join server has not answered; empty if it has."""
    place = str(address).rpartition("/")[0]  # without the secret
    try:
        # While the file is written, it may have no addresses.
        while address in (addresses() or [address]):
            if connection.established and not connection.spoken:
                connection.say({"secret": address.secret, "mine": mine})
            connection.hear()
            if isinstance(connection.said, dict):
                return ""
            if connection.unreachable:
                return f"{place} cannot be reached"
            if connection.ended:
                ended = f"{place} has closed the connection"
                return ended if connection.established else f"nobody listens at {place}"
            if deadline.over():
                silent = f"a rank listens at {place}, but its group has not grown"
                return silent if connection.spoken else f"{place} has not answered"
            with deadline.slice():
                connection.wait(_TRIES_EVERY)
    except BaseException:
        connection.close()
        raise
    return f"{place} is not the group's address any more"


# How a group grows by processes that wait at its join server.

Kind = TypeVar("Kind", bound=Member)


class Growth(Generic[Kind]):
    """One rank's part in the growth of a group.

    Args:
        everyone: the introductions of all ranks.
        terms: options that newcomers need to make the larger group, besides their membership.
        make: makes the larger group from this rank's membership.

    Attributes:
        address: the join server's address, if this rank knows it.
    """

    def __init__(
        self,
        everyone: Sequence[Mapping[str, Any]],
        terms: Mapping[str, Any],
        make: Callable[[RendezvousResult], Kind],
    ) -> None:
        self.address: Address | None = None
        self._everyone, self._terms, self._make = everyone, terms, make
        self._server: JoinServer | None = None  # on the first rank, once it is open
        self._told = False  # True if all ranks know the address
        self._length = host.zeros(1, dtype=torch.int64)  # of the news
        self._store: Store | None = None  # served by this rank
        self._watched: dict[int, Connection] = {}  # by rank in the larger group
        self._busy = threading.Lock()

    def inherit(self, before: Growth[Kind]) -> None:
        """Takes over the join server of the previous group, or its address."""
        self.address = before.address
        self._server, before._server = before._server, None

    def open(self, group: Kind) -> None:
        """Opens the join server, if this is the first rank."""
        if group.rank == 0 and self._server is None:
            group._core.check_usable()
            self._server = JoinServer(self._host(group), self.address)
            self.address = self._server.address

    def close(self) -> None:
        """Closes the join server."""
        if self._server is not None:
            self._server.close_sockets()

    def grow(self, group: Kind, patience: float) -> Kind | None:
        """See :meth:`pycomm.Group.grow`.

        Args:
            group: this rank's membership.
            patience: seconds for setting up the larger group.

        Returns:
            The larger group; None if the group has not grown.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("grow() is running in another thread of this rank")
        try:
            news = self._announce(group, patience)
            if "store" not in news:
                return None
            larger = self._set_up(group, news["store"], patience)
            with contextlib.ExitStack() as failed:
                if larger is not None:
                    failed.callback(larger.close)
                if not group.should_commit(larger is not None) or larger is None:
                    return None
                self._enter(group, larger)
                failed.pop_all()
            _log.warning(
                "rank %d of %d: %s goes on as %s with %d more ranks",
                larger.rank,
                larger.size,
                group.title,
                larger.title,
                larger.size - group.size,
            )
            return larger
        finally:
            for connection in self._watched.values():
                connection.close()
            self._watched, self._store = {}, None
            self._busy.release()

    def _announce(self, group: Kind, patience: float) -> dict[str, Any]:
        """The first rank's news, on all ranks: the join server's address, and the Store's."""
        core, text = group._core, b""
        if group.rank == 0:
            try:
                news = self._invite(group, patience)
            except Exception as error:  # such as too many open files; the others wait for the news
                _tell_not_grown(group, error)
                news = {}
            if news or (self.address is not None and not self._told):
                text = json.dumps({"door": self.address, **news}).encode()
            self._length.fill_(len(text))
        _broadcast(core, self._length)
        if not self._length:
            return {}
        data = host.tensor(list(text or bytes(int(self._length))), dtype=torch.uint8)
        _broadcast(core, data)
        found: dict[str, Any] = json.loads(bytes(data.tolist()))
        self.address, self._told = Address(*found["door"]), True
        return found

    def _invite(self, group: Kind, patience: float) -> dict[str, Any]:
        """If processes wait at the join server, serves a Store for the larger group."""
        self.open(group)
        if self._server is None or not self._server.callers(self._objection):
            return {}
        store, port = serve(self._server.address.host, patience)
        self._store = store
        callers = self._server.let_in()
        everyone = [*self._everyone, *(self._introduction_of(caller.said) for caller in callers)]
        store.set("everyone", json.dumps([{**each, "nccl": False} for each in everyone]))
        where = self._server.address.host, port
        for rank, caller in enumerate(callers, start=group.size):
            caller.say({"store": where, "rank": rank, "patience": patience, "terms": self._terms})
            self._watched[rank] = caller
        if group._listener is not None:
            for rank, number in enumerate(group.ranks):
                if self._everyone[rank]["node"] != self._everyone[0]["node"]:
                    self._watched[rank] = group._listener.connect(number)
        return {"store": where}

    def _objection(self, said: Any) -> str:
        """Why the group cannot admit a process with this introduction; empty if it can."""
        mine = said.get("mine")
        if not _is_introduction(mine):
            return "its introduction does not have pycomm's format"
        for name, ours in build().items():
            if mine["settings"].get(name) != ours:
                return f"{name} must be {ours}, as in the group, got {mine['settings'].get(name)}"
        for other in self._everyone:
            if other["node"] == mine["node"] and other["user"] != mine["user"]:
                return (
                    f"all ranks of a node must run as one user, {other['user']}, got {mine['user']}"
                )
        return ""

    def _introduction_of(self, said: Any) -> dict[str, Any]:
        return {**said["mine"], "settings": self._everyone[0]["settings"]}

    def _set_up(self, group: Kind, where: list[Any], patience: float) -> Kind | None:
        """This rank's membership in the larger group; None if it cannot be made."""
        try:
            store = self._store or reach(where, patience, lambda: not group._core.usable())
            everyone = json.loads(store.get("everyone"))
            deadline = Deadline(patience)
            members = set_up(store, group.rank, everyone, deadline, self._lost, listens=True)
            return self._make(members)
        except Exception as error:
            _tell_not_grown(group, error)
            return None
        except BaseException:
            group.abort()  # the others wait for this rank's decision
            raise

    def _lost(self) -> list[int]:
        return [rank for rank, other in self._watched.items() if other.hears_end()]

    def _enter(self, group: Kind, larger: Kind) -> None:
        try:
            _barrier(larger._core)
        except CollectiveError:  # the next operation will fail, too
            with contextlib.suppress(PycommError):
                group.should_commit()

    def _host(self, group: Kind) -> str:
        listener = group._listener
        return own_address() if listener is None else listener.addresses[group.ranks[0]][0]


def enter(
    addresses: Callable[[], Sequence[Address]],
    seconds: float,
    make: Callable[[RendezvousResult, int, Mapping[str, Any]], Kind],
    source: str = "",
) -> Kind:
    """Joins a group that grows.

    Args:
        addresses: returns the possible addresses of the group's join server, anew for each try.
        seconds: how long to wait until the group admits this process.
        make: makes the larger group from this rank's membership, the rank and the group's terms.
        source: where the addresses come from, for errors.

    Raises:
        As :func:`pycomm.join`.
    """
    deadline, mine = Deadline(seconds), introduction(0)
    while True:
        address, connection, told = request_join(addresses, mine, deadline, source)
        try:
            made = _enter(connection, told, make)
            made._growing().address = address
            return made
        except RuntimeError:  # or any of pycomm's errors: the members continue without this process
            if deadline.over():
                raise
        finally:
            connection.close()


def _enter(
    connection: Connection,
    told: Mapping[str, Any],
    make: Callable[[RendezvousResult, int, Mapping[str, Any]], Kind],
) -> Kind:
    patience, rank = told["patience"], told["rank"]
    store = reach(told["store"], patience, connection.hears_end)
    everyone = json.loads(store.get("everyone"))

    def lost() -> list[int]:
        return [0] if connection.hears_end() else []

    members = set_up(store, rank, everyone, Deadline(patience), lost, listens=True)
    made = make(members, rank, told["terms"])
    try:
        _barrier(made._core)
    except BaseException:
        made.close()
        raise
    return made


def _tell_not_grown(group: Member, error: Exception) -> None:
    """Logs why a group has not grown although processes waited."""
    _log.warning("rank %d: %s has not grown: %s", group.rank, group.title, error)


def _broadcast(core: _C.Group, data: torch.Tensor) -> None:
    at, operation = data.data_ptr(), operation_of("broadcast", "auto", data.dtype)
    core.run(operation, data.numel(), at, at, None, "grow")


def _barrier(core: _C.Group) -> None:
    core.run(operation_of("barrier", "one_shot", torch.uint8), 0, 0, 0, None, "grow")


def _is_introduction(mine: Any) -> bool:
    """True if it has the fields of an introduction (rendezvous.py), with their types."""
    kinds = {"pid": int, "user": int, "node": str, "cores": list, "settings": dict}
    return (
        isinstance(mine, dict)
        and all(type(mine.get(name)) is kind for name, kind in kinds.items())
        and 0 < mine["pid"] < 1 << 31
        and all(type(core) is int for core in mine["cores"])
    )
