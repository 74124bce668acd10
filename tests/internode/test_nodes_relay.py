"""Ring and tree between nodes: the order of additions, the bounds of pieces, bytes, errors."""

from __future__ import annotations

import signal

import compressing
import golden
import golden_nodes
import pytest
import spanning
import torch
from compressing import Case
from test_nodes import DTYPES, HANDSHAKE, OPS, tensor
from test_nodes_faults import ends, storm, wait_for_start

import pycomm

LAYOUTS = [[1, 1], [1, 1, 1], [2, 1], [1, 2, 3], [1, 1, 1, 1, 1], [2, 2, 2, 2]]
ALGORITHMS = ["ring", "tree"]


def check(groups, nodes: list[int], algorithm: str, inputs: list[torch.Tensor], op: str) -> None:
    wanted = golden_nodes.all_reduced(inputs, op, nodes, algorithm)
    results = groups.run(
        lambda group: pycomm.all_reduce(
            inputs[group.rank].clone(), op, algorithm=algorithm, group=group
        )
    )
    assert all(golden.same_bits(result, wanted) for result in results), (op, len(wanted))


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_adds_in_the_documented_order(world, nodes, algorithm):
    groups = world(sum(nodes), nodes=nodes, staging_bytes=32 << 10)
    for dtype in DTYPES:
        inputs = [tensor(dtype, 5003, rank) for rank in range(sum(nodes))]
        for op in OPS:
            check(groups, nodes, algorithm, inputs, op)


PIECE = (32 << 10) // 4  # elements of the smallest piece
CHUNK = (1 << 20) // 4  # of the largest chunk of a ring


@pytest.mark.parametrize("nodes", [[1, 1], [1, 1, 1], [2, 3], [1] * 5], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_counts_around_the_bounds_of_pieces_and_tiles(world, nodes, algorithm):
    stripes, n = min(nodes), len(nodes)
    bounds = [n * PIECE, 2 * n * PIECE, n * CHUNK] if algorithm == "ring" else [PIECE, 2 * PIECE]
    counts = [0, 1, 15, 16, 17]
    counts += [stripes * bound + more for bound in bounds for more in (-1, 0, 1)]
    groups = world(sum(nodes), nodes=nodes)
    longest = [tensor(torch.float32, max(counts), rank) for rank in range(sum(nodes))]
    for count in counts:
        check(groups, nodes, algorithm, [x[:count] for x in longest], "avg")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ways_into_memory(world, algorithm):
    """Out of place, in windows, later, not contiguous; many tiles."""
    nodes, count = [2, 1, 1], 2_000_003
    inputs = [tensor(torch.float32, count, rank) for rank in range(4)]
    wanted = golden_nodes.all_reduced(inputs, "sum", nodes, algorithm)

    def body(group):
        mine = inputs[group.rank]
        given = {"algorithm": algorithm, "group": group}
        out = pycomm.all_reduce(mine, out=torch.empty_like(mine), **given)
        pycomm.all_reduce(inside := group.empty(count).copy_(mine), **given)
        pycomm.all_reduce(later := mine.clone(), async_op=True, **given).wait()
        pycomm.all_reduce(sparse := torch.stack([mine, mine], 1)[:, 1], **given)
        return [out, inside, later, sparse]

    for results in world(4, nodes=nodes).run(body):
        assert all(golden.same_bits(result, wanted) for result in results)


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2, 2], [1] * 5], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("compression", [None, pycomm.Int8()], ids=str)
def test_bytes_between_nodes(world, nodes, algorithm, compression):
    """A node sends as much as explain() says; a ring the least that is possible."""
    count = 700_001

    def body(group):
        x = torch.ones(count)
        if compression is not None:
            pycomm.compressed_all_reduce(x, compression, algorithm=algorithm, group=group)
            return group.link_traffic()[0], 0
        pycomm.all_reduce(x, algorithm=algorithm, group=group)
        plan = group.explain(4 * count, algorithm=algorithm)
        assert (plan.algorithm, plan.why) == (algorithm, "named by the caller")
        handshakes = HANDSHAKE * (len(nodes) - 1)
        assert group.link_traffic() == (plan.bytes_out + handshakes, plan.bytes_in + handshakes)
        return plan.bytes_out, plan.bytes_in

    size = 4 * count if compression is None else count
    sent = [x[0] for x in world(sum(nodes), nodes=nodes).run(body)]
    copies = sum(sent) / size
    assert copies == pytest.approx(2 * (len(nodes) - 1), rel=0.03)
    per_node = [sum(own) / size for own in golden_nodes.by_node(sent, nodes)]
    most = 2 * (len(nodes) - 1) / len(nodes) if algorithm == "ring" else 2
    assert max(per_node) < most * 1.05


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinities_are_told_on_all_ranks(world, algorithm):
    def body(group):
        x = compressing.gradient(torch.float32, 100_000, group.rank)
        if group.rank == 3:
            x[70_000] = float("inf")
        residual = torch.full((100_000,), 0.5)
        work = pycomm.compressed_all_reduce(
            x, pycomm.Int8(), algorithm=algorithm, residual=residual, group=group, async_op=True
        )
        return work.nonfinite, bool(x[70_000].isfinite()), bool((residual == 0.5).all())

    assert world(4, nodes=[2, 1, 1]).run(body) == [(True, False, True)] * 4


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("other", ["tree", "auto"])
def test_another_algorithm_on_one_rank(world, nodes, other):
    """As any other mismatch: every rank raises, whether it has received data or not."""

    def body(group):
        algorithm = other if group.rank == group.size - 1 else "ring"
        with pytest.raises(pycomm.Mismatch):
            pycomm.all_reduce(torch.ones(300_000), algorithm=algorithm, group=group)
        return True

    assert all(world(sum(nodes), nodes=nodes, timeout=5).run(body))


def together(group: pycomm.Group) -> list[torch.Tensor]:
    made = []
    for algorithm in ALGORITHMS:
        x = compressing.gradient(torch.bfloat16, 1_200_001, group.rank)
        made.append(pycomm.all_reduce(x, "avg", algorithm=algorithm, group=group))
        case = Case(pycomm.Int8(), count=700_001, steps=2, algorithm=algorithm)
        for step in compressing.run(group, case):
            made += [step.result, step.residual]
    return made


@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1]], ids=str)
def test_processes_have_the_bits_of_threads(world, nodes):
    wanted = world(sum(nodes), nodes=nodes).run(together)
    for rank, made in enumerate(spanning.run(nodes, together)):
        for i, (got, expected) in enumerate(zip(made, wanted[rank], strict=True)):
            compressing.compare(f"tensor {i} of rank {rank}", got, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("compression", [None, pycomm.Int8()], ids=str)
def test_a_killed_rank(tmp_path, algorithm, compression):
    """Also nodes raise that exchange nothing with its node."""
    nodes, victim = [1, 1, 1, 1], 1
    with spanning.ranks(nodes, storm, str(tmp_path), compression, algorithm, timeout=20.0) as ranks:
        wait_for_start(tmp_path, 4)
        killed = ranks.signal(victim, signal.SIGKILL)
        for at in ends(ranks, 4, victim, pycomm.PeerDied):
            assert at - killed < 3
