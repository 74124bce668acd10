"""send and recv of torch.distributed on pycomm."""

import logging.handlers
import os
import signal
import time

import backends
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm


def ring(rank, size, dtype):
    """Every rank sends to the next rank and receives from the rank before, large and small."""
    results = []
    for count in (0, 1, 1000, 3_000_000):
        x = torch.full((count,), rank + 1).to(dtype)
        y = torch.zeros_like(x)
        operations = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, y, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        expected = torch.full((count,), (rank - 1) % size + 1).to(dtype)
        results.append(torch.equal(y.float(), expected.float()) and len(y) == count)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.float8_e5m2])
def test_crossing_messages(dtype):
    assert backends.run(3, ring, dtype) == [[True] * 4] * 3


def tags(rank, _size):
    if rank == 0:
        for tag in range(5):
            dist.send(torch.tensor([tag]), 1, tag=tag)
        return None
    got = []
    for tag in (3, 0, 4, 1, 2):
        x = torch.zeros(1, dtype=torch.int64)
        dist.recv(x, 0, tag=tag)
        got.append(x.item())
    return got


def test_tags_out_of_order():
    assert backends.run(2, tags)[1] == [3, 0, 4, 1, 2]


def any_source(rank, size):
    if rank != 0:
        dist.send(torch.full((5,), float(rank)), 0)
        return None
    seen = []
    for _ in range(size - 1):
        x = torch.zeros(5)
        source = dist.recv(x)
        seen.append((source, x[0].item()))
    return sorted(seen)


def test_any_source():
    assert backends.run(4, any_source)[0] == [(r, float(r)) for r in (1, 2, 3)]


def one_leaves(rank, _size):
    """Rank 1 has sent its message and ended, while rank 2 takes its time."""
    if rank == 0:
        return sorted(dist.recv(torch.zeros(5)) for _ in range(2))
    if rank == 2:
        time.sleep(1)
    dist.send(torch.zeros(5), 0)
    return None


def test_any_source_after_a_sender_has_left():
    assert backends.run(3, one_leaves)[0] == [1, 2]


def strided(rank, _size):
    x = torch.arange(20.0).view(4, 5)
    if rank == 0:
        dist.send(x.t(), 1)
        work = dist.isend(x[:, ::2], 1)
        work.wait()
        return None
    y = torch.zeros(4, 5)
    dist.recv(y.t(), 0)
    z = torch.zeros(4, 6)
    future = dist.irecv(z[:, ::2], 0).get_future()
    future.wait()
    return torch.equal(x, y), torch.equal(z[:, ::2], x[:, ::2]), z[:, 1::2].sum().item()


def test_strided_tensors():
    assert backends.run(2, strided)[1] == (True, True, 0.0)


def to_rank(_rank, _size, peer):
    errors = []
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError) as error:
            call(torch.ones(3), peer)
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("peer", [2, -1])
def test_there_is_no_such_rank(peer):
    expected = [f"{name} must be a rank from 0 to 1, got {peer}" for name in ("dst", "src")]
    assert backends.run(2, to_rank, peer) == [expected] * 2


def subgroups(rank, _size):
    """Two of three ranks use their group first; a message comes before any collective."""
    group = dist.new_group([0, 2])
    x = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(x, 2, group=group)
    elif rank == 2:
        dist.recv(x, 0, group=group)
    return x.item()


def test_subgroups():
    assert backends.run(3, subgroups) == [0.0, 1.0, 0.0]


def mismatched(rank, _size):
    try:
        if rank == 0:
            dist.send(torch.zeros(100_000), 1)
        else:
            dist.recv(torch.zeros(7), 0)
    except pycomm.Mismatch as error:
        return str(error)
    return None


def test_sizes_that_differ():
    for text in backends.run(2, mismatched):
        assert "100000 float32" in text
        assert "7 float32" in text


