"""Tensors of other ranks, used where they lie in shared memory."""

import gc

import helpers
import pytest
import torch

import pycomm

COUNT = 5000


def fill(group, count=COUNT, dtype=torch.float32):
    """A tensor of this rank's number, at another offset than on the other ranks."""
    before = group.empty(4096 * (1 + group.rank), dtype=torch.uint8)
    made = group.empty(count, dtype=dtype).fill_(group.rank)
    del before
    return made


def values(tensor):
    """The value of all elements."""
    (value,) = set(tensor.flatten().tolist())
    return value


def read_and_write(group):
    x = fill(group)
    offset = group._core.offset_of(x.data_ptr())
    peers = group.peers(x)
    pycomm.barrier(group=group)
    seen = [values(peer) for peer in peers]
    assert all(peer.shape == x.shape for peer in peers)
    pycomm.barrier(group=group)
    after = (group.rank + 1) % group.size
    peers[after][group.rank] = 100.0 + group.rank
    peers[group.rank][COUNT - 1] = -1.0  # its own
    pycomm.barrier(group=group)
    before = (group.rank - 1) % group.size
    assert x[before] == 100.0 + before
    assert x[COUNT - 1] == -1.0
    assert values(x[group.size : COUNT - 1]) == group.rank
    again = group.peers(x)
    assert [peer[COUNT - 1].item() for peer in again] == [-1.0] * group.size
    return offset, seen


def test_views_are_the_tensors_of_the_peers():
    outcomes = helpers.run_group(3, read_and_write)
    assert len({offset for offset, _ in outcomes}) == 3
    assert [seen for _, seen in outcomes] == [[0.0, 1.0, 2.0]] * 3


def test_ranks_that_are_threads(world):
    assert [seen for _, seen in world(3).run(read_and_write)] == [[0.0, 1.0, 2.0]] * 3
    assert world(1).run(read_and_write)[0][1] == [0.0]


def use_a_part(group):
    whole = group.empty(7, 9, dtype=torch.bfloat16).fill_(group.rank)
    part = whole[1:6:2, 3:].t().requires_grad_()
    peers = group.peers(part)
    assert all(peer.dtype == torch.bfloat16 and peer.shape == (6, 3) for peer in peers)
    assert not any(peer.requires_grad for peer in peers)
    pycomm.barrier(group=group)
    peers[1 - group.rank][:] = 8.0
    pycomm.barrier(group=group)
    changed = (whole == 8.0).nonzero().tolist()
    assert changed == [[row, column] for row in (1, 3, 5) for column in range(3, 9)]
    return len(changed)


def test_a_part_of_a_tensor():
    assert helpers.run_group(2, use_a_part) == [18, 18]


def free_at_once(group):
    """Ranks free their tensors, and then fill as much memory as they were."""
    other = group.peers(fill(group))[1 - group.rank]
    others = [group.empty(COUNT).fill_(77.0) for _ in range(8)]
    pycomm.barrier(group=group)
    seen = values(other), values(others[0])
    pycomm.barrier(group=group)
    return seen


def test_a_peer_may_free_its_tensor():
    assert helpers.run_group(2, free_at_once) == [(1.0, 77.0), (0.0, 77.0)]


def leave_first(rank, size, store):
    helpers.join_world(rank, size, store)
    group = pycomm.init()
    other = group.peers(fill(group))[1 - rank]
    pycomm.barrier(group=group)
    gone = group._processes[1]
    group.close()
    if rank == 1:
        return None
    pycomm.set_default_group(None)
    del group
    gc.collect()
    helpers.wait_until(lambda: gone.ended)
    other[0] = 5.0
    return other.tolist() == [5.0] + [1.0] * (COUNT - 1)


def test_a_peer_may_end_first():
    assert helpers.run_ranks(2, leave_first) == [True, None]


def go_on_after_shrinking(group):
    x = fill(group)
    if group.rank == 1:
        group.close()
        return None
    smaller = group.shrink()
    with smaller:
        peers = smaller.peers(x)
        pycomm.barrier(group=smaller)
        seen = [values(peer) for peer in peers]
        pycomm.barrier(group=smaller)
        return seen


def test_a_group_that_has_shrunk():
    assert helpers.run_group(3, go_on_after_shrinking) == [[0.0, 2.0], None, [0.0, 2.0]]


def pass_others(group):
    refused = []
    inside, outside = fill(group), torch.zeros(COUNT)
    for given in (outside if group.rank == 1 else inside, outside):
        with pytest.raises(ValueError, match="must lie in the group's shared memory") as caught:
            group.peers(given)
        refused.append(str(caught.value).rpartition("got ")[2])
    with pytest.raises(ValueError, match=r"tensor must have elements, got shape \(0,\)"):
        group.peers(group.empty(0))
    with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor, got list"):
        group.peers([1.0])
    assert values(pycomm.all_reduce(inside, group=group)) == 3.0  # the group works
    return refused


def test_a_tensor_of_one_rank_is_elsewhere(world):
    refused = ["others on ranks 1", "others on ranks 0, 1, 2"]
    assert world(3).run(pass_others) == [refused] * 3


@pytest.mark.parametrize("what", ["shape", "dtype", "strides"])
def test_different_tensors(world, what):
    def body(group):
        given = group.empty(4, 6)
        if group.rank == 1:
            given = {
                "shape": given.view(6, 4),
                "dtype": group.empty(4, 6, dtype=torch.int32),
                "strides": given.view(6, 4).t(),
            }[what]
        with pytest.raises(pycomm.Mismatch, match=r"peers of torch\.float32 \(4, 6\) on cpu"):
            group.peers(given)

    world(2).run(body)


def test_several_nodes(world):
    def body(group):
        with pytest.raises(ValueError, match="group must lie on one node, got one on 2"):
            group.peers(group.empty(3))

    world(2, nodes=[1, 1]).run(body)
