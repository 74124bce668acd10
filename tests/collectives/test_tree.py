"""The double binary tree: left, own, right, rounded at inner nodes; at most twice the bytes."""

import functools

import pytest
import sweep
import torch
from golden import double_tree

import pycomm


@pytest.mark.parametrize(("dtype", "size"), sweep.a_fifth_of(sweep.DTYPES, range(1, 10)), ids=str)
def test_exact_at_every_border(dtype, size):
    sweep.check_grid("tree", dtype, size)


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact_with_many_pieces(size):
    sweep.check_large("tree", size)


measured = functools.partial(sweep.traffic, "tree")


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("size", range(2, 10))
def test_half_the_tensor_per_neighbour(size, in_window):
    nbytes = 8192
    neighbours = [0] * size
    for root in double_tree(size):
        for node in root.walk():
            for child in node.children():
                neighbours[node.rank] += 1
                neighbours[child.rank] += 1
    costs = measured(size, nbytes // 4, in_window)
    assert costs == [(4, near * nbytes // 2, 0) for near in neighbours]
    assert max(bytes_in for _, bytes_in, _ in costs) <= 2 * nbytes


@pytest.mark.parametrize("size", range(1, 40))
def test_no_rank_is_an_inner_node_of_both_trees(size):
    first, second = ({n.rank for n in root.walk() if n.children()} for root in double_tree(size))
    assert not first & second


@pytest.mark.parametrize("size", range(1, 40))
def test_the_library_builds_the_same_trees(size):
    for index, root in enumerate(double_tree(size)):
        parents = {child.rank: node.rank for node in root.walk() for child in node.children()}
        for node in root.walk():
            left = node.left.rank if node.left else -1
            right = node.right.rank if node.right else -1
            found = pycomm._C.tree_node(index, node.rank, size)
            assert found == (parents.get(node.rank, -1), left, right)


def test_order_and_rounding_by_hand():
    """4 ranks: rank 1 adds 0 + 1 + 2 for the root 3; in the mirror, rank 2 adds 3 + 2 + 1 for 0."""
    values = [1.0, 1.0, 2048.0, 0.0]  # in float16 2049 is a tie and rounds to 2048

    def body(group):
        x = torch.full((64,), values[group.rank], dtype=torch.float16)
        return pycomm.all_reduce(x, algorithm="tree", group=group)

    with pycomm.LocalWorld(4, timeout=60) as world:
        for result in world.run(body):
            assert result.tolist() == [2050.0] * 32 + [2048.0] * 32