def dies(rank, _size, when):
    dist.barrier()
    if rank == 1:
        if when == "after a send":
            dist.send(torch.ones(3), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.zeros(3 if when == "after a send" else 1_000_000)
    start = time.monotonic()
    try:
        dist.recv(x, 1)
        if when == "after a send":
            assert x.sum() == 3
            dist.recv(x, 1)
    except pycomm.PeerDied as error:
        return error.rank, time.monotonic() - start
    return None


@pytest.mark.parametrize("when", ["before a send", "after a send"])
def test_a_rank_that_dies(when):
    with backends.ranks(2, dies, when) as ranks:
        (outcome,) = ranks.wait_for([0])
        assert outcome.value is not None, outcome.trace
        assert outcome.value[0] == 1
        assert outcome.value[1] < 10


def silent(rank, _size):
    dist.barrier()
    if rank == 0:
        time.sleep(2)
        return None
    try:
        dist.recv(torch.zeros(4), 0)
    except pycomm.Timeout as error:
        return error.rank
    return None


def test_a_rank_that_is_silent():
    assert backends.run(2, silent, seconds=0.7)[1] == 0


def collectives_between(rank, size):
    """Messages under way do not disturb collectives."""
    y = torch.zeros(500_000)
    receive = dist.irecv(y, (rank - 1) % size, tag=7)
    total = 0
    for _ in range(20):
        x = torch.ones(1000)
        dist.all_reduce(x)
        total += x[0].item()
    send = dist.isend(torch.full((500_000,), float(rank)), (rank + 1) % size, tag=7)
    dist.barrier()
    send.wait()
    receive.wait()
    return total, bool((y == (rank - 1) % size).all())


def test_messages_among_collectives():
    assert backends.run(3, collectives_between) == [(60.0, True)] * 3


def synchronize(rank, size):
    """torch calls Work.synchronize() with the GIL, which operations between nodes need."""
    x, y, cpu = torch.ones(4), torch.full((4,), float(rank)), torch.device("cpu")
    dist.all_reduce(x, async_op=True).synchronize()
    assert (x == size).all()
    dist.group.WORLD._start_coalescing(cpu)
    dist.broadcast(y, 1, async_op=True)
    dist.group.WORLD._end_coalescing(cpu).synchronize()
    assert (y == 1).all()


def pretending(rank, size, store, nodes):
    """Between nodes, only sparse tensors go over Gloo."""
    spanning.pretend(nodes[rank])
    logged = logging.handlers.MemoryHandler(1000)
    logging.getLogger("pycomm").addHandler(logged)
    backends.join(rank, size, store)
    x, y = torch.full((4,), float(rank)), torch.zeros(4)
    request = dist.isend(x, (rank + 1) % size, tag=3)
    assert dist.recv(y, tag=3) == (rank - 1) % size
    request.wait()
    assert (y == (rank - 1) % size).all()
    parts = [torch.zeros(n + 1) for n in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert all((part == n).all() for n, part in enumerate(parts))
    mine = torch.zeros(rank + 1)
    dist.reduce_scatter(mine, [torch.full((n + 1,), float(rank)) for n in range(size)])
    assert (mine == sum(range(size))).all()
    out = torch.zeros(size)
    dist.all_to_all_single(out, torch.arange(size) * 10.0 + rank)
    assert out.tolist() == [10.0 * rank + n for n in range(size)]
    tokens = torch.zeros(sum(n + 1 for n in range(size)))
    given, expected = [rank + 1] * size, [n + 1 for n in range(size)]
    dist.all_to_all_single(tokens, torch.full((sum(given),), float(rank)), expected, given)
    assert tokens.tolist() == [float(n) for n in range(size) for _ in range(n + 1)]
    root = size - 1
    gathered = [torch.zeros(4) for _ in range(size)] if rank == root else None
    dist.gather(x, gathered, root)
    assert gathered is None or all((part == n).all() for n, part in enumerate(gathered))
    dist.scatter(y, None if rank != root else [x + n for n in range(size)], root)
    assert (y == root + rank).all()
    dist.reduce(x, root)
    assert rank != root or (x == sum(range(size))).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": n} for n in range(size)]
    synchronize(rank, size)
    told = [record.getMessage() for record in logged.buffer if "goes over Gloo" in record.msg]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("nodes", ["ab", "aba"])
def test_groups_that_span_nodes(nodes):
    assert helpers.run_ranks(len(nodes), pretending, nodes) == [[]] * len(nodes)
