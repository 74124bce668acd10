"""Groups that grow: processes join, die while they join, or are refused."""

import contextlib
import functools
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import growing
import helpers
import pytest

import pycomm
from pycomm._runtime import rendezvous
from pycomm._runtime.grow import Address, JoinServer, request_join
from pycomm._runtime.sockets import Connection
from pycomm._runtime.threads import Deadline


def grow_until(group, size, path):
    """Grows the group until it has this size; rank 0 tells newcomers where it is."""
    while group.size < size:
        growing.publish(group, path)
        group = group.grow()
    return group


def leave(group):
    """Closes the group when slower ranks have left the barrier."""
    pycomm.barrier(group=group)
    time.sleep(0.2)
    group.close()


def come(rank, size, store, path):
    """Ranks 0 and 1 are members; 2 and 3 come together."""
    if rank < 2:
        helpers.join_world(rank, 2, store)
        group = pycomm.init(timeout=20, staging_bytes=1 << 20)
        assert group.grow() is group
        larger = grow_until(group, size, path)
        with pytest.raises(pycomm.GroupUnusable, match="closed"):
            pycomm.barrier(group=group)
        assert larger.grow() is larger
    else:
        larger = grow_until(pycomm.join(Path(path), 30), size, path)
        assert larger.grow() is larger
    assert pycomm.default_group() is larger
    found = growing.numbers(larger, 10 + rank)
    leave(larger)
    return larger.rank, larger.ranks, found, larger.timeout, larger.staging_bytes, larger.address


def test_newcomers_come_behind_the_members(tmp_path):
    found = helpers.run_ranks(4, come, str(tmp_path / "door"))
    assert [rank for rank, *_ in found[:2]] == [0, 1]
    assert {rank for rank, *_ in found[2:]} == {2, 3}
    everyone = found[0][2]
    assert everyone[:2] == [10, 11]
    assert set(everyone) == {10, 11, 12, 13}
    for _, *rest in found:
        assert rest == [(0, 1, 2, 3), everyone, 20.0, 1 << 20, (tmp_path / "door").read_text()]


@pytest.mark.parametrize("seed", range(4))
def test_random_deaths_harm_nobody(seed):
    assert growing.run_world(seed) == []


def outlive(rank, size, store, path):
    """Rank 0, which has the door, dies; a newcomer finds the next door at the same address."""
    helpers.join_world(rank, size, store)
    group = grow_until(pycomm.init(timeout=20), 3, path)
    assert growing.numbers(group, rank) == [0, 1, 2]
    Path(f"{path}.ready.{rank}").touch()
    if rank == 0:
        helpers.wait_until(Path(f"{path}.ready.2").exists)
        helpers.wait_until(Path(f"{path}.ready.1").exists)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return go_on(group, rank)


def fail(group):
    """Operates until an operation fails."""
    while True:
        try:
            pycomm.barrier(group=group)
        except pycomm.PeerDied:
            return


def go_on(group, number):
    fail(group)
    group = group.shrink()
    assert group.ranks == (1, 2)
    while group.size < 3:
        group = group.grow()
    found = growing.numbers(group, number)
    leave(group)
    return found


def come_second(_rank, _size, _store, path):
    group = pycomm.join(Path(path), 30)
    growing.numbers(group, 2)
    Path(f"{path}.ready.2").touch()
    return go_on(group, 2)


def come_third(_rank, _size, _store, path):
    helpers.wait_until(Path(f"{path}.ready.2").exists)
    group = pycomm.join(Path(path).read_text(), 30)
    found = growing.numbers(group, 3)
    leave(group)
    return found


def test_the_address_stays_when_its_owner_dies(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, outlive, path) as members,
        helpers.Ranks(1, come_second, path) as second,
        helpers.Ranks(1, come_third, path) as third,
    ):
        outcomes = [*members.wait_for([1]), *second.wait_for([0]), *third.wait_for([0])]
    assert [outcome.value for outcome in outcomes] == [[1, 2, 3]] * 3, outcomes


