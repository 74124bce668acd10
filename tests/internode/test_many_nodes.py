"""Small all-reduces among more than eight nodes, which travel in rounds."""

from __future__ import annotations

import time

import golden
import golden_nodes
import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import internode

HANDSHAKE = 80  # bytes
LAYOUTS = [[1] * 9, [2, *[1] * 8], [2] * 11, [1] * 16, [1] * 17]


def inputs(dtype: torch.dtype, count: int, size: int) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [(4 * torch.randn(count, generator=g)).to(dtype) for g in generators]


@pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: f"{len(nodes)} nodes, {sum(nodes)}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sums_are_added_in_node_order(world, nodes, dtype):
    """Counts around the largest one whose stripes travel in rounds."""
    size = sum(nodes)
    most = (32 << 10) // (len(nodes) - 1) // dtype.itemsize * min(nodes)
    groups = world(size, nodes=nodes)
    for count in (1, 33, most - 64, most, most + 1, most + 64):
        given = inputs(dtype, count, size)
        for op in ("sum", "avg", "max") if dtype.is_floating_point else ("sum", "max"):
            results = groups.run(
                lambda group, op=op, given=given: pycomm.all_reduce(
                    given[group.rank].clone(), op, group=group
                )
            )
            wanted = golden_nodes.all_reduced(given, op, nodes)
            assert all(golden.same_bits(result, wanted) for result in results), (count, op)


@pytest.mark.parametrize("nodes", [8, 9, 17])
def test_bytes(world, nodes):
    """As many as if each node sent its stripe to all others, and one handshake more."""

    def body(group):
        pycomm.all_reduce(torch.zeros(200), group=group)
        plan = group.explain(800)
        return group.link_traffic(), (plan.bytes_out, plan.bytes_in)

    more = HANDSHAKE if nodes > 8 else 0
    for traffic, planned in world(nodes, nodes=[1] * nodes).run(body):
        assert planned == (800 * (nodes - 1),) * 2
        assert traffic == ((nodes - 1) * (800 + HANDSHAKE) + more,) * 2


def small(group: pycomm.Group) -> None:
    pycomm.all_reduce(torch.ones(100), group=group)


def repeated(group: pycomm.Group) -> None:
    while True:
        small(group)


OTHERS = {
    "barrier": lambda group: pycomm.barrier(group=group),
    "another reduction": lambda group: pycomm.all_reduce(torch.ones(100), "max", group=group),
    "another length": lambda group: pycomm.all_reduce(torch.ones(101), group=group),
    "a long tensor": lambda group: pycomm.all_reduce(torch.ones(100_000), group=group),
}


@pytest.mark.parametrize("odd", [[0], [4], [8], [2, 6, 7]], ids=str)
@pytest.mark.parametrize("other", OTHERS)
def test_nodes_that_disagree(world, odd, other):
    """All name the same one of two neighbours that differ."""
    around = [(rank, (rank + 1) % 9) for rank in range(9)]
    blamed = {max(pair) for pair in around if len(set(pair) & set(odd)) == 1}

    def body(group):
        begin = time.monotonic()
        call = OTHERS[other] if group.rank in odd else small
        with pytest.raises(pycomm.Mismatch) as caught:
            call(group)
        assert time.monotonic() - begin < 5
        return caught.value.rank

    named = set(world(9, nodes=[1] * 9, timeout=20).run(body))
    assert len(named) == 1
    assert named <= blamed


@pytest.mark.parametrize("late", [0, 5, 16])
def test_a_node_that_does_not_come_is_named(world, late):
    """By all, although most of them wait for nodes that wait for it."""

    def body(group):
        begin = time.monotonic()
        if group.rank == late:
            time.sleep(2.5)
            return None
        with pytest.raises(pycomm.Timeout) as caught:
            small(group)
        assert 0.9 < time.monotonic() - begin < 2.2
        return caught.value.rank

    wanted = [None if rank == late else late for rank in range(17)]
    assert world(17, nodes=[1] * 17, timeout=1.0).run(body) == wanted


def test_a_node_that_ends_is_named(world):
    def body(group):
        if group.rank == 3:
            raise KeyError("my own")
        with pytest.raises(pycomm.PeerDied) as caught:
            small(group)
        assert caught.value.rank == 3
        raise caught.value

    with pytest.raises(KeyError, match="my own"):
        world(12, nodes=[1] * 12).run(body)


def over_gloo(group: pycomm.Group):
    """Counts messages; then rank 4 leaves, and the others call one more operation."""
    messages, post = [], internode.GlooTransport.post

    def count(link, sends, receives):
        messages.append((len(sends), len(receives)))
        post(link, sends, receives)

    x = torch.full((100,), float(group.rank))
    pycomm.barrier(group=group)
    internode.GlooTransport.post = count
    pycomm.all_reduce(x, group=group)
    internode.GlooTransport.post = post
    if group.rank == 4:
        group.close()
        return float(x[0]), messages, None
    with pytest.raises(pycomm.PeerDied) as caught:
        repeated(group)
    return float(x[0]), messages, caught.value.rank


def test_messages():
    """The first handshake, and five messages in two rounds."""
    for rank, seen in enumerate(spanning.run("abcdefghi", over_gloo, timeout=20.0)):
        assert seen == (36.0, [(1, 1), (3, 3), (2, 2)], None if rank == 4 else 4)
