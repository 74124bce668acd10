"""Kinds of tensors that torch.distributed on pycomm takes or refuses."""

import backends
import pytest
import torch
import torch.distributed as dist


def of_inference_mode(rank, size):
    with torch.inference_mode():
        x = torch.full((4, 6), float(rank))[:, ::2]
        gathered = [torch.zeros(4, 6)[:, ::2] for _ in range(size)]
        received = torch.zeros(6, 4).t()
        works = [
            dist.all_gather(gathered, x, async_op=True),
            dist.irecv(received, (rank - 1) % size),
            dist.isend(torch.full((4, 6), float(rank)), (rank + 1) % size),
        ]
    for work in works:  # which other threads have completed
        work.wait()
    return [part.unique().tolist() for part in gathered], received.unique().tolist()


def test_strided_tensors_of_inference_mode():
    every = [[0.0], [1.0]]
    assert backends.run(2, of_inference_mode) == [(every, [1.0]), (every, [0.0])]


def shared_elements(rank, _size):
    expanded = torch.zeros(1).expand(4)
    calls = [
        lambda: dist.all_reduce(expanded),
        lambda: dist.broadcast(expanded, 0),
        lambda: dist.all_gather([expanded, torch.zeros(4)], torch.ones(4)),
        lambda: dist.reduce_scatter_tensor(expanded, torch.ones(8)),
        lambda: dist.recv(expanded, 1 - rank),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="a single memory location"):
            call()
    dist.send(torch.full((4,), float(rank)), 1 - rank)
    with pytest.raises(RuntimeError, match="a single memory location"):
        dist.recv(expanded, 1 - rank)
    received = torch.zeros(4)
    dist.recv(received, 1 - rank)  # the refused receive has not taken the message
    dist.all_gather([torch.zeros(4), torch.zeros(4)], expanded)  # an input may be like this
    return received.tolist()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_outputs_whose_elements_share_memory_are_refused():
    assert backends.run(2, shared_elements) == [[1.0] * 4, [0.0] * 4]