def be_refused(_rank, _size, _store, path, what):
    helpers.wait_until(Path(path).exists)
    address = Path(path).read_text()
    host, _, port = address.partition("/")[0].rpartition(":")
    if what == "nonsense":
        half = b'{"secret": "\\ud800"}\n'  # of a surrogate pair
        for text in (b"nonsense\n", b"[]\n", b"{}\n", half, b"\0" * 100_000):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(text)
                time.sleep(0.1)
        return "told nothing"
    if what == "halves":
        with socket.create_connection((host, int(port))) as stranger:
            secret = address.partition("/")[2]
            stranger.sendall(b'{"secret": "%s", "mine": {"pid": "1"}}\n' % secret.encode())
            return stranger.recv(1000).decode()
    if what == "secret":
        address = f"{host}:{port}/{'0' * 32}"
    else:
        mine = rendezvous.introduction(0)
        if what == "user":
            mine["user"] += 1
        else:
            mine["settings"]["the window layout of pycomm's build"] -= 1
        import pycomm._runtime.grow as module

        module.introduction = lambda _: mine
    with pytest.raises(ValueError, match="refuses this process") as raised:
        pycomm.join(address, 20)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("secret", "the secret in the address is not this group's"),
        ("nonsense", "told nothing"),
        ("halves", "introduction does not have"),
        ("user", "all ranks of a node must run as one user"),
        ("build", "the window layout of pycomm's build must be"),
    ],
)
def test_who_must_not_come_in(what, told, tmp_path):
    """The members go on without it, and later let another process in."""
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, growing.member, path, "", 3) as members,
        helpers.Ranks(1, be_refused, path, what) as stranger,
    ):
        (refused,) = stranger.wait_for([0])
        assert told in str(refused.value), refused
        with helpers.Ranks(1, growing.newcomer, 2, path, "", 3) as newcomer:
            for outcome in (*members.wait_for([0, 1]), *newcomer.wait_for([0])):
                assert outcome.value["seen"][-1] == [0, 1, 2], outcome


def stop_in_the_middle(_rank, _size, _store, path):
    """A newcomer is stopped after it has got the window, and runs again later."""
    await_all = rendezvous._await_all

    def stop(*given):
        rendezvous._await_all = await_all
        Path(f"{path}.stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        await_all(*given)

    rendezvous._await_all = stop
    return growing.newcomer(0, 1, "", 2, path, "", 3)


def test_a_stopped_newcomer_is_left_out_and_comes_again(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, functools.partial(growing.member, patience=1), path, "", 3) as members,
        helpers.Ranks(1, stop_in_the_middle, path) as newcomer,
    ):
        helpers.wait_until(Path(f"{path}.stopped").exists)
        time.sleep(2)
        newcomer.signal(0, signal.SIGCONT)
        for outcome in (*members.wait_for([0, 1]), *newcomer.wait_for([0])):
            assert outcome.value["seen"][-1] == [0, 1, 2], outcome


