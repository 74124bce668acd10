"""Reduce, gather, scatter, all-to-all, lists and blocks of different sizes between nodes."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import spanning
import torch

import pycomm

NODES = [(1, 1), (2, 1), (2, 2, 1), (1, 3)]
COUNTS = [0, 1, 7, 1000, 100_003]


def block(source: int, to: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 97 + 100 * source + to).to(dtype)


def rooted(group: pycomm.Group, count: int, dtype: torch.dtype) -> None:
    n, r = group.size, group.rank
    for root in range(n):
        mine = root == r
        for listed in (False, True):
            x = block(r, root, count, dtype)
            outs = [torch.full((count,), 7).to(dtype) for _ in range(n)]
            whole: object = torch.cat(outs) if not listed else outs
            pycomm.gather(x, whole if mine else None, root, group=group)
            got = torch.cat(outs) if listed else whole
            if mine:
                wanted = torch.cat([block(s, root, count, dtype) for s in range(n)])
                assert torch.equal(got, wanted)
            blocks = [block(root, to, count, dtype) for to in range(n)]
            given = (blocks if listed else torch.cat(blocks)) if mine else None
            out = torch.full((count,), 7).to(dtype)
            pycomm.scatter(out, given, root, group=group)
            assert torch.equal(out, block(root, r, count, dtype))


def exchanged(group: pycomm.Group, count: int, dtype: torch.dtype) -> None:
    n, r = group.size, group.rank
    blocks = [block(r, to, count, dtype) for to in range(n)]
    wanted = [block(source, r, count, dtype) for source in range(n)]
    out = torch.zeros(n * count, dtype=dtype)
    pycomm.all_to_all(out, torch.cat(blocks), group=group)
    assert torch.equal(out, torch.cat(wanted))
    outs = [torch.zeros(count, dtype=dtype) for _ in range(n)]
    pycomm.all_to_all(outs, blocks, group=group)
    assert all(map(torch.equal, outs, wanted))
    work = pycomm.all_to_all(out.zero_(), torch.cat(blocks), group=group, async_op=True)
    work.wait()
    assert torch.equal(out, torch.cat(wanted))


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_equal_blocks(world, nodes, count):
    def body(group):
        rooted(group, count, torch.float32)
        exchanged(group, count, torch.int8 if count % 2 else torch.complex128)

    world(sum(nodes), nodes=nodes).run(body)


def test_ranks_of_a_node_that_are_not_contiguous():
    spanning.run("abcab", rooted, 1000, torch.bfloat16, timeout=30)


def uneven(group: pycomm.Group, seed: int) -> None:
    """Tokens go to the experts that a router chooses; some get none."""
    n, r = group.size, group.rank
    dice = random.Random(seed)
    rows = [[dice.choice([0, 1, 3, 200, 30_000]) for _ in range(n)] for _ in range(n)]
    given = torch.cat([block(r, to, 2 * rows[r][to]) for to in range(n)]).view(-1, 2)
    expected = [rows[source][r] for source in range(n)]
    out = torch.zeros(sum(expected), 2)
    pycomm.all_to_all(out, given, expected, rows[r], group=group)
    wanted = [block(source, r, 2 * rows[source][r]) for source in range(n)]
    assert torch.equal(out.view(-1), torch.cat(wanted))

    counts = rows[0]
    outs = [torch.zeros(count) for count in counts]
    pycomm.all_gather(outs, block(r, 0, counts[r]), group=group)
    assert all(torch.equal(outs[s], block(s, 0, counts[s])) for s in range(n))

    blocks = [block(r, to, counts[to], torch.int64) for to in range(n)]
    mine = torch.zeros(counts[r], dtype=torch.int64)
    pycomm.reduce_scatter(mine, blocks, group=group)
    assert torch.equal(mine, sum(block(s, r, counts[r], torch.int64) for s in range(n)))


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_different_sizes(world, nodes, seed):
    world(sum(nodes), nodes=nodes).run(uneven, seed)


def test_blocks_of_different_sizes_in_processes():
    spanning.run("abcab", uneven, 5, timeout=30)


def reduced(group: pycomm.Group, count: int) -> None:
    """The root has the bits of an all-reduce; the others' tensors stay as they are."""
    torch.manual_seed(group.rank)
    x = torch.randn(count)
    for op in ("sum", "avg", "max"):
        wanted = pycomm.all_reduce(x.clone(), op, group=group, algorithm="two_shot")
        for root in range(group.size):
            y = x.clone()
            pycomm.reduce(y, root, op, group=group)
            assert torch.equal(y, wanted if group.rank == root else x)


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("count", [*COUNTS, 1_000_000])
def test_reduce(world, nodes, count):
    world(sum(nodes), nodes=nodes).run(reduced, count)


def test_reduce_in_processes():
    spanning.run("abab", reduced, 300_001, timeout=30)


