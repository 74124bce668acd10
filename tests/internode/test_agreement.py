"""The agreement of survivors: ranks are threads, with listeners of their own."""

import contextlib
import json
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import helpers
import pytest
from torch.distributed import HashStore

from pycomm._runtime import shrink as runtime_shrink
from pycomm._runtime import stores
from pycomm._runtime.shrink import Agreement
from pycomm._runtime.sockets import Alarm, Connection, Listener
from pycomm._runtime.threads import Deadline
from pycomm.errors import PycommError, Timeout

SIZE = 4


def listeners():
    store, made = HashStore(), [None] * SIZE

    def open_one(rank):
        made[rank] = Listener.open(store, rank, SIZE, "127.0.0.1", Deadline(20), lambda: None)

    run(open_one, range(SIZE))
    return made


def run(function, ranks):
    """The results, or the errors, of the function in a thread for each rank."""
    results = {}

    def body(rank):
        try:
            results[rank] = function(rank)
        except PycommError as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def agree(made, survivors, unresponsive=(), excluded=(), alive=(), unreachable=(), patience=10.0):
    """The survivors' results; the other ranks have ended, except for the ranks `alive`."""
    for rank, listener in enumerate(made):
        if rank not in (*survivors, *alive):
            listener.close()

    done = []

    def meet(rank):
        listener = made[rank]
        connect = listener.connect

        def try_to_connect(other):
            connection = connect(other)
            connection.unreachable = (rank in unreachable) != (other in unreachable)
            return connection

        listener.connect = try_to_connect
        with Agreement(listener, rank, range(SIZE), unresponsive, excluded, patience) as agreement:
            try:
                _, members, everyone = agreement.members({"pid": rank})
            finally:
                done.append(rank)  # the coordinator's Store lasts until all have reached it
                helpers.wait_until(lambda: len(done) == len(survivors))
            assert [each["pid"] for each in everyone] == members
            return members

    try:
        return run(meet, survivors)
    finally:
        for listener in made:
            listener.close()


@pytest.mark.parametrize("survivors", [[0, 1, 2, 3], [1, 3], [0, 2, 3], [3]])
def test_all_find_the_same_members(survivors):
    found = agree(listeners(), survivors)
    assert list(found.values()) == [survivors] * len(survivors)


def test_a_rank_that_did_not_answer_is_left_out():
    found = agree(listeners(), [1, 2, 3], unresponsive=[0], alive=[0])
    assert list(found.values()) == [[1, 2, 3]] * 3


def test_a_rank_that_lives_and_does_not_come():
    found = agree(listeners(), [0, 1, 2], alive=[3], patience=0.5)
    assert sorted(found) == [0, 1, 2]
    for error in found.values():
        assert isinstance(error, Timeout)
        assert "rank 3 did not take part" in str(error)


@pytest.mark.parametrize(
    ("island", "wins"),
    [([3], [0, 1, 2]), ([0], [1, 2, 3]), ([0, 1], [0, 1]), ([1, 2], [0, 3])],
)
def test_one_part_of_a_divided_network_goes_on(island, wins):
    """The part with more than half of the ranks goes on, or the half with the lowest rank."""
    found = agree(listeners(), list(range(SIZE)), unreachable=island)
    assert sorted(found) == list(range(SIZE))
    for rank, members in found.items():
        if rank in wins:
            assert members == wins
        else:
            assert "but may run" in str(members)


def test_a_pair_in_which_each_may_blame_the_other():
    """After a network was cut for a while, at most one of two ranks goes on."""
    found = agree(listeners(), [3], unresponsive=[0], alive=[0])
    assert "do not answer, but may run" in str(found[3])


@pytest.mark.parametrize("asks", [0, 1])
def test_who_asks_for_a_decision_waits_for_nobody_once_one_knows_it(asks):
    """Rank 2 comes only afterwards, so that the others cannot shrink the group before."""
    made, answered, met = listeners(), threading.Event(), threading.Barrier(3)
    made[3].close()
    made[1 - asks].decisions, made[1 - asks].outcome = 1, True

    def meet(rank):
        outcome = None
        if rank == asks:
            with Agreement(made[rank], rank, range(SIZE), [], [], 20.0) as agreement:
                outcome = agreement.outcome(1)
            answered.set()
        elif rank == 2:
            assert answered.wait(30)
        with Agreement(made[rank], rank, range(SIZE), [], [], 20.0) as agreement:
            members = agreement.members({"pid": rank})[1]
            met.wait(30)
            return outcome, members

    found = run(meet, [0, 1, 2])
    assert [outcome for outcome, _ in found.values()].count(True) == 1
    assert [members for _, members in found.values()] == [[0, 1, 2]] * 3
    for listener in made:
        listener.close()


