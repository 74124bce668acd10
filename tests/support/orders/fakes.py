"""Fakes of everything that the code of an agreement uses of the machine, as questions to a run.

Sockets, polls, clocks and Stores have the interface that `pycomm/_runtime` uses, and no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket as real
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from orders.replay import Run
from pycomm._runtime import failure_detector, rendezvous, shrink, sockets, stores, threads
from pycomm.errors import PeerDied

_run: Run  # that is under way


class Socket:
    """One end of a connection: of `(from, to, number)`."""

    def __init__(self, connection: tuple[int, int, int] | None = None) -> None:
        self._run, self.connection, self._error = _run, connection, 0
        self.closed = False

    def connect_ex(self, address: tuple[str, int]) -> int:
        """Begins to connect; the port is the other rank's number."""
        mine, other = self._run.rank, address[1]
        self.connection = (mine, other, self._run.number(("connection", mine, other)))
        self._run.do("connect", self.connection)
        return errno.EINPROGRESS

    def ready_to_write(self) -> bool:
        """True if it is connected, or has failed to be."""
        error = self._ask("writable")
        self._error = error or 0
        return error is not None

    def getsockopt(self, level: int, option: int) -> int:
        """SO_ERROR."""
        error, self._error = self._error, 0
        return error

    def sendall(self, data: bytes) -> None:
        """Never fails at once: what the other side has closed is noticed by a read."""
        self._run.do("send", self.connection, data.decode())

    def recv(self, most: int) -> bytes:
        """The next message, or the end."""
        got = self._ask("read")
        if got is None:
            raise BlockingIOError
        if isinstance(got, str):
            return got.encode()
        if got:
            raise OSError(got, os.strerror(got))
        return b""

    def close(self) -> None:
        """Ends this side."""
        if not self.closed:
            self._run.do("close", self.connection)
        self.closed = True

    def _ask(self, what: str) -> Any:
        if not self._run.live or self.closed:
            return None
        return self._run.ask(what, self.connection)

    def getsockname(self) -> str:
        """An address."""
        return "here"

    def getpeername(self) -> str:
        """Another one: no rank connects to itself."""
        return "there"

    def setblocking(self, blocking: bool) -> None: ...
    def setsockopt(self, level: int, option: int, value: int) -> None: ...


class ListeningSocket(Socket):
    """A rank's listener."""

    def accept(self) -> tuple[Socket, None]:
        """A connection; those that have come at once are taken in order."""
        if not self._run.live or (taken := self._run.ask("accept")) is None:
            raise BlockingIOError
        return Socket(taken), None

    def close(self) -> None:
        """Refuses connections from now on."""
        self._run.do("close listener")


class Poll:
    """select.poll()."""

    def register(self, what: Any, flags: int) -> None:
        """Remembers a connection that is to be written to."""
        self._what = getattr(what, "_socket", None)
        self._writes = flags == "out"

    def poll(self, milliseconds: float) -> bool:
        """Looks whether it can be written to, or waits."""
        if self._writes:
            return self._what.ready_to_write()
        wait()
        return True


class Select:
    """The module."""

    POLLIN, POLLOUT, poll = "in", "out", Poll


class SocketModule:
    """The module."""

    socket = Socket

    @staticmethod
    def create_server(address: tuple[str, int], **_: Any) -> ListeningSocket:
        """The rank's only one."""
        return ListeningSocket()

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


def wait() -> None:
    """Waits until something may have happened, or until time is over."""
    if _run.live and _run.ask("wait") == "time":
        _run.now = max(_run.now, _run.until)


class Time:
    """The module; the clock of the rank."""

    @staticmethod
    def monotonic() -> float:
        """Seconds."""
        return _run.now

    @staticmethod
    def sleep(seconds: float) -> None:
        """Waits."""
        wait()


class TimeOfPeers(Time):
    """A rank that looks for a death for a while looks twice."""

    @staticmethod
    def sleep(seconds: float) -> None:
        """Waits, until the while is over."""
        wait()
        _run.now += 1


class Deadline(threads.Deadline):
    """A deadline that is over only if the explorer says so."""

    @contextlib.contextmanager
    def slice(self) -> Iterator[float]:
        """As the original, without pauses of the process."""
        if self.over():
            raise TimeoutError("the timeout is over")
        _run.until = self._end
        yield 0.05


