"""Sends and receives that fail: all ranks raise, and name the same culprit."""

import os
import signal
import threading
import time

import helpers
import pytest
import torch

import pycomm

SMALL, LARGE = 100, 1_000_000


def outcome(call):
    """The type and the fields of the error that `call` raises, and the seconds it took."""
    start = time.monotonic()
    with pytest.raises(pycomm.CollectiveError) as caught:
        call()
    error = caught.value
    return {
        "error": caught.type.__name__,
        "rank": error.rank,
        "operation": error.operation,
        "text": str(error),
        "took": time.monotonic() - start,
    }


def wait_for_a_victim(rank, size, store, phase, in_window):
    """Rank 1 is the victim. Rank 2 is not involved, and only sees that the group has failed."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=60 if phase != "stopped" else 1)
    make = group.empty if in_window else torch.zeros
    x = make(LARGE)
    pycomm.send(torch.ones(SMALL), (rank + 1) % size, tag=1, group=group)
    pycomm.recv(torch.ones(SMALL), tag=1, group=group)
    pycomm.barrier(group=group)
    time.sleep(0.3)  # until every rank has left the barrier, which could fail, too
    if rank == 1:
        if phase == "closed":
            group.close()
            return None
        if phase == "announced":  # its peer has accepted the message, or reads it
            pycomm.isend(x, 0, group=group)
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGSTOP if phase == "stopped" else signal.SIGKILL)
    if rank == 2:
        return outcome(lambda: pycomm.barrier(group=group))
    if phase == "sending":
        return outcome(lambda: pycomm.send(x, 1, group=group))
    calls = {"closed": lambda: pycomm.recv(x, 1, group=group)}
    receive = calls.get(phase, lambda: [pycomm.recv(x, 1, group=group) for _ in range(3)])
    return outcome(receive)


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("phase", ["killed", "announced", "sending", "closed", "stopped"])
def test_a_victim(phase, in_window):
    with helpers.Ranks(3, wait_for_a_victim, phase, in_window) as ranks:
        outcomes = ranks.wait_for([0, 2])
    for found in outcomes:
        assert found.error is None, found.trace
        expected = "Timeout" if phase == "stopped" else "PeerDied"
        assert (found.value["error"], found.value["rank"]) == (expected, 1), found.value
        assert found.value["took"] < (8 if phase == "stopped" else 4)
    assert outcomes[0].value["operation"] == ("send" if phase == "sending" else "recv")
    assert outcomes[1].value["operation"] == "barrier"


def wait_for_one_that_stops(rank, size, store):
    """Rank 1 stops while it waits for rank 0, which then sends."""
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=60)
    x = torch.zeros(LARGE)
    pycomm.barrier(group=group)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        pycomm.recv(x, 0, group=group)
    if rank == 0:
        time.sleep(1)
        return outcome(lambda: pycomm.send(x, 1, group=group))
    return outcome(lambda: pycomm.recv(x, 0, group=group, timeout=2 if rank == 2 else 60))


def test_a_rank_that_stops_while_it_waits():
    with helpers.Ranks(4, wait_for_one_that_stops) as ranks:
        for found in ranks.wait_for([0, 2, 3]):
            assert found.error is None, found.trace
            assert (found.value["error"], found.value["rank"]) == ("Timeout", 1), found.value


def test_ranks_that_wait_for_each_other(world):
    def body(group):
        if group.rank == 2:
            return outcome(lambda: pycomm.recv(torch.zeros(1), 0, group=group))
        other, timeout = 1 - group.rank, 0.5 if group.rank == 0 else 60
        return outcome(lambda: pycomm.recv(torch.zeros(1), other, group=group, timeout=timeout))

    for found in world(3).run(body):
        assert (found["error"], found["rank"]) == ("Timeout", 1)
        assert "rank 0 waited" in found["text"]
        assert "any rank" not in found["text"]


def sent_before_death(rank, size, store):
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    if rank == 1:
        for i in range(5):
            pycomm.send(torch.full((SMALL,), i), 0, tag=i, group=group)
        os.kill(os.getpid(), signal.SIGKILL)
    got = torch.empty(SMALL, dtype=torch.int64)
    time.sleep(0.3)
    for i in (3, 1, 0, 2, 4):
        assert pycomm.recv(got, tag=i, group=group) == 1
        assert (got == i).all()
    return outcome(lambda: pycomm.recv(got, group=group))


def test_what_was_sent_before_death_is_received():
    with helpers.Ranks(2, sent_before_death) as ranks:
        (found,) = ranks.wait_for([0])
    assert found.error is None, found.trace
    assert (found.value["error"], found.value["rank"]) == ("PeerDied", 1)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_mismatch_names_both_sides(world, count):
    def body(group):
        if group.rank == 0:
            pycomm.send(torch.zeros(count), 1, tag=7, group=group)
            return outcome(lambda: pycomm.recv(torch.zeros(1), 1, group=group))
        return outcome(lambda: pycomm.recv(torch.zeros(2 * count).half(), 0, tag=7, group=group))

    def large(group):
        if group.rank == 0:
            return outcome(lambda: pycomm.send(torch.zeros(count), 1, tag=7, group=group))
        return body(group)

    for found in world(2).run(body if count == SMALL else large):
        both = f"rank 0 sent {count} float32, rank 1 receives {2 * count} float16, tag 7"
        assert found["error"] == "Mismatch"
        assert found["rank"] == 0
        assert found["text"].startswith(both)


def test_timeouts(world):
    groups = world(2, timeout=60).groups
    x = torch.zeros(LARGE)
    found = outcome(lambda: pycomm.recv(x, 1, group=groups[0], timeout=0.2))
    assert (found["error"], found["rank"], found["operation"]) == ("Timeout", 1, "recv")
    assert found["took"] < 5
    groups = world(2, timeout=0.3).groups
    assert outcome(lambda: pycomm.send(x, 1, group=groups[0]))["error"] == "Timeout"
    groups = world(2, timeout=0.3).groups
    found = outcome(lambda: pycomm.recv(x, group=groups[0]))
    assert "for a message from any rank" in found["text"]
    groups = world(2, timeout=0.3).groups
    found = outcome(lambda: pycomm.recv(x, 1, group=groups[1]))
    assert "rank 1 waited 0.3 s for a message from itself during recv(" in found["text"]
    found = outcome(lambda: pycomm.barrier(group=groups[0]))  # as other ranks are told
    assert "rank 1 waited 0.3 s for a message from itself" in found["text"]


def test_an_asynchronous_receive_has_its_own_timeout(world):
    group = world(2).groups[0]
    request = pycomm.irecv(torch.zeros(4), 1, group=group, timeout=0.2)
    helpers.wait_until(request.is_completed)
    with pytest.raises(pycomm.Timeout):
        request.wait()
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.send(torch.zeros(4), 1, group=group)


def test_ctrl_c_is_an_abort_elsewhere(world):
    groups, found = world(2).groups, []

    def wait_in_vain():
        found.append(outcome(lambda: pycomm.recv(torch.zeros(4), 0, group=groups[1])))

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pycomm.recv(torch.zeros(4), 1, group=groups[0])
    thread.join()
    timer.join()
    assert (found[0]["error"], found[0]["rank"]) == ("Aborted", 0)


def test_a_returned_rank_sends_nothing_more(world):
    def body(group):
        if group.rank == 0:
            return outcome(lambda: pycomm.recv(torch.zeros(4), 1, group=group))
        return None

    found = world(2).run(body)[0]
    assert (found["error"], found["rank"]) == ("PeerDied", 1)


def test_close_waits_for_pending_operations(world):
    groups = world(2).groups
    x, y = torch.ones(LARGE), torch.zeros(LARGE)
    sent = pycomm.isend(x, 1, group=groups[0])
    closing = threading.Thread(target=groups[0].close)
    closing.start()
    pycomm.recv(y, 0, group=groups[1])
    closing.join()
    sent.wait()
    assert torch.equal(x, y)
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.send(x, 1, group=groups[0])


def test_a_forked_child_is_refused(world):
    group = world(2).groups[0]
    request = pycomm.irecv(torch.zeros(4), 1, group=group)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (
            request.wait,
            lambda: pycomm.recv(torch.zeros(4), 1, group=group),
            lambda: pycomm.isend(torch.zeros(4), 1, group=group),
        ):
            try:
                call()
            except pycomm.GroupUnusable as error:
                refused += "forked process" in str(error)
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pycomm.send(torch.ones(4), 0, group=world(1).groups[0])
    group.abort()
    with pytest.raises(pycomm.Aborted):
        request.wait()


def collectives_and_messages(group):
    """From two threads of each rank."""
    failures = []

    def messages():
        x = torch.empty(20_000)
        try:
            for i in range(200):
                if (group.rank + i) % 2 == 0:
                    pycomm.send(torch.full((20_000,), float(i)), 1 - group.rank, group=group)
                else:
                    pycomm.recv(x, 1 - group.rank, group=group)
                    assert (x == i).all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=messages)
    thread.start()
    for _ in range(200):
        assert pycomm.all_reduce(torch.ones(5000), group=group)[-1] == 2
    thread.join()
    assert not failures


def test_beside_collectives():
    helpers.run_group(2, collectives_and_messages)
