"""Reports about collectives that users call themselves; see README.md."""

import gc

import pytest
import torch

import pycomm


def test_ranks_with_different_numbers_of_states(world):
    """torchmetrics#3336: a metric gathers each of its tensors, and hung."""

    def gather_all(group):
        for _ in range(3 if group.rank == 0 else 2):
            pycomm.all_gather([torch.empty(4) for _ in range(2)], torch.ones(4), group=group)
        pycomm.barrier(group=group)

    def body(group):
        with pytest.raises(pycomm.Mismatch) as raised:
            gather_all(group)
        return str(raised.value)

    for message in world(2).run(body):
        assert "rank 0 called all_gather" in message
        assert "rank 1 called barrier" in message


def test_gathering_tensors_of_different_lengths(world):
    """ignite#1569, torchmetrics#2170: it hung, or gave wrong values."""

    def body(group):
        mine = torch.arange(5.0 - group.rank)
        got = [torch.empty(5 - rank) for rank in range(2)]
        pycomm.all_gather(got, mine, group=group)
        assert [one.tolist() for one in got] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
        with pytest.raises(pycomm.Mismatch, match=r"5 elements.*4 elements"):
            pycomm.all_gather([torch.empty_like(mine) for _ in range(2)], mine, group=group)

    world(2).run(body)


def test_requests_that_nobody_keeps(world):
    """mpi4py#233: the program dropped the requests of its sends."""

    def body(group):
        if group.rank == 0:
            for number in range(40):
                pycomm.isend(torch.full((5000,), float(number)), 1, group=group)
            gc.collect()
            kept = [torch.full((5000,), -1.0) for _ in range(80)]
        else:
            kept = []
            for _ in range(40):
                kept.append(torch.empty(5000))
                pycomm.recv(kept[-1], 0, group=group)
            assert all(bool((one == number).all()) for number, one in enumerate(kept))
        pycomm.barrier(group=group)
        return len(kept)

    assert world(2).run(body) == [80, 40]


def test_input_and_output_in_the_same_memory(world):
    """OpenMDAO#904: a gather into the array that it reads."""

    def body(group):
        whole = torch.zeros(2, 4)
        whole[group.rank] = group.rank + 1
        with pytest.raises(ValueError, match="must not overlap"):
            pycomm.all_gather(whole, whole[group.rank], group=group)
        pycomm.all_gather(whole, whole[group.rank].clone(), group=group)
        assert whole[:, 0].tolist() == [1, 2]

    world(2).run(body)


def test_slices_with_steps_and_offsets(world):
    """heat#785, numba-mpi#50: results went to wrong elements, or to a copy."""

    def body(group):
        values = torch.arange(24.0).view(4, 6)
        whole = values * (group.rank + 1)
        part, line = whole[1:, ::2], whole[0, 1::2]
        pycomm.all_reduce(part, group=group)
        if group.rank == 0:
            pycomm.send(line, 1, group=group)
        else:
            pycomm.recv(line, 0, group=group)
        wanted = values * (group.rank + 1)
        wanted[1:, ::2] = values[1:, ::2] * 3
        wanted[0, 1::2] = values[0, 1::2]
        assert torch.equal(whole, wanted)

    world(2).run(body)
