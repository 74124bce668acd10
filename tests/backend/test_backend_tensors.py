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


def counts_of_writes(rank, size):
    """How often each output has been written, as autograd counts; each is written once."""

    def row():
        return torch.zeros(4)

    def rows():
        return [row() for _ in range(size)]

    rooted = rows() if rank == 0 else None
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x[0]),
        "broadcast": lambda x: dist.broadcast(x[0], 1),
        "all_gather": lambda x: dist.all_gather(x, torch.ones(4)),
        "reduce_scatter": lambda x: dist.reduce_scatter(x[0], rows()),
        "all_to_all": lambda x: dist.all_to_all(x, rows()),
        "scatter": lambda x: dist.scatter(x[0], rooted),
        "gather": lambda x: dist.gather(torch.ones(4), x if rank == 0 else None),
    }
    seen = {}
    for name, call in calls.items():
        for kind, make in {"plain": rows, "strided": lambda: [torch.zeros(8)[::2], row()]}.items():
            outputs = make()
            call(outputs)
            written = outputs if name in ("all_gather", "all_to_all", "gather") else outputs[:1]
            if name not in ("gather", "broadcast") or rank == 0:  # the other one only reads
                seen[name, kind] = min(output._version for output in written)
    whole = torch.zeros(4 * size)
    dist.all_gather_into_tensor(whole, torch.ones(4))
    seen["all_gather_into_tensor"] = whole._version
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.ones(2 * size))
    seen["reduce_scatter_tensor"] = part._version
    dist.all_to_all_single(whole, torch.ones(4 * size))
    seen["all_to_all_single"] = whole._version - 1
    request, received = dist.isend(torch.ones(4), (rank + 1) % size), row()
    dist.recv(received, (rank - 1) % size)
    request.wait()
    seen["recv"] = received._version
    return seen


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_writes_are_counted():
    for seen in backends.run(2, counts_of_writes):
        assert not {name: count for name, count in seen.items() if count < 1}


def overwrites_what_autograd_has_saved(_rank, size):
    weight = torch.ones(4, requires_grad=True)
    gathered = [torch.ones(4) for _ in range(size)]
    loss = sum((weight * part).sum() for part in gathered)
    dist.all_gather(gathered, torch.full((4,), 7.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_that_a_saved_output_is_overwritten():
    backends.run(2, overwrites_what_autograd_has_saved)