class Store:
    """TCPStore: in the process of the rank that has made it. Its port is its name."""

    def __init__(
        self, host: str, port: int, size: None, serves: bool, timeout: Any, **_: Any
    ) -> None:
        self._run, self.port = _run, port
        if serves:
            self.port = 100 * (_run.rank + 1) + _run.number("store")
            _run.do("open store", self.port)
        elif not _run.ask("join", self.port):
            raise RuntimeError("no server")

    def set_timeout(self, timeout: Any) -> None:
        """Time is the explorer's."""

    def set(self, key: str, value: str) -> None:
        """As in torch.distributed, like all others."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value, which is there."""
        return self._ask("get", key).encode()

    def add(self, key: str, amount: int) -> int:
        """The sum."""
        return self._ask("add", key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """True if the key is there."""
        return self._ask("check", *keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """The first value."""
        return self._ask("compare_set", key, value).encode()

    def _ask(self, verb: str, *rest: Any) -> Any:
        answer = self._run.ask("store", self.port, verb, *rest)
        if answer is None:
            raise RuntimeError("the Store is gone")
        return answer


class SocketOfStores:
    """The module; whether somebody serves a Store."""

    @staticmethod
    def create_connection(where: tuple[str, int], timeout: float) -> types.SimpleNamespace:
        """A connection that is only closed."""
        if not _run.ask("join", where[1]):
            raise ConnectionRefusedError("no server")
        return types.SimpleNamespace(close=lambda: None)


class Core:
    """The operations of a group: a decision, and one that all members must come to."""

    def __init__(self, group: int, culprit: int = -1) -> None:
        self._run, self.group, self.number, self._failed = _run, group, 0, False
        self.unresponsive = culprit
        self.ended_by = 1  # an abort word, of which others are told

    def run(self, operation: Any, count: int, at: int, *rest: Any) -> None:
        """An all-reduce of one float in place, with its maximum."""
        del rest
        self.number += 1
        self._check("failed" if self._failed else 0)
        self._run.do("enter", self.group, self.number, ctypes.c_float.from_address(at).value)
        most = self._run.ask("operate", self.group, self.number)
        self._check(most)
        ctypes.c_float.from_address(at).value = most

    def rest(self) -> None:
        """Waits for a failure."""
        self._check(self._run.ask("rest", self.group))

    def fail(self) -> None:
        """Ends the group for all."""
        self._failed = True
        self._run.do("break", self.group)

    def raise_again(self) -> None:
        """Its operations fail anyway."""

    def _check(self, answer: Any) -> None:
        if answer == "failed":
            self.fail()
            raise PeerDied("a rank has died")


def set_up(
    store: Store, rank: int, everyone: Sequence[Any], deadline: Deadline, lost: Any
) -> Store:
    """As `rendezvous.set_up` without memory and connections between the ranks."""
    watch = failure_detector.Peers(store, rank, [each["pid"] for each in everyone], lost)
    try:
        with watch.telling(), deadline.guarding("every rank taking the window"):
            rendezvous._await_all(store, len(everyone), deadline, watch)
    except BaseException as error:
        if isinstance(error, PeerDied):
            store._run.do("blame", everyone[error.rank]["pid"])
        store._run.do("break", store.port)  # as its connections end
        raise
    return store


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replaces the machine's modules by these fakes."""
    with contextlib.ExitStack() as patches:
        for module, name, fake in [
            (sockets, "socket", SocketModule()),
            (sockets, "select", Select),
            (sockets, "time", Time),
            (shrink, "select", Select),
            (shrink, "Deadline", Deadline),
            (stores, "socket", SocketOfStores),
            (stores, "TCPStore", Store),
            (stores, "limit_receives", lambda *_: None),
            (stores, "Deadline", Deadline),
            (shrink, "Deadline", Deadline),
            (shrink, "set_up", set_up),
            (threads, "time", Time),
            (failure_detector, "time", TimeOfPeers),
        ]:
            patches.enter_context(mock.patch.object(module, name, fake))
        yield


def use(run: Run) -> None:
    """Lets the fakes of one run ask it."""
    global _run
    _run = run