def test_the_bytes_between_nodes(world):
    """The traffic is as predicted: each block crosses the link of its node at most once."""

    def body(group):
        n, count, seen = group.size, 5000, []
        x, whole = torch.ones(count), torch.ones(n * count)
        root = group.rank == 1
        calls = {
            "reduce": lambda: pycomm.reduce(x, 1, group=group),
            "gather": lambda: pycomm.gather(x, whole if root else None, 1, group=group),
            "scatter": lambda: pycomm.scatter(x, whole if root else None, 1, group=group),
            "all_to_all": lambda: pycomm.all_to_all(torch.zeros(n * count), whole, group=group),
        }
        for name, call in calls.items():
            call()
            seen.append((name, group.link_traffic()))
        return seen

    size, handshake = 5000 * 4, 80
    first, root, third, _ = (dict(seen) for seen in world(4, nodes=(2, 2)).run(body))
    assert root["gather"] == (handshake, handshake + 2 * size)
    assert root["scatter"] == (handshake + 2 * size, handshake)
    assert root["all_to_all"] == (handshake + 2 * size, handshake + 2 * size)
    assert third["gather"] == (handshake + size, handshake)
    assert first["gather"] == (handshake, handshake), "it is on the root's node"
    # Half a tensor is a stripe, and half of that is owned by the other node, which sends its sum.
    assert first["reduce"][1] - handshake == pytest.approx(size / 2, rel=0.01)
    assert third["reduce"][0] == first["reduce"][1]
    assert third["reduce"][1] - handshake == pytest.approx(size / 4, rel=0.01)


def outcome(call) -> tuple[type, int, str]:
    with pytest.raises(pycomm.CollectiveError) as caught:
        call()
    return caught.type, caught.value.rank, str(caught.value)


def disagree(group: pycomm.Group, how: str) -> tuple[type, int, str]:
    n, odd = group.size, group.rank == 2
    x, whole = torch.ones(6), torch.ones(6 * n)
    if how == "another count":
        x = torch.ones(7 if odd else 6)
        out = torch.ones(n * x.numel())
        return outcome(lambda: pycomm.all_to_all(torch.ones_like(out), out, group=group))
    if how == "another root":
        dst = 2 if odd else 0
        out = whole if group.rank == dst else None
        return outcome(lambda: pycomm.gather(x, out, dst, group=group))
    if how == "another operation":
        call = pycomm.reduce if odd else pycomm.all_reduce
        return outcome(lambda: call(x, group=group))
    sizes = [1] * n
    given = [2, *sizes[1:]] if odd else sizes
    whole = torch.ones(sum(given))
    return outcome(lambda: pycomm.all_to_all(torch.ones(n), whole, sizes, given, group=group))


@pytest.mark.parametrize(
    "how", ["another count", "another root", "another operation", "another split"]
)
def test_ranks_that_disagree(how):
    for kind, rank, text in spanning.run([2, 1], disagree, how, timeout=30):
        assert (kind, rank) == (pycomm.Mismatch, 2), text
        if how == "another split":
            assert "rank 2 sends 2 elements to rank 0, which expects 1" in text


def lose(group: pycomm.Group, victim: int, name: str) -> tuple[type, int, str]:
    n, count = group.size, 2_000_000
    x, whole = torch.ones(count), torch.ones(n * count)
    root = group.rank == 0
    calls = {
        "reduce": lambda: pycomm.reduce(x, 0, group=group),
        "gather": lambda: pycomm.gather(x, whole if root else None, 0, group=group),
        "scatter": lambda: pycomm.scatter(x, whole if root else None, 0, group=group),
        "all_to_all": lambda: pycomm.all_to_all(torch.empty(n * count), whole, group=group),
    }
    if group.rank == victim:
        calls[name]()
        if name == "all_to_all":  # in the middle of it
            pycomm.all_to_all(torch.empty(n * count), whole, group=group, async_op=True)
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    def until_failure():
        for _ in range(3):  # a rank that only sends may be done before the other one dies
            calls[name]()

    found = outcome(until_failure)
    with group.shrink() as smaller:
        exchanged(smaller, 1000, torch.float32)
    return found


@pytest.mark.parametrize("name", ["reduce", "gather", "scatter", "all_to_all"])
def test_a_rank_dies(name):
    victim = 3 if name == "all_to_all" else 2
    with spanning.ranks([2, 2], lose, victim, name, timeout=60) as ranks:
        outcomes = ranks.wait_for([r for r in range(4) if r != victim])
    for each in outcomes:
        assert each.error is None, each.trace
        kind, rank, text = each.value
        assert (kind, rank) == (pycomm.PeerDied, victim), text
        assert "recv(" not in text
        assert "send(" not in text


def late(group: pycomm.Group) -> tuple[type, int, str]:
    """Rank 2 does not come; rank 1 waits in the operation, and rank 0 in a later operation."""
    x, outs = torch.ones(5), [torch.ones(5) for _ in range(3)]
    if group.rank == 2:
        time.sleep(3)
    return outcome(lambda: pycomm.gather(x, outs if group.rank == 0 else None, group=group))


def test_timeouts():
    for kind, rank, text in spanning.run([2, 1], late, timeout=1):
        assert (kind, rank) == (pycomm.Timeout, 2), text


def between_messages(group: pycomm.Group) -> None:
    """Collectives and the program's messages of any tag do not meet."""
    n, r = group.size, group.rank
    y = torch.zeros(100)
    request = pycomm.irecv(y, tag=1, group=group)  # from any source, with the tag of an operation
    for _ in range(5):
        exchanged(group, 100, torch.float32)
    pycomm.send(block(r, 0, 100), (r + 1) % n, tag=1, group=group)
    request.wait()
    assert torch.equal(y, block((r - 1) % n, 0, 100))


def test_messages_beside_collectives():
    spanning.run([2, 1], between_messages, timeout=30)


def close_at_once(group: pycomm.Group) -> torch.Tensor:
    out = torch.zeros(group.size * 50_000)
    work = pycomm.all_to_all(out, torch.ones_like(out) + group.rank, group=group, async_op=True)
    group.close()
    work.wait()
    return out[::50_000]


def test_close_completes_what_was_submitted():
    for out in spanning.run([2, 1], close_at_once, timeout=30):
        assert out.tolist() == [1, 2, 3]
