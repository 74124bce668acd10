"""The door of a group that runs: a port of its first rank, on which processes ask to join it."""

from __future__ import annotations

import contextlib
import errno
import hmac
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pycomm._runtime.listener import Acceptor, Connection, hosts_of
from pycomm.errors import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pycomm._runtime.waiting import Deadline

_GREETS_WITHIN = 5.0  # seconds
_MOST_SILENT = 64  # connections that have not said who they are, for each takes a descriptor
_TRIES_EVERY = 0.05  # seconds
_WRITTEN = re.compile(r"\[?([^][/\s\0]+)\]?:(\d+)/([0-9a-f]{32})")


class Address(NamedTuple):
    """The place of a door. Its text is ``host:port/secret``."""

    host: str
    port: int
    secret: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in a text; ValueError if it is none."""
        found = _WRITTEN.fullmatch(text.strip())
        if found is None or int(found[2]) > 65535:
            raise ValueError(f"address must be that of a group, host:port/secret, got {text!r}")
        host, port, secret = found.groups()
        return cls(host, int(port), secret)


def read_addresses(path: Path) -> list[Address]:
    """The addresses in a file, which may not be there yet, or not whole."""
    with contextlib.suppress(OSError, ValueError):
        return [Address.parse(line) for line in path.read_text().splitlines()]
    return []


class Door(Acceptor):
    """Lets processes ask to join. Nothing here ever blocks.

    Args:
        host: the address of this node.
        before: the address of the door before this one, whose rank may have died. On its node this
            one takes the same port, if that is free, so that the address stays.

    Attributes:
        address: where it is.
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
        """Those who wait to be let in.

        Args:
            objection: returns why a process cannot be let in that has said this; else nothing.
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
        while len(self.strangers) > _MOST_SILENT:  # newcomers greet at once, so the last may be one
            self.strangers.pop(0).close()
        gone = [caller for caller in self._callers if caller.hears_end()]
        for caller in gone:
            caller.close()
        self._callers = [caller for caller in self._callers if caller not in gone]
        return self._callers

    def let_in(self) -> list[Connection]:
        """Leaves those who wait to the caller."""
        callers, self._callers = self._callers, []
        return callers

    def close_sockets(self) -> None:
        """Those who wait see that, and try again until their timeout."""
        super().close_sockets()
        for caller in self._callers:
            caller.close()

    def _doubt(self, said: Any) -> str:
        secret = said.get("secret") if isinstance(said, dict) else None
        # Half of a surrogate pair, which JSON may have, could not be encoded.
        if isinstance(secret, str) and hmac.compare_digest(
            secret.encode(errors="replace"), self.address.secret.encode()
        ):
            return ""
        return "the secret in the address is not this group's"


def knock(
    addresses: Callable[[], Sequence[Address]], mine: object, deadline: Deadline
) -> tuple[Address, Connection, dict[str, Any]]:
    """Waits until a group lets this process in.

    Args:
        addresses: returns where the group's door may be now; a door that has moved is not waited
            for.
        mine: what the group must know of this process.
        deadline: until when to try.

    Returns:
        The door's address, the connection to the group's first rank, and what that rank has said.

    Raises:
        ValueError: the group refuses this process.
        pycomm.Timeout: the group has not let it in, perhaps because its host's name is unknown.
    """
    unknown = ""
    try:
        while True:
            for address in addresses():
                try:
                    door = _ask(address, hosts_of(address.host), addresses, mine, deadline)
                except (socket.gaierror, UnicodeError) as error:  # it may become known
                    unknown = f": the host name {address.host!r} is unknown ({error})"
                    continue
                unknown = ""
                if door is not None:
                    if "refused" in door.said:
                        door.close()
                        raise ValueError(f"the group refuses this process: {door.said['refused']}")
                    return address, door, door.said
            with deadline.slice():
                time.sleep(_TRIES_EVERY)
    except TimeoutError:
        message = "joining: the group has not let this process in before the timeout"
        raise Timeout(message + unknown, operation="join") from None


def _ask(
    address: Address,
    hosts: Sequence[str],
    addresses: Callable[[], Sequence[Address]],
    mine: object,
    deadline: Deadline,
) -> Connection | None:
    """The connection to a door that has answered; None if nobody is there, or it has moved.

    Args:
        address: the door's.
        hosts: the addresses that its host may have, of which the first that answers is taken.
        addresses: as for :func:`knock`.
        mine: as for :func:`knock`.
        deadline: as for :func:`knock`.
    """
    for host in hosts:
        try:
            door = Connection.to(host, address.port)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # this kernel has no IPv6
                continue
            raise
        try:
            # There are no addresses while the file is written.
            while not (door.ended or door.unreachable) and address in (addresses() or [address]):
                if door.established and not door.spoken:
                    door.say({"secret": address.secret, "mine": mine})
                door.hear()
                if isinstance(door.said, dict):
                    return door
                with deadline.slice():
                    door.wait(_TRIES_EVERY)
        except BaseException:
            door.close()
            raise
        door.close()
    return None
