"""Machines that hide, refuse or lack something that others have."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import helpers
import pytest
import restricted
import spanning

import pycomm
from pycomm._runtime import door, listener, rendezvous
from pycomm._runtime.waiting import Deadline

SUMS = "import restricted; print([restricted.sums(nodes) for nodes in ([2], [1, 1])])"


@pytest.mark.parametrize(
    "proc", ["-t proc -o subset=pid proc", "-t tmpfs tmpfs"], ids=["without /proc/sys", "no /proc"]
)
def test_hidden_files(proc):
    """Ranks know that they share a node, and groups work on one node and between nodes."""
    found = restricted.run(SUMS, f"mount {proc} /proc", "--mount")
    assert found.splitlines()[-1] == str([[(3000.0, n)] * 2 for n in (1, 2)])


def test_nodes_without_a_boot_id(monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(rendezvous, "_MACHINE_ID", tmp_path / "machine-id")
    here = rendezvous.node_identity()
    assert here == rendezvous.node_identity()
    (tmp_path / "machine-id").write_text("another")
    another = rendezvous.node_identity()
    system = list(os.uname())
    system[1] = "elsewhere"
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(system))
    assert len({here, another, rendezvous.node_identity()}) == 3


def fail_alone(rank, size, store, nodes, odd_rank):
    """Each rank's error; afterwards they make a group as one should."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == odd_rank:

            def fail(*_):
                raise PermissionError("hidden, the test says")

            patch.setattr(rendezvous, "introduction", fail)
        with pytest.raises((ValueError, OSError)) as caught:
            pycomm.init(timeout=60)
    took = time.monotonic() - start
    pycomm.init(timeout=60).close()
    return type(caught.value), str(caught.value), took


@pytest.mark.parametrize("nodes", ["aaa", "aab"])
def test_a_failure_before_ranks_know_each_other(nodes):
    outcomes = helpers.run_ranks(3, fail_alone, nodes, 1)
    told = "rank 1 could not introduce itself: PermissionError: hidden, the test says"
    other = (ValueError, told)
    assert [o[:2] for o in outcomes] == [
        other, (PermissionError, "hidden, the test says"), other
    ]  # fmt: skip
    assert all(took < 30 for *_, took in outcomes)


def names(*hosts):
    """A getaddrinfo that knows these addresses of every name."""

    def getaddrinfo(*_, **__):
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts]
        pairs = zip(hosts, families, strict=True)
        return [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for host, family in pairs]

    return getaddrinfo


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((), "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1"),
        (("::1", "127.0.0.1"), "127.0.0.1"),
        (("192.0.2.1",), "127.0.0.1"),  # which this host does not have
        (("192.0.2.1", "127.0.0.2"), "127.0.0.2"),
    ],
)
def test_addresses_of_a_node_with_ipv4(monkeypatch, known, expected):
    monkeypatch.setattr(socket, "getaddrinfo", names(*known))
    assert listener.own_address() == expected


IPV6_ONLY = """
ip link set lo up
ip address del 127.0.0.1/8 dev lo
ip address add fd00::7/64 dev lo nodad
echo "fd00::7 $(hostname)" > {hosts}
mount --bind {hosts} /etc/hosts
"""
GROW = """
import pathlib, socket, sys
import growing, helpers
assert socket.socket().connect_ex(("127.0.0.1", 9)) != 111, "there is IPv4"
path = {path!r}
for nodes in ("aa", "ab"):
    with (
        helpers.Ranks(2, growing.member, path, nodes, 3) as first,
        helpers.Ranks(1, growing.newcomer, 2, path, "b", 3) as second,
    ):
        found = [*first.wait_for(range(2), 100), *second.wait_for(range(1), 100)]
    for outcome in found:
        assert outcome.error is None, outcome.trace
        assert outcome.value["seen"][-1] == [0, 1, 2], outcome.value
        assert len(outcome.value["nodes"]) == 2
    print(pathlib.Path(path).read_text())
    pathlib.Path(path).unlink()
    for written in pathlib.Path(path).parent.glob("*.end.*"):
        written.unlink()
"""


def test_a_node_with_ipv6_only(tmp_path):
    """Groups on one node and between nodes, which grow."""
    setup = IPV6_ONLY.format(hosts=tmp_path / "hosts")
    told = restricted.run(GROW.format(path=str(tmp_path / "door")), setup, "--net", "--mount")
    for address in told.split():
        assert address.startswith("[fd00::7]:")


def test_a_name_with_addresses_of_both_families(monkeypatch):
    """A newcomer tries all of them."""
    opened = door.Door("127.0.0.1", None)
    monkeypatch.setattr(door, "hosts_of", lambda _: ["::1", "127.0.0.2", "127.0.0.1"])
    address = opened.address._replace(host="a-name")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(door.knock, lambda: [address], {}, Deadline(30))
        helpers.wait_until(lambda: opened.callers(lambda _: ""))
        for caller in opened.let_in():
            caller.say({"rank": 1})
        _, connection, told = asked.result()
    connection.close()
    opened.close_sockets()
    assert told == {"rank": 1}
