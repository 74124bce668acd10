"""Sends and receives between threads and between processes."""

import helpers
import pytest
import torch
from usage import threads

import pycomm

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]
SIZES = [0, 1, 100, 4096, 4097, 100_000, 1_000_000]


def pattern(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def exchange(group, sizes, dtypes):
    peer = 1 - group.rank
    for number, (count, dtype) in enumerate((n, d) for n in sizes for d in dtypes):
        mine, theirs = (pattern(count, dtype, 2 * number + r) for r in (group.rank, peer))
        got = torch.empty_like(theirs)
        if group.rank == 0:
            pycomm.send(mine, peer, group=group)
            assert pycomm.recv(got, peer, group=group) == peer
        else:
            assert pycomm.recv(got, group=group) == peer
            pycomm.send(mine, peer, group=group)
        assert same(got, theirs)


def test_dtypes_and_sizes_between_threads(world):
    world(2).run(exchange, SIZES, DTYPES)


def test_between_processes():
    helpers.run_group(2, exchange, SIZES, [torch.float32, torch.int8])


def cross(group, count):
    """All ranks send to all, also to themselves, before anyone receives."""
    sent = [torch.full((count,), 10 * group.rank + r) for r in range(group.size)]
    got = [torch.empty_like(sent[0]) for _ in range(group.size)]
    requests = [pycomm.isend(x, r, tag=5, group=group) for r, x in enumerate(sent)]
    requests += [pycomm.irecv(x, r, tag=5, group=group) for r, x in enumerate(got)]
    for request in requests:
        request.wait()
        assert request.is_completed()
    for r, x in enumerate(got):
        assert (x == 10 * r + group.rank).all()
        assert requests[group.size + r].source == r


@pytest.mark.parametrize("count", [10, 4_000_000])
def test_crossing_between_processes(count):
    helpers.run_group(3, cross, count)


def small_sends_cross(group):
    """All ranks send before they receive; with Gloo such sends wait for each other."""
    x, y = torch.full((1000,), group.rank), torch.empty(1000, dtype=torch.int64)
    pycomm.send(x, 1 - group.rank, group=group)
    pycomm.recv(y, 1 - group.rank, group=group)
    assert (y == 1 - group.rank).all()


def test_small_blocking_sends_cross(world):
    world(2).run(small_sends_cross)


def window_tensors(group):
    peer = 1 - group.rank
    for mine_in_window in (False, True):
        for theirs_in_window in (False, True):
            for r in (0, 1):
                in_window = mine_in_window if group.rank == r else theirs_in_window
                x = group.empty(300_000) if in_window else torch.empty(300_000)
                if group.rank == r:
                    pycomm.send(x.fill_(r + 1), peer, group=group)
                else:
                    pycomm.recv(x, peer, group=group)
                    assert (x == r + 1).all()
            mine_in_window, theirs_in_window = theirs_in_window, mine_in_window


def test_tensors_in_the_window():
    helpers.run_group(2, window_tensors)


def strided(group):
    x = torch.arange(60_000).view(200, 300)
    if group.rank == 0:
        pycomm.send(x.T, 1, group=group)
        return
    y = torch.zeros(600, 200, dtype=torch.int64)[::2]
    pycomm.irecv(y, 0, group=group).wait()
    assert torch.equal(y, x.T)


def test_strided(world):
    world(2).run(strided)


def orphan(group):
    x = torch.full((500_000,), 3.0)
    if group.rank == 0:
        pycomm.isend(x, 1, group=group)
        del x
        torch.zeros(500_000)  # would overwrite memory that is free
        pycomm.barrier(group=group)
    else:
        pycomm.barrier(group=group)
        pycomm.recv(x.zero_(), 0, group=group)
        assert (x == 3).all()


def test_a_dropped_request_keeps_its_tensor(world):
    world(2).run(orphan)


def test_arguments(world):
    group = world(2).groups[0]
    x = torch.zeros(4)
    for call in (
        lambda: pycomm.send(x, 2, group=group),
        lambda: pycomm.send(x, -1, group=group),
        lambda: pycomm.recv(x, 2, group=group),
        lambda: pycomm.send(x, 1, tag=1 << 31, group=group),
        lambda: pycomm.send(x, 1, tag=0.5, group=group),
        lambda: pycomm.recv(torch.zeros(1).expand(4), 1, group=group),
        lambda: pycomm.send(torch.zeros(1, requires_grad=True), 1, group=group),
        lambda: pycomm.send(x, 1, timeout=0, group=group),
        lambda: pycomm.send(x.to("meta"), 1, group=group),
    ):
        with pytest.raises(ValueError, match="must"):
            call()
    with pytest.raises(TypeError, match="tensor must be"):
        pycomm.send([1], 1, group=group)
    with pytest.raises(ValueError, match="from 0 to 2, got 3"):
        pycomm.send(x, 3, group=world(3, nodes=(2, 1)).groups[0])


def footprint(group):
    """The next free place in this rank's heap, and the number of this process's threads."""
    x = group.empty(1)
    return group._core.offset_of(x.data_ptr()), threads()


def test_costs_nothing_without_messages(world):
    groups = world(2).groups
    before = footprint(groups[0])
    pycomm.isend(torch.zeros(8), 1, group=groups[0]).wait()  # complete at once
    offset, threads = footprint(groups[0])
    assert offset > before[0], "the first message allocates a ring"
    assert threads == before[1], "what completes at once needs no thread"
    assert footprint(groups[1]) == (before[0], threads), "a rank that sends nothing needs no ring"
    y = torch.empty(8)
    request = pycomm.irecv(y, 0, tag=1, group=groups[1])
    assert footprint(groups[1]) == (before[0], threads + 1)
    pycomm.send(torch.ones(8), 1, tag=1, group=groups[0])
    helpers.wait_until(request.is_completed)  # by the thread
    request.wait()
    assert (y == 1).all()
