"""Invalid messages from a node raise a clear error that names it, and end no process."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from pathlib import Path

import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import internode

NODES, HARMFUL = [2, 1], 2  # the rank whose node sends them; rank 0 hears, rank 1 is beside it

# Damage to a message: offset, bytes, value (docs/reference/wire-format.md).
Change = tuple[int, int, int]
HANDSHAKE_BYTES, FAREWELL_BYTES = 80, 40

HEADERS = {
    "magic": (0, 4, 0),
    "version": (4, 2, 77),
    "kind": (6, 2, 9),
    "node": (8, 8, 0),
    "negative node": (8, 8, -1),
    "secret": (16, 16, 0),
}
FAREWELLS = {
    "secret": HEADERS["secret"],
    "a rank that does not exist": (32, 8, 1 << 60 | 1_000_000),
    "a waiting rank that does not exist": (32, 8, 2 << 60 | 100 << 20 | 1),
    "a negative word": (32, 8, -1),
    "an unknown reason": (32, 8, 7 << 60 | 1),
}
HANDSHAKES = HEADERS | {
    "collective": (32, 1, 250),
    "algorithm": (33, 1, 250),
    "dtype": (34, 1, 250),
    "op": (35, 1, 250),
    "root": (36, 4, -1),
    "count": (40, 8, -1),
    "device": (48, 1, 250),
    "codec": (56, 1, 250),
    "values": (57, 1, 250),
}


def changed(message: bytes, change: Change) -> bytes:
    begin, size, value = change
    field = (value % 256**size).to_bytes(size, "little")
    return message[:begin] + field + message[begin + size :]


def reduce_twice(group: pycomm.Group) -> None:
    """A rank that is done before another one has seen the damage fails in the second one."""
    for _ in range(2):
        pycomm.all_reduce(torch.ones(1000), group=group)


def error_of(group: pycomm.Group) -> tuple[type, int]:
    with pytest.raises(pycomm.CollectiveError) as caught:
        reduce_twice(group)
    return caught.type, caught.value.rank


def harmful_farewells(_: pycomm.Group, changes: dict[str, Change]) -> dict[str, object]:
    """The outcome for each kind of changed farewell."""
    original, found = internode.GlooTransport._tell, {}
    for name, change in changes.items():
        with pycomm.init(timeout=20) as group:
            if group.rank == HARMFUL:
                internode.GlooTransport._tell = lambda link, farewell, change=change: original(
                    link, changed(farewell, change)
                )
                group.abort()
                internode.GlooTransport._tell = original
            else:
                found[name] = error_of(group)
    return found


def test_farewells():
    """A farewell with a bad word raises an error; it must not end the process or a thread."""
    wanted = dict.fromkeys(FAREWELLS, (pycomm.ProtocolError, HARMFUL))
    assert spanning.run(NODES, harmful_farewells, FAREWELLS) == [wanted, wanted, {}]


def test_a_farewell_as_it_should_be():
    changes = {"another rank": (32, 8, 4 << 60 | 1)}
    found = {"another rank": (pycomm.Aborted, 1)}
    assert spanning.run(NODES, harmful_farewells, changes) == [found, found, {}]


SENT: list[ctypes.Array[ctypes.c_char]] = []  # Gloo reads it after post() has returned


def harm_message(number: int, change: Change) -> None:
    """Changes the messages that this rank sends in its next batch, or `number` batches later."""
    original, passed = internode.GlooTransport.post, []

    def post(link, sends, receives):
        if len(passed) == number:
            ((node, address, nbytes),) = sends
            message = changed(ctypes.string_at(address, nbytes), change)
            SENT.append(room := ctypes.create_string_buffer(message, nbytes))
            passed.append(None)
            sends = [(node, ctypes.addressof(room), nbytes)]
            internode.GlooTransport.post = original
        passed.append(None)
        original(link, sends, receives)

    internode.GlooTransport.post = post


def harmful_handshakes(_: pycomm.Group, changes: dict[str, Change]) -> dict[str, object]:
    found = {}
    for name, change in changes.items():
        with pycomm.init(timeout=20) as group:
            if group.rank == HARMFUL:
                harm_message(0, change)
            found[name] = error_of(group)
    return found


def test_handshakes():
    """Enums out of range must not index tables of names."""
    wanted = dict.fromkeys(HANDSHAKES, (pycomm.ProtocolError, HARMFUL))
    assert spanning.run(NODES, harmful_handshakes, HANDSHAKES) == [wanted] * 3


def late(group: pycomm.Group, posted: Path) -> float:
    """Rank 1 comes when rank 0 has posted two batches."""
    original, batches = internode.GlooTransport.post, []

    def post(link, sends, receives):
        original(link, sends, receives)
        batches.append(None)
        if len(batches) == 2:
            posted.touch()

    end = time.monotonic() + 30
    while group.rank == 1 and not posted.exists():
        assert time.monotonic() < end, "rank 0 posted no data"
        time.sleep(0.001)
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 0:
            patch.setattr(internode.GlooTransport, "post", post)
        x = pycomm.all_reduce(torch.ones(100_000), group=group)
    return float(x.sum())


def test_data_follows_the_handshake_at_once(tmp_path):
    """Data is sent before the other node has come."""
    assert spanning.run([1, 1], late, tmp_path / "posted") == [200_000.0] * 2


LISTS = {
    "a negative length": (1, (0, 8, -1)),
    "a length without end": (1, (0, 8, 2**62)),
    "more entries than elements": (2, (0, 4, 2**32 - 1)),
    # The indices follow a count and 100 values, with 3 low bits each: 0 and 0 instead of 0 and 1.
    "an index twice": (2, (4 + 100 * 4, 1, 0b10_000_000)),
}


def exchange_lists(group: pycomm.Group) -> None:
    """Twice: a rank that is done before another one has seen the damage fails in the next one."""
    for _ in range(2):
        pycomm.compressed_all_reduce(torch.ones(1000), pycomm.TopK(0.1), group=group)


def harmful_lists(_: pycomm.Group) -> dict[str, object]:
    """With top-k the list's length and the list come after the handshake."""
    found = {}
    for name, (number, change) in LISTS.items():
        with pycomm.init(timeout=20) as group:
            if group.rank == HARMFUL:
                harm_message(number, change)
            with pytest.raises(pycomm.CollectiveError) as caught:
                exchange_lists(group)
            found[name] = (caught.type, caught.value.rank)
    return found