def test_excluded_ranks_are_not_waited_for():
    found = agree(listeners(), [1, 2, 3], excluded=[0], alive=[0])
    assert list(found.values()) == [[1, 2, 3]] * 3


def test_many_connections_do_not_make_a_rank_unreachable():
    made = listeners()
    for _ in range(200):
        made[0].connect(1).close()
    found = agree(made, [0, 1])
    assert list(found.values()) == [[0, 1]] * 2


@pytest.mark.parametrize("late", [0, 2])
def test_an_excluded_rank_that_comes_late_learns_it_at_once(late):
    made, others = listeners(), sorted({*range(SIZE)} - {late})
    done = []

    def meet(rank):
        excluded = [] if rank == late else [late]
        with Agreement(made[rank], rank, range(SIZE), [], excluded, 10.0) as agreement:
            try:
                return agreement.members({"pid": rank})[1]
            finally:
                done.append(rank)  # the coordinator's Store lasts until all have reached it
                helpers.wait_until(lambda: len(done) >= len(others))

    try:
        assert list(run(meet, others).values()) == [others] * 3
        assert "without this rank" in str(run(meet, [late])[late])
    finally:
        for listener in made:
            listener.close()


def test_a_slow_name_server_keeps_nobody_from_a_store(monkeypatch):
    """Torch asks for hosts' names while it connects, and fails if that takes longer than a try."""
    tries = []

    class Slow:
        def __init__(self, _host, _port, _size, _serves, timeout):
            tries.append(timeout.total_seconds())
            time.sleep(0.7)
            if timeout.total_seconds() < 0.7:
                raise RuntimeError("timed out")

        def set_timeout(self, timeout):
            self.timeout = timeout

    monkeypatch.setattr(stores, "TCPStore", Slow)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = stores.reach(server.getsockname(), 20, lambda: False)
    assert found.timeout.total_seconds() == 20
    assert len(tries) == 2


def test_a_store_that_never_answers_is_given_up():
    """The Store of a stopped rank never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(RuntimeError, match="no St"),
    ):
        stores.reach(server.getsockname(), 1, lambda: False)


def test_no_try_to_reach_a_store_outlasts_the_timeout(monkeypatch):
    tries = []

    def fail(_host, _port, _size, _serves, timeout):
        tries.append(timeout.total_seconds())
        time.sleep(0.7)
        raise RuntimeError("timed out")

    monkeypatch.setattr(stores, "TCPStore", fail)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(RuntimeError, match="no St"),
    ):
        stores.reach(server.getsockname(), 1, lambda: False)
    assert max(tries) <= 0.5


@pytest.mark.parametrize("seconds", [0.0, 2.5, 3.9999999])
def test_receives_are_limited_to_any_time(seconds):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as connection:
            stores.limit_receives(address, seconds)
            limit = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    whole, micros = struct.unpack("ll", limit)
    assert seconds < whole + micros / 1e6 < seconds + 0.1


WITHOUT_DESCRIPTORS = """
import os, resource, sys, threading, time
from pycomm._runtime.sockets import Listener

listener, tries, heard, tried = Listener("127.0.0.1"), [], threading.Event(), threading.Event()
accept = listener.accept

def noting_accept():
    accept()
    if listener.lacks_descriptors:
        tries.append(time.monotonic())
        if len(tries) == 4:
            tried.set()

listener.accept = noting_accept
listener.watch(lambda alarm: heard.set())
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(listener.port, listener.token, flush=True)
assert tried.wait(60)
assert tries[3] - tries[0] > 0.25
assert not heard.is_set()
for descriptor in kept:
    os.close(descriptor)
assert heard.wait(60)
listener.close()
"""


def test_a_lookout_without_descriptors_tries_again_from_time_to_time():
    """It does not spin while connections wait that it cannot accept, and hears them later."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port, token = process.stdout.readline().split()
            with socket.create_connection(("127.0.0.1", int(port))) as connection:
                message = {"token": token, "failed": [1, 5, ""]}
                connection.sendall(json.dumps(message).encode() + b"\n")
                assert process.wait(120) == 0
        finally:
            process.kill()


@contextlib.contextmanager
def crowded(listener):
    """Many strangers have connected to it, say nothing, and stay."""
    with contextlib.ExitStack() as strangers:
        for _ in range(600):
            strangers.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        yield


