"""Sends and receives between nodes: the programs that users write, and how they fail."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import helpers
import pytest
import spanning
import torch
import usage

import pycomm
from pycomm._runtime.sockets import open_sockets

SIZES = [0, 1, 1000, 4096, 4097, 300_000, 2_000_000]  # fp32; 4096 is the largest eager message


def content(source: int, number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * source + number


def pass_around(group: pycomm.Group) -> None:
    """A ring over all ranks, so that messages go within nodes and between them."""
    n, r = group.size, group.rank
    for number, size in enumerate(SIZES):
        request = pycomm.isend(content(r, number, size), (r + 1) % n, group=group)
        got = torch.full((size,), -1.0)
        source = (r - 1) % n if number % 2 else None
        assert pycomm.recv(got, source, group=group) == (r - 1) % n
        request.wait()
        assert torch.equal(got, content((r - 1) % n, number, size))
    pycomm.barrier(group=group)


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1], "abab", "abca"])
def test_a_ring(nodes):
    spanning.run(nodes, pass_around, timeout=30)


def exchange_in_any_order(group: pycomm.Group, seed: int) -> None:
    """All pairs exchange messages with several tags; each rank posts its own in a random order."""
    common, own = random.Random(seed), random.Random(1000 * seed + group.rank)
    messages = [
        (source, to, common.randrange(3), common.choice(SIZES[:-1]), number)
        for number, (source, to) in enumerate(
            (s, t) for s in range(group.size) for t in range(group.size) for _ in range(5)
        )
    ]
    queues: dict[object, list] = {}
    for message in messages:
        source, to, tag, _, _ = message
        if source == group.rank:
            queues.setdefault(("send", to, tag), []).append(message)
        if to == group.rank:
            queues.setdefault(("recv", source, tag), []).append(message)
    requests, received = [], []
    while queues:
        key = own.choice(list(queues))
        source, to, tag, size, number = queues[key].pop(0)
        if not queues[key]:
            del queues[key]
        if key[0] == "send":
            tensor = content(source, number, size)
            requests.append(pycomm.isend(tensor, to, tag=tag, group=group))
        else:
            tensor = torch.full((size,), -1.0)
            requests.append(pycomm.irecv(tensor, source, tag=tag, group=group))
            received.append((tensor, content(source, number, size)))
    own.shuffle(requests)
    for request in requests:
        request.wait()
    for got, wanted in received:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_any_order(world, seed):
    world(5, nodes=(2, 2, 1)).run(exchange_in_any_order, seed)


def serve(group: pycomm.Group, rounds: int) -> None:
    """A parameter server: rank 0 takes gradients from whoever comes, and answers."""
    if group.rank != 0:
        for number in range(rounds):
            pycomm.send(content(group.rank, number, 20_000), 0, tag=1, group=group)
            weights = torch.empty(20_000)
            pycomm.recv(weights, 0, tag=2, group=group)
            assert torch.equal(weights, content(group.rank, number, 20_000) * 2)
        return
    seen = dict.fromkeys(range(1, group.size), 0)
    for _ in range(rounds * (group.size - 1)):
        gradient = torch.empty(20_000)
        source = pycomm.recv(gradient, tag=1, group=group)
        assert torch.equal(gradient, content(source, seen[source], 20_000)), "in order"
        seen[source] += 1
        pycomm.send(gradient * 2, source, tag=2, group=group)
    assert set(seen.values()) == {rounds}


def test_a_parameter_server():
    """Workers leave when they are done, and the server still waits for the others."""
    spanning.run([2, 2, 1], serve, 20, timeout=30)


def pipeline(group: pycomm.Group, batches: int) -> torch.Tensor | None:
    """Activations go from stage to stage; bf16, not contiguous, in the window of a rank."""
    result = []
    for number in range(batches):
        x = torch.full((64, 300), float(number), dtype=torch.bfloat16)
        if group.rank > 0:
            x = group.empty(300, 64, dtype=torch.bfloat16).t()
            pycomm.recv(x, group.rank - 1, group=group)
        x = x + group.rank
        if group.rank < group.size - 1:
            pycomm.send(x.t().contiguous().t(), group.rank + 1, group=group)
        else:
            result.append(x)
    return torch.stack(result) if result else None


def test_a_pipeline():
    results = spanning.run([1, 2], pipeline, 8, timeout=30)
    wanted = torch.arange(8).add(3).to(torch.bfloat16)[:, None, None].expand(8, 64, 300)
    assert torch.equal(results[2], wanted)


def flood(group: pycomm.Group, begun: Path) -> int:
    """Sends more than all buffers hold, while the receiver computes."""
    count, x = 3000, torch.zeros(4096)
    if group.rank == 0:
        requests = []
        for number in range(count):
            requests.append(pycomm.isend(x + number, 1, group=group))
        begun.touch()
        for request in requests:
            request.wait()
        return sum(x.numel() * 4 for _ in requests)
    helpers.wait_until(begun.exists)
    time.sleep(1)  # a computation; longer than the kernel waits between its probes
    assert group._core.idle()
    for number in range(count):
        pycomm.recv(x, 0, group=group)
        assert x[0] == x[-1] == number
    return 0


def test_more_messages_than_buffers(tmp_path):
    spanning.run([1, 1], flood, tmp_path / "begun", timeout=30)


def send_many(group: pycomm.Group, sent: threading.Event) -> None:
    """The last message ends in the middle of one read of the receiver, and nothing follows it."""
    for count in range(980, 1000, 4):  # about 1 MiB
        messages = torch.arange(count, dtype=torch.int32).repeat_interleave(250).view(count, 250)
        if group.rank == 0:
            requests = [pycomm.isend(message, 1, group=group) for message in messages]
            sent.set()
            for request in requests:
                request.wait()
            pycomm.recv(torch.zeros(1), 1, group=group)
            continue
        sent.wait()
        sent.clear()
        got = torch.empty(250, dtype=torch.int32)
        for message in messages:
            pycomm.recv(got, 0, group=group)
            assert torch.equal(got, message)
        pycomm.send(torch.zeros(1), 0, group=group)


def test_messages_that_have_arrived(world):
    world(2, nodes=(1, 1), timeout=5).run(send_many, threading.Event())


def failure(call) -> dict[str, object]:
    begin = time.monotonic()
    with pytest.raises(pycomm.CollectiveError) as caught:
        call()
    error, took = caught.value, time.monotonic() - begin
    return {
        "error": caught.type, "rank": error.rank, "operation": error.operation,
        "text": str(error), "took": took,
    }  # fmt: skip


def disagree(group: pycomm.Group, size: int, dtype: torch.dtype) -> dict[str, object]:
    x = torch.zeros(size)
    if group.rank == 0:
        return failure(lambda: pycomm.recv(torch.zeros(size, dtype=dtype)[:-1], 2, group=group))
    if group.rank == 2:
        pycomm.isend(x, 0, group=group)
    return failure(lambda: pycomm.recv(x, 0, tag=5, group=group))


@pytest.mark.parametrize(("size", "dtype"), [(10, torch.float32), (500_000, torch.float64)])
def test_messages_that_do_not_match(size, dtype):
    outcomes = spanning.run([2, 1], disagree, size, dtype, timeout=30)
    for outcome in outcomes:
        assert (outcome["error"], outcome["rank"]) == (pycomm.Mismatch, 2), outcome
    assert f"rank 2 sent {size} float32, rank 0 receives {size - 1} " in outcomes[0]["text"]
    assert f"rank 2 sent {size} float32" in outcomes[1]["text"], "rank 1 is on the same node"
    assert "another size or dtype than rank 0 expects" in outcomes[2]["text"]


def lose_a_rank(group: pycomm.Group, victim: int, phase: str, count: int) -> object:
    """`victim` is killed, and the others wait for it; then they go on without it."""
    x, rest = torch.zeros(count), torch.zeros(10)
    pass_around(group)
    if group.rank == victim:
        if phase == "sending":
            pycomm.isend(x, 0, group=group)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank != 0:
        outcome = failure(lambda: pycomm.recv(rest, 0, tag=9, group=group))
    elif phase == "receiving":
        outcome = failure(lambda: [pycomm.send(x, victim, group=group) for _ in range(2)])
    elif phase == "any source":
        outcome = failure(lambda: pycomm.recv(rest, tag=9, group=group))
    else:
        outcome = failure(lambda: [pycomm.recv(x, victim, group=group) for _ in range(2)])
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.send(rest, (group.rank + 1) % group.size, group=group)
    smaller = group.shrink()
    with smaller:
        pass_around(smaller)
    return outcome


@pytest.mark.parametrize("phase", ["silent", "sending", "receiving", "any source"])
@pytest.mark.parametrize("victim", [2, 3])
def test_a_rank_dies(phase, victim):
    """Rank 2 carries a stripe, rank 3 does not; the smaller group exchanges messages again."""
    with spanning.ranks([2, 2], lose_a_rank, victim, phase, 3_000_000, timeout=60) as ranks:
        outcomes = ranks.wait_for([0, 1, 5 - victim])
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        found = outcome.value
        assert (found["error"], found["rank"]) == (pycomm.PeerDied, victim), found
        assert found["took"] < 10, found


def wait_in_vain(group: pycomm.Group, source: int | None, timeout: float | None) -> object:
    x = torch.zeros(10)
    if group.rank == 0:
        return failure(lambda: pycomm.recv(x, source, group=group, timeout=timeout))
    return failure(lambda: pycomm.recv(x, 0, group=group, timeout=60))


@pytest.mark.parametrize(("source", "timeout"), [(2, None), (2, 0.5), (None, None)])
def test_timeouts(source, timeout):
    outcomes = spanning.run([2, 1], wait_in_vain, source, timeout, timeout=1.5)
    for outcome in outcomes:
        blamed = 0 if source is None else source
        assert (outcome["error"], outcome["rank"]) == (pycomm.Timeout, blamed), outcome
    assert outcomes[0]["took"] < 5


def leave(group: pycomm.Group, before: bool) -> object:
    """Rank 2 closes its group; what it has sent arrives, and nobody waits for more from it."""
    x = torch.ones(4000)
    if group.rank == 2:
        for _ in range(100):
            pycomm.send(x, 0, group=group)
        group.close()
        with pytest.raises(pycomm.GroupUnusable):
            pycomm.send(x, 0, group=group)
        return None
    if group.rank == 1:
        return None if before else failure(lambda: pycomm.recv(x, 0, tag=1, group=group))
    if before:
        time.sleep(0.5)
    for _ in range(100):
        assert pycomm.recv(x.zero_(), group=group) == 2
        assert (x == 1).all()
    return failure(lambda: pycomm.recv(x, None if before else 2, group=group))


def leave_without_descriptors(group: pycomm.Group) -> object:
    x = torch.ones(10)
    if group.rank == 0:
        return failure(lambda: pycomm.recv(x, 1, group=group))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        group.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return None


def test_a_rank_leaves_without_descriptors():
    """Without free descriptors, and if it has never sent anything, a rank says that it leaves."""
    outcome, _ = spanning.run([1, 1], leave_without_descriptors, timeout=30)
    assert (outcome["error"], outcome["rank"]) == (pycomm.PeerDied, 1)


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_leaves(before):
    """If `before`, it leaves before anybody receives, so that a receive has no source any more."""
    first, second, _ = spanning.run([2, 1], leave, before, timeout=30)
    assert first["error"] is pycomm.PeerDied
    if not before:
        assert first["rank"] == second["rank"] == 2


def visit(group: pycomm.Group) -> None:
    """Strangers on the port: silent ones, and some that talk nonsense."""
    pycomm.barrier(group=group)
    if group.rank == 0:
        host, port = group._port.address[:2]
        strangers = [socket.create_connection((host, port)) for _ in range(400)]
        for stranger in strangers[::2]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        pass_around(group)
        for stranger in strangers:
            stranger.close()
    else:
        pass_around(group)


def return_early(group: pycomm.Group) -> object:
    x = torch.ones(10)
    if group.rank == 1:
        pycomm.send(x, 0, group=group)
        return None
    pycomm.recv(x.zero_(), 1, group=group)
    assert (x == 1).all()
    return failure(lambda: pycomm.recv(x, 1, group=group))


def test_a_rank_returns(world):
    """What it has sent arrives; a wait for more from it ends, although its group is open."""
    outcome, _ = world(2, nodes=(1, 1)).run(return_early)
    assert (outcome["error"], outcome["rank"]) == (pycomm.PeerDied, 1)
    assert "has returned from its function" in outcome["text"]


def interrupt(group: pycomm.Group) -> object:
    """Ctrl-C in a receive between nodes; the others learn of it."""
    x = torch.ones(1_000_000)
    if group.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pycomm.recv(x, 1, group=group)
        return None
    return failure(lambda: pycomm.recv(x, 0, group=group))


def test_ctrl_c():
    _, outcome = spanning.run([1, 1], interrupt, timeout=30)
    assert (outcome["error"], outcome["rank"]) == (pycomm.Aborted, 0), outcome


def test_strangers():
    spanning.run([1, 1], visit, timeout=30)


def opened_since(before: Sequence[int]) -> int:
    """The TCP connection that this rank has opened; meanwhile it may have accepted others.

    An accepted connection has the port of the socket that listens.
    """
    listening, made = set(), {}
    for number in open_sockets():
        with socket.socket(fileno=os.dup(number)) as same:
            if same.family == socket.AF_UNIX:
                continue
            port = same.getsockname()[1]
            if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(port)
            elif number not in before:
                made[number] = port
    (opened,) = (number for number, port in made.items() if port not in listening)
    return opened


def damage(group: pycomm.Group, words: bytes) -> object:
    """Rank 1 sends rank 0 bytes that are no frame, on a connection that it has opened."""
    x = torch.zeros(10)
    pycomm.barrier(group=group)
    if group.rank == 1:
        before = open_sockets()
        pycomm.send(x, 0, group=group)
        connection = opened_since(before)
        os.write(connection, words)
        return failure(lambda: pycomm.recv(x, 0, group=group))
    pycomm.recv(x, 1, group=group)
    return failure(lambda: pycomm.recv(x, 1, group=group))


@pytest.mark.parametrize("words", [b"\xff" * 64, b"\0" * 64, b"\0\0\0\0\2" + b"\0" * 59])
def test_bytes_that_are_no_frame(words):
    for outcome in spanning.run([1, 1], damage, words, timeout=30):
        assert (outcome["error"], outcome["rank"]) == (pycomm.ProtocolError, 1), outcome


def damage_a_large_message(group: pycomm.Group) -> object:
    """Rank 0 has the announcement, and finds the damage when it accepts the message, or before."""
    x, large = torch.zeros(10), torch.zeros(100_000)
    pycomm.barrier(group=group)
    if group.rank == 1:
        before = open_sockets()
        request = pycomm.isend(large, 0, tag=5, group=group)
        pycomm.send(x, 0, group=group)
        connection = opened_since(before)
        pycomm.barrier(group=group)
        os.write(connection, b"\xff" * 64)
        return failure(lambda: (pycomm.barrier(group=group), request.wait()))
    pycomm.recv(x, 1, group=group)
    pycomm.barrier(group=group)

    def accept() -> None:
        pycomm.barrier(group=group)  # in which it may look at the connection
        pycomm.recv(large, 1, tag=5, group=group)

    return failure(accept)


def test_bytes_that_are_no_frame_after_an_announcement():
    for outcome in spanning.run([1, 1], damage_a_large_message, timeout=30):
        assert (outcome["error"], outcome["rank"]) == (pycomm.ProtocolError, 1), outcome


def lose_a_connection(group: pycomm.Group) -> object:
    """As if rank 1's host were lost: one of the two connections ends."""
    x = torch.zeros(10)
    pycomm.barrier(group=group)
    if group.rank == 1:
        before = open_sockets()
        pycomm.send(x, 0, group=group)
        connection = opened_since(before)
        with socket.socket(fileno=os.dup(connection)) as same:
            same.shutdown(socket.SHUT_RDWR)
        return failure(lambda: pycomm.barrier(group=group))
    pycomm.recv(x, 1, group=group)
    return failure(lambda: pycomm.recv(x, 1, group=group))


