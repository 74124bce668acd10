"""Machines that hide, refuse or lack something that others have."""

import errno
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import helpers
import pytest
import restricted
import spanning
import torch

import pycomm
from pycomm._runtime import grow, rendezvous, sockets
from pycomm._runtime.threads import Deadline

SUMS = "import restricted; print([restricted.sums(nodes) for nodes in ([2], [1, 1])])"


@pytest.mark.slow
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
    assert sockets.own_address() == expected


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


@pytest.mark.slow
def test_a_node_with_ipv6_only(tmp_path):
    """Groups on one node and between nodes, which grow."""
    setup = IPV6_ONLY.format(hosts=tmp_path / "hosts")
    told = restricted.run(GROW.format(path=str(tmp_path / "door")), setup, "--net", "--mount")
    for address in told.split():
        assert address.startswith("[fd00::7]:")


def test_a_name_with_addresses_of_both_families(monkeypatch):
    """A newcomer tries all of them."""
    opened = grow.JoinServer("127.0.0.1", None)
    monkeypatch.setattr(grow, "hosts_of", lambda _: ["::1", "127.0.0.2", "127.0.0.1"])
    address = opened.address._replace(host="a-name")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(grow.request_join, lambda: [address], {}, Deadline(30))
        helpers.wait_until(lambda: opened.callers(lambda _: ""))
        for caller in opened.let_in():
            caller.say({"rank": 1})
        _, connection, told = asked.result()
    connection.close()
    opened.close_sockets()
    assert told == {"rank": 1}


def make_in_vain(rank, size, store, nodes, odd_rank, restrict):
    """Each rank's error of a group that one rank cannot make."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    start = time.monotonic()
    if rank == odd_rank:
        restrict()
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        pycomm.init(timeout=60)
    took = time.monotonic() - start
    return type(caught.value), str(caught.value), getattr(caught.value, "errno", None), took


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_limit_on_the_size_of_files():
    first, second = helpers.run_ranks(2, make_in_vain, "aa", 0, limit_files)
    said = "limit on the size of files (ulimit -f, RLIMIT_FSIZE) is 1048576 bytes"
    assert first[0] is OSError
    assert second[0] is ValueError
    assert first[2] == errno.EFBIG
    assert said in first[1]
    assert "rank 0 could not set up the group" in second[1]
    assert said in second[1]
    assert max(first[3], second[3]) < 30


def refuse_threads():
    restricted.refuse("clone3", errno.ENOSYS)
    restricted.refuse("clone", errno.EAGAIN, bits=0x10000)  # CLONE_THREAD


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_no_thread_for_a_link(odd_rank):
    """All ranks are told, and nobody waits for the timeout."""
    outcomes = helpers.run_ranks(2, make_in_vain, "ab", odd_rank, refuse_threads)
    for rank, (kind, message, _, took) in enumerate(outcomes):
        assert kind is (RuntimeError if rank == odd_rank else ValueError)
        assert "user's threads (ulimit -u, RLIMIT_NPROC: " in message
        assert took < 30


def without_threads(group):
    """The errors of an operation that needs a thread, and of threads as ranks."""
    world = pycomm.LocalWorld(2)
    refuse_threads()
    with pytest.raises(BlockingIOError) as operation:  # EAGAIN
        pycomm.all_reduce(torch.ones(4), group=group, async_op=True)
    with pytest.raises(RuntimeError) as ranks:
        world.run(lambda each: pycomm.barrier(group=each))
    total = pycomm.all_reduce(torch.ones(4), group=group)
    return str(operation.value), str(ranks.value), total.tolist()


def test_no_thread_for_an_operation():
    for operation, ranks, total in helpers.run_group(2, without_threads):
        for message in (operation, ranks):
            assert "(ulimit -u, RLIMIT_NPROC: " in message
            assert "(pids.max)" in message
        assert total == [2.0] * 4


def reserve_in_pieces(group):
    """Sends a signal in each call that reserves much memory, as a timer does on a slow machine."""
    restricted.refuse("fallocate", errno.EINTR, argument=3, above=64 << 20)
    return group.empty(40 << 20).fill_(2)[-1].item()


def test_signals_do_not_keep_memory_from_being_reserved():
    assert helpers.run_ranks(1, helpers.in_group, reserve_in_pieces, {}, limit=60) == [2.0]


def meet_without_pidfds(rank, size, store, error):
    restricted.refuse("pidfd_open", error)
    helpers.join_world(rank, size, store)
    with pycomm.init(timeout=60) as group:
        total = pycomm.all_reduce(torch.ones(4), group=group)[0].item()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(pycomm.PeerDied) as caught:
            pycomm.barrier(group=group)
        return total, caught.value.rank, time.monotonic() - start < 30


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_refused_pidfds(error):
    """Older versions of Docker refuse pidfds; a death is still noticed."""
    with helpers.Ranks(2, meet_without_pidfds, error) as ranks:
        (outcome,) = ranks.wait_for([0], 100)
    assert outcome.value == (2.0, 1, True), outcome.trace


def hold_replicas(group):
    model = pycomm.DataParallel(
        torch.nn.Linear(4, 4), shard=pycomm.Sharding("optimizer", replicas=2), group=group
    )
    optimizer = pycomm.optim.FusedAdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return True


def hold_replicas_that_never_execute(group):
    """As if vm.memfd_noexec is 2."""
    restricted.refuse("memfd_create", errno.EACCES, argument=1, lacks=8)
    return hold_replicas(group)


def hold_replicas_on_an_old_kernel(group):
    restricted.refuse("memfd_create", errno.EINVAL, argument=1, bits=8)
    return hold_replicas(group)


def hold_replicas_in_vain(group):
    if group.rank == 1:
        restricted.refuse("memfd_create", errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files") as caught:
        hold_replicas(group)
    pycomm.barrier(group=group)
    return caught.value.errno


def test_files_of_replicas():
    for hold in (hold_replicas_that_never_execute, hold_replicas_on_an_old_kernel):
        assert helpers.run_group(2, hold, timeout=60) == [True, True]
    assert helpers.run_group(2, hold_replicas_in_vain, timeout=60) == [errno.EMFILE] * 2