def test_strangers_cost_few_descriptors():
    """Strangers keep no rank out, even a silent rank that only checks who lives: it reconnects."""
    made = listeners()
    looking, asking, late = (made[rank].connect(0) for rank in (2, 1, 3))
    helpers.wait_until(lambda: looking.established and asking.established and late.established)
    with crowded(made[0]):
        for _ in range(5):
            made[0].accept()
            assert 256 <= len(made[0].strangers) <= 256 + 2 * SIZE
            assert not looking.hears_end()

        def is_heard():
            if asking.established and not asking.spoken:
                asking.say({"token": made[0].token, "rank": 1})
            assert [asking.hears_end(), asking.unreachable] == [False] * 2
            made[0].accept()
            return 1 in map(made[0].rank_of, made[0].strangers)

        helpers.wait_until(is_heard)
        assert not looking.hears_end()
        assert late.say({})  # although it was dropped
        helpers.wait_until(lambda: not late.say({}))
        assert [late.spoken, late.ended, late.unreachable] == [False] * 3
    made[0].close()
    helpers.wait_until(looking.hears_end)
    for connection in (looking, asking, late, *made[1:]):
        connection.close()


def test_a_listener_may_be_closed_while_it_drops_strangers(monkeypatch):
    """By another thread or by a signal's handler, which aborts the group."""
    made = listeners()
    say = Connection.say

    def close_and_say(stranger, message):
        monkeypatch.undo()
        made[0].close()
        return say(stranger, message)

    with crowded(made[0]):
        monkeypatch.setattr(Connection, "say", close_and_say)
        made[0].accept()
        made[0].accept()
    assert made[0].closed
    assert made[0].strangers == []
    for listener in made[1:]:
        listener.close()


def test_survivors_agree_among_strangers():
    made = listeners()
    with crowded(made[0]), crowded(made[2]):
        assert list(agree(made, [0, 2]).values()) == [[0, 2]] * 2


def say(listener, *messages):
    """Says each message to the listener of rank 1 in a connection of its own; returns these."""
    host, port, token = listener.addresses[1]
    said = []
    for message in messages:
        said.append(socket.create_connection((host, port)))
        whole = {"token": token, **message} if isinstance(message, dict) else message
        said[-1].sendall(json.dumps(whole).encode() + b"\n")
    return said


NO_ALARMS = [
    "failed",
    [[]],
    {},
    {"token": "another", "failed": [0, 7, "here"]},
    {"failed": [0, 7, "the group before"]},
    {"failed": [0, 0, "here"]},
    {"failed": [0, 1 << 64, "here"]},
    {"failed": [0, True, "here"]},
    {"failed": [0, 7]},
    {"failed": None},
]


def test_a_listener_hears_that_others_give_up_the_group():
    """Once, from a rank of this group. A rank that has introduced itself is not lost by that."""
    made, told = listeners(), queue.SimpleQueue()
    listener = made[1]
    listener.enter(range(SIZE), "here")
    listener.watch(told.put)
    connected = say(listener, *NO_ALARMS)
    connected.pop().close()
    try:
        with pytest.raises(queue.Empty):
            told.get(timeout=0.2)
        connected += say(listener, {"rank": 2, "failed": [2, 7, "here"]})
        assert told.get(timeout=60) == Alarm(2, 7, "here")
        connected += say(listener, {"rank": 3, "failed": [3, 8, "here"]})
        listener.take_over()
        listener.accept()
        assert {2, 3} <= set(map(listener.rank_of, listener.strangers))
        assert told.empty()
    finally:
        for each in (*connected, *made):
            each.close()


def test_a_listener_that_is_dropped_ends_its_thread():
    (listener, *others), told = listeners(), queue.SimpleQueue()
    listener.watch(told.put)
    thread = listener._lookout._thread
    time.sleep(0.1)  # it waits by now
    del listener
    thread.join(60)
    assert not thread.is_alive()
    for other in others:
        other.close()


def test_a_forked_child_that_closes_a_listener_leaves_its_thread_to_the_parent():
    made, told = listeners(), queue.SimpleQueue()
    made[1].watch(told.put)
    lookout = made[1]._lookout
    pid = os.fork()
    if pid == 0:
        try:
            made[1].close()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not select.select([lookout._woken], [], [], 0)[0]
    connected = say(made[1], {"failed": [0, 7, ""]})
    assert told.get(timeout=60) == Alarm(0, 7, "")
    for each in (*connected, *made):
        each.close()


def test_ranks_that_do_not_come_are_told_that_the_group_has_failed(monkeypatch):
    monkeypatch.setattr(runtime_shrink, "_PATIENCE_FOR_ANSWERS", 0.0)
    made, told = listeners(), queue.SimpleQueue()
    for rank in (0, 3):
        made[rank].watch(told.put)
    made[1].close()

    def shrink(rank):
        with Agreement(made[rank], rank, range(SIZE), (), (), 0.5, word=7) as agreement:
            return agreement.members({})

    try:
        found = run(shrink, [2])  # rank 0 lives, so this one waits for it
        assert isinstance(found[2], Timeout)
        assert told.get(timeout=60) == Alarm(2, 7, "")
        assert told.empty()
        made[0].close()
        found = run(shrink, [2])
        assert isinstance(found[2], Timeout)
        assert told.get(timeout=60) == Alarm(2, 7, "")
    finally:
        for listener in made:
            listener.close()