def test_one_of_two_connections_ends():
    for outcome in spanning.run([1, 1], lose_a_connection, timeout=30):
        assert (outcome["error"], outcome["rank"]) == (pycomm.PeerDied, 1), outcome


def fork_in_between(group: pycomm.Group) -> int:
    """A child outlives its parent, which the others must notice."""
    x = torch.zeros(10)
    pass_around(group)
    if group.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: pycomm.recv(x, 1, group=group))


def test_a_child_outlives_a_rank():
    with spanning.ranks([1, 1], fork_in_between, timeout=60) as ranks:
        (outcome,) = ranks.wait_for([0])
    assert outcome.error is None, outcome.trace
    assert (outcome.value["error"], outcome.value["rank"]) == (pycomm.PeerDied, 1)


def test_costs_nothing_without_messages(world):
    """No thread and no connection before the first message between nodes; none for a small one."""
    group, other = world(2, nodes=(1, 1)).groups
    gc.collect()  # what an earlier test has left must not go in between
    before = usage.descriptors(), usage.threads()
    pycomm.send(torch.ones(8), 0, group=group)  # to itself
    assert usage.descriptors() == before[0]
    pycomm.send(torch.ones(8), 1, group=group)
    assert pycomm.recv(x := torch.zeros(8), 0, group=other) == 0
    assert (x == 1).all()
    assert usage.threads() == before[1]
