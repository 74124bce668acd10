"""Every operation names the same culprit on every rank if one dies, stops or disagrees."""

import os
import signal
import time

import backends
import pytest
import torch
import torch.distributed as dist

import pycomm

VICTIM = 1
LARGE = 4_000_000  # elements: an operation that takes a while


def parts(x, count=3):
    return [x.clone() for _ in range(count)]


def on_root(rank, tensors):
    return tensors if rank == 0 else None


# What rank `rank` of three does, on a tensor of its own.
OPERATIONS = {
    "all_reduce": lambda _, x: dist.all_reduce(x),
    "all_reduce_async": lambda _, x: dist.all_reduce(x, async_op=True).wait(),
    "future": lambda _, x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "coalesced": lambda _, x: dist.all_reduce_coalesced([x, x.clone()]),
    "broadcast": lambda _, x: dist.broadcast(x, VICTIM),
    "reduce": lambda _, x: dist.reduce(x, 0),
    "all_gather": lambda _, x: dist.all_gather(parts(x), x),
    "all_gather_into_tensor": lambda _, x: dist.all_gather_into_tensor(torch.cat(parts(x)), x),
    "reduce_scatter": lambda _, x: dist.reduce_scatter(x.clone(), parts(x)),
    "reduce_scatter_tensor": lambda _, x: dist.reduce_scatter_tensor(x, torch.cat(parts(x))),
    "gather": lambda rank, x: dist.gather(x, on_root(rank, parts(x))),
    "scatter": lambda rank, x: dist.scatter(x, on_root(rank, parts(x))),
    "all_to_all": lambda _, x: dist.all_to_all(parts(x), parts(x)),
    "all_to_all_single": lambda _, x: exchange_blocks(torch.cat(parts(x))),
    "objects": lambda rank, x: dist.all_gather_object([None] * 3, x.numel() + rank),
    "barrier": lambda _, _x: dist.barrier(),
    "messages": lambda rank, x: exchange(rank, x),
}  # fmt: skip


def exchange_blocks(x):
    dist.all_to_all_single(torch.empty_like(x), x)


def exchange(rank, x):
    """A ring of messages."""
    y = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % 3),
        dist.P2POp(dist.irecv, y, (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def suffer(rank, _size, operation, harm):
    run = OPERATIONS[operation]
    run(rank, torch.ones(30))
    dist.barrier()
    time.sleep(0.2)  # until every rank has left the barrier
    x = torch.ones(LARGE if harm == "killed in it" else 30)
    if rank == VICTIM:
        if harm in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        if harm == "killed in it":
            signal.setitimer(signal.ITIMER_REAL, 0.004)  # SIGALRM ends the process
        if harm == "other size":
            x = torch.ones(60)
    start = time.monotonic()
    try:
        for _ in range(1_000_000 if harm == "killed in it" else 1):
            run(rank, x)
        run(rank, torch.ones(30))  # a rank may have done its part before the others failed
    except pycomm.CollectiveError as error:
        return type(error).__name__, error.rank, time.monotonic() - start
    return None


EXPECTED = {
    "killed": ("PeerDied", (VICTIM,)),
    "killed in it": ("PeerDied", (VICTIM,)),
    "stopped": ("Timeout", (VICTIM,)),
    "other size": ("Mismatch", (0, 1, 2)),  # the two sides of a mismatch are equal
}

NO_SIZE = ("barrier", "objects")  # ranks cannot disagree about it
CASES = [
    (operation, harm)
    for operation in OPERATIONS
    for harm in EXPECTED
    if harm != "other size" or operation not in NO_SIZE
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "harm"), CASES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_rank_raises(operation, harm):
    seconds = 1.5 if harm == "stopped" else 60
    with backends.ranks(3, suffer, operation, harm, seconds=seconds) as ranks:
        survivors = [0, 2] if harm != "other size" else [0, 1, 2]
        outcomes = ranks.wait_for(survivors)
    kind, culprits = EXPECTED[harm]
    named = set()
    for outcome in outcomes:
        assert outcome.value is not None, outcome.trace
        name, rank, took = outcome.value
        assert name == kind
        assert rank in culprits
        assert took < 10
        named.add(rank)
    assert len(named) == 1
