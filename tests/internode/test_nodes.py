"""Groups that span nodes: the collectives, for even and uneven layouts; threads."""

from __future__ import annotations

import golden
import golden_nodes
import pytest
import torch

import pycomm

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], [3, 1], [1, 2, 3], [2, 2, 2, 2]]
OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.uint8,
)  # fmt: skip


def tensor(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    low = 0 if dtype == torch.uint8 else -50
    return torch.randint(low, 50, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_up_node_by_node(world, nodes, dtype):
    size, count = sum(nodes), 5003
    inputs = [tensor(dtype, count, rank) for rank in range(size)]
    groups = world(size, nodes=nodes, staging_bytes=32 << 10)
    for op in OPS:
        results = groups.run(
            lambda group, op=op: pycomm.all_reduce(inputs[group.rank].clone(), op, group=group)
        )
        wanted = golden_nodes.all_reduced(inputs, op, nodes)
        assert all(golden.same_bits(result, wanted) for result in results), op


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 17, 100_003, 1_200_001])
def test_counts_and_ways_into_memory(world, nodes, count):
    """Tiles of several transfers; tensors in windows; out of place."""
    size = sum(nodes)
    inputs = [tensor(torch.float32, count, rank) for rank in range(size)]
    wanted = golden_nodes.all_reduced(inputs, "sum", nodes)

    def body(group):
        mine = inputs[group.rank]
        out = pycomm.all_reduce(mine, out=torch.empty_like(mine), group=group)
        inside = group.empty(count).copy_(mine)
        pycomm.all_reduce(inside, group=group)
        work = pycomm.all_reduce(later := mine.clone(), group=group, async_op=True)
        work.wait()
        return [out, inside, later]

    for results in world(size, nodes=nodes).run(body):
        assert all(golden.same_bits(result, wanted) for result in results)


@pytest.mark.parametrize("nodes", [[1, 1, 1, 1], [1, 1, 1]], ids=str)
def test_one_rank_per_node_is_as_on_one_node(world, nodes):
    def body(group):
        x = tensor(torch.bfloat16, 70_001, group.rank)
        return pycomm.all_reduce(x, "avg", group=group)

    spanning = world(len(nodes), nodes=nodes).run(body)
    together = world(len(nodes)).run(body)
    assert golden.same_bits(spanning[0], together[0])


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("block", [0, 3, 40_001])
def test_other_collectives(world, nodes, block):
    size = sum(nodes)
    inputs = [tensor(torch.float32, block * size, rank) for rank in range(size)]

    def body(group):
        mine = inputs[group.rank]
        reduced = pycomm.reduce_scatter(torch.empty(block), mine, "avg", group=group)
        gathered = pycomm.all_gather(torch.empty(block * size), mine[:block], group=group)
        told = [pycomm.broadcast(mine.clone(), source, group=group) for source in range(group.size)]
        pycomm.barrier(group=group)
        return reduced, gathered, told

    wanted = golden_nodes.all_reduced(inputs, "avg", nodes)
    blocks = torch.cat([x[:block] for x in inputs])
    for rank, (reduced, gathered, told) in enumerate(world(size, nodes=nodes).run(body)):
        assert golden.same_bits(reduced, wanted[rank * block : (rank + 1) * block])
        assert golden.same_bits(gathered, blocks)
        assert all(golden.same_bits(x, inputs[source]) for source, x in enumerate(told))


HANDSHAKE = 80  # bytes, to every other node


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [3, 1], [2, 2, 2]], ids=str)
def test_bytes_between_nodes(world, nodes):
    """A node sends as much as explain() says, for any number of ranks."""
    count = 300_000

    def body(group):
        pycomm.all_reduce(torch.zeros(count), group=group)
        plan = group.explain(4 * count)
        return group.link_traffic(), (plan.bytes_out, plan.bytes_in), group.stripes

    others = len(nodes) - 1
    seen = world(sum(nodes), nodes=nodes).run(body)
    for ranks in golden_nodes.by_node(seen, nodes):
        stripes = ranks[0][2]
        handshakes = HANDSHAKE * others
        for i, (traffic, planned, _) in enumerate(ranks):
            extra = handshakes if i < stripes else 0
            assert traffic == (planned[0] + extra, planned[1] + extra)
        sent = sum(traffic[0] for traffic, _, _ in ranks)
        ideal = 2 * others / len(nodes) * 4 * count
        assert sent == pytest.approx(ideal, rel=0.01)


@pytest.mark.parametrize(("count", "copies"), [(4096, 6), (4097, 4)], ids=["whole", "in parts"])
def test_a_small_tensor_is_sent_whole(world, count, copies):
    """32 KiB to both other nodes, and no results; one more element travels in two phases."""

    def body(group):
        pycomm.all_reduce(torch.zeros(count), group=group)
        return group.link_traffic()[0]

    sent = sum(world(3, nodes=[1, 1, 1]).run(body))
    assert sent == copies * 4 * count + 6 * HANDSHAKE


def test_what_a_group_says_of_itself(world):
    groups = world(3, nodes=[2, 1])
    assert [group.nodes for group in groups] == [((0, 1), (2,))] * 3
    assert [group.stripes for group in groups] == [1] * 3
    assert [group.rank for group in groups] == [0, 1, 2]
    assert [group.size for group in groups] == [3] * 3
    assert groups.groups[0].explain(1024).path == "2 nodes, 1 stripe"
    assert (world(2).groups[0].nodes, world(2).groups[0].stripes) == (((0, 1),), 0)


@pytest.mark.parametrize("nodes", [[2], [1, 2, 1], [3, 0], [-1, 4]], ids=str)
def test_nodes_must_make_up_the_world(nodes):
    with pytest.raises(ValueError, match=r"nodes must be positive and add up to size, 3, got"):
        pycomm.LocalWorld(3, nodes=nodes)


@pytest.mark.parametrize("name", ["one_shot", "multicast"])
def test_some_algorithms_are_refused(world, name):
    group = world(2, nodes=[1, 1]).groups[0]
    message = (
        f"algorithm must be auto, two_shot, ring or tree in a group that spans nodes, got {name}"
    )
    with pytest.raises(ValueError, match=message):
        pycomm.all_reduce(torch.ones(3), algorithm=name, group=group)
    with pytest.raises(ValueError, match=message):
        pycomm.all_reduce(torch.ones(3), algorithm=name, group=group, async_op=True)
    with pytest.raises(ValueError, match=message):
        group.explain(12, algorithm=name)


def test_operations_of_a_compiled_graph(world):
    """torch.ops take the group's name, and know the whole group's size."""

    def body(group):
        x = torch.full((5,), float(group.rank))
        torch.ops.pycomm.all_reduce_(x, "sum", "auto", group.name)
        out = torch.empty(4)
        torch.ops.pycomm.all_gather_(out, torch.tensor([float(group.rank)]), group.name)
        torch.ops.pycomm.broadcast_(y := x.clone() + group.rank, 3, group.name)
        return x.tolist(), out.tolist(), y.tolist()

    assert world(4, nodes=[2, 2]).run(body) == [([6.0] * 5, [0.0, 1.0, 2.0, 3.0], [9.0] * 5)] * 4