def test_nobody_is_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    began = time.monotonic()
    waited = "the group has not let this process in before the timeout: "
    address, path = f"127.0.0.1:{port}/{'0' * 32}", tmp_path / "door"
    with pytest.raises(pycomm.Timeout, match=f"{waited}nobody listens at 127.0.0.1:{port}$"):
        pycomm.join(address, 0.3)
    with pytest.raises(pycomm.Timeout, match=rf"{waited}no address is known \(file {path}\)"):
        pycomm.join(path, 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listens = f"127.0.0.1:{silent.getsockname()[1]}"
        path.write_text(f"{address}\n{listens}/{'0' * 32}\n")
        both = f"nobody listens at 127.0.0.1:{port}; a rank listens at {listens}, but"
        with pytest.raises(pycomm.Timeout, match=rf"{both} .* not grown \(file {path}\)"):
            pycomm.join(path, 0.3)
    assert time.monotonic() - began < 10
    secret = "0" * 32
    rest = f":1/{secret[1:]}", f":port/{secret}", f":65536/{secret}", f"\0:1/{secret}"
    for text in ("", "host", *("host" + wrong for wrong in rest)):
        with pytest.raises(ValueError, match="address must be a group's, host:port/secret"):
            pycomm.join(text)


def test_a_host_name_may_become_known(monkeypatch):
    """If the name stays unknown until the timeout, the error names it."""
    connect, failures = Connection.to, iter([socket.gaierror("not yet")] * 3)

    def resolve_later(host, port):
        for error in failures:
            raise error
        return connect(host, port)

    monkeypatch.setattr(Connection, "to", resolve_later)
    door = JoinServer("127.0.0.1", None)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(request_join, lambda: [door.address], {}, Deadline(10))
        helpers.wait_until(lambda: door.callers(lambda _: ""), 5)
        (caller,) = door.let_in()
        caller.say({"rank": 2})
        assert asking.result()[2] == {"rank": 2}
        caller.close()
        asking.result()[1].close()
    door.close_sockets()
    monkeypatch.undo()
    for host in ("nobody.invalid", "n" * 70):
        with pytest.raises(pycomm.Timeout, match=f"the host name '{host}' is unknown"):
            pycomm.join(f"{host}:1/{'0' * 32}", 0.3)


def test_silent_strangers_cost_few_descriptors():
    """And nested brackets are nonsense, although they make Python's parser give up."""
    door = JoinServer("127.0.0.1", None)
    with contextlib.ExitStack() as strangers:
        for _ in range(500):
            strangers.enter_context(socket.create_connection(("127.0.0.1", door.port)))
        for _ in range(4):
            assert door.callers(lambda _: "") == []
            assert len(door.strangers) <= 64
        last = strangers.enter_context(socket.create_connection(("127.0.0.1", door.port)))
        last.sendall(b"[" * 60_000 + b"\n")
        helpers.wait_until(lambda: door.callers(lambda _: "") == [] and len(door.strangers) == 64)
    door.close_sockets()


def test_a_door_that_has_moved_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        before = Address("127.0.0.1", silent.getsockname()[1], "0" * 32)
        door, places = JoinServer("127.0.0.1", before), iter([[before], [before], []])
        asking = pool.submit(request_join, lambda: next(places, [door.address]), {}, Deadline(10))
        helpers.wait_until(lambda: door.callers(lambda _: ""), 5)
        (caller,) = door.let_in()
        caller.say({"rank": 2})
        assert asking.result()[::2] == (door.address, {"rank": 2})
        caller.close()
        asking.result()[1].close()
        door.close_sockets()


def grow_twice(rank, _size, store):
    """Two threads of rank 1 call grow() at once, and rank 0 comes when one of them has raised."""
    helpers.join_world(rank, 2, store)
    group, raised = pycomm.init(timeout=20), Path(f"{store}.raised")
    if rank == 0:
        helpers.wait_until(raised.exists)
        return [group.grow() is group]

    def grow(_):
        try:
            return group.grow() is group
        except RuntimeError as error:
            raised.touch()
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return sorted(map(str, pool.map(grow, range(2))))


def test_two_threads_do_not_grow_a_group_at_once():
    found = helpers.run_ranks(2, grow_twice)
    assert found == [[True], ["True", "grow() is running in another thread of this rank"]]


def test_groups_of_threads_do_not_grow():
    with pycomm.LocalWorld(1) as world:
        (group,) = world.groups
        assert group.address is None
        with pytest.raises(ValueError, match="only a group of processes"):
            group.grow()
        with pytest.raises(ValueError, match="timeout must be positive"):
            group.grow(-1)
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        group.grow()


def use_in_a_child(group):
    """A forked child must not grow the group, and newcomers cannot join through it."""
    host, _, port = group.address.partition("/")[0].rpartition(":")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            group.grow()
        except pycomm.GroupUnusable as error:
            code = 0 if "parent of this forked" in str(error) else 2
        finally:
            if code == 0:
                time.sleep(1)
            os._exit(code)
    time.sleep(0.3)
    group.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    os.kill(pid, 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_not_the_door():
    assert helpers.run_group(1, use_in_a_child) == [0]


def miss_the_end(rank, size, store, path):
    """Member 1 fails just when the larger group is complete; the next try succeeds."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    growing.publish(group, path)
    await_all = rendezvous._await_all

    def fail_once(*given):
        rendezvous._await_all = await_all
        await_all(*given)
        Path(f"{path}.missed").touch()
        raise OSError("on purpose")

    if rank == 1:
        rendezvous._await_all = fail_once
    while not Path(f"{path}.missed").exists():
        assert group.grow() is group
    return growing.live(group, rank, path, 3)


def test_all_members_have_the_larger_group_or_none(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, miss_the_end, path) as members,
        helpers.Ranks(1, growing.newcomer, 2, path, "", 3) as newcomer,
    ):
        for outcome in (*members.wait_for([0, 1], 60), *newcomer.wait_for([0], 60)):
            assert outcome.value["seen"][-1] == [0, 1, 2], outcome


def die_meanwhile(rank, size, store, path):
    """Member 1 dies when the larger group is all but complete."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    if rank == 1:
        rendezvous._await_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerDied) as raised:
        grow_until(group, 3, path)
    assert raised.value.rank == 1
    return growing.live(group.shrink(), rank, path, 2)


def test_a_member_dies_while_the_group_grows(tmp_path):
    path = str(tmp_path / "door")
    with (
        helpers.Ranks(2, die_meanwhile, path) as members,
        helpers.Ranks(1, growing.newcomer, 2, path, "", 2) as newcomer,
    ):
        for outcome in (*members.wait_for([0]), *newcomer.wait_for([0])):
            assert outcome.value["seen"][-1] == [0, 2], outcome


def count_operations(group):
    """Operations in the first call of grow(), which tells the address, and in the second."""

    def broadcasts():
        return sum(s.count for s in group.stats().operations if s.operation == "broadcast")

    counts = [broadcasts()]
    for _ in range(2):
        assert group.grow() is group
        counts.append(broadcasts())
    return counts[1] - counts[0], counts[2] - counts[1]


def test_if_nobody_waits_there_is_one_broadcast():
    assert helpers.run_group(2, count_operations) == [(2, 1)] * 2