def test_lists():
    wanted = dict.fromkeys(LISTS, (pycomm.ProtocolError, HARMFUL))
    assert spanning.run(NODES, harmful_lists) == [wanted] * 3


def of_another_length(outer: pycomm.Group, nbytes: int) -> tuple[type, int]:
    """The harmful rank's first message is as long as that."""
    original = internode.GlooTransport.post
    room = torch.zeros(nbytes, dtype=torch.uint8)

    def post(link, sends, receives):
        sends = [(node, room.data_ptr(), nbytes) for node, _, _ in sends]
        original(link, sends, receives)

    # The harmful rank waits as well, for somebody to take what it sends.
    with pycomm.init(timeout=20 if outer.rank == HARMFUL else 1) as group:
        if group.rank == HARMFUL:
            internode.GlooTransport.post = post
        return error_of(group)


@pytest.mark.parametrize("nbytes", [HANDSHAKE_BYTES - 1, HANDSHAKE_BYTES + 1])
def test_handshakes_of_another_length(nbytes):
    """Gloo would end a process that receives more than it has room for."""
    assert spanning.run(NODES, of_another_length, nbytes) == [(pycomm.Timeout, HARMFUL)] * 3


def farewell_of_another_length(group: pycomm.Group, nbytes: int) -> tuple[type, int] | None:
    if group.rank != HARMFUL:
        return error_of(group)
    original = internode.GlooTransport._tell
    internode.GlooTransport._tell = lambda link, _: original(link, bytes(nbytes))
    group.abort()
    return None


@pytest.mark.parametrize("nbytes", [FAREWELL_BYTES - 1, FAREWELL_BYTES + 1])
def test_farewells_of_another_length(nbytes):
    gone = (pycomm.PeerDied, HARMFUL)
    found = spanning.run(NODES, farewell_of_another_length, nbytes, timeout=20)
    assert found == [gone, gone, None]


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def visited(group: pycomm.Group, noise: bytes) -> float:
    """A stranger connects to whatever listens, while ranks exchange."""
    x = torch.ones(100_000)
    pycomm.barrier(group=group)
    ports = listening_ports()
    assert ports
    with contextlib.ExitStack() as connections:
        for port in ports:
            for node in ("127.0.0.1", "::1"):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection((node, port), timeout=5)
                    connections.enter_context(stranger).sendall(noise)
        for _ in range(3):
            pycomm.all_reduce(x, "avg", group=group)
    return float(x[0])


@pytest.mark.parametrize("noise", [b"", b"\xff" * 8, b"\xff" * 4096], ids=len)
def test_a_stranger_who_connects(noise):
    assert spanning.run([1, 1], visited, noise, timeout=20) == [1.0, 1.0]
