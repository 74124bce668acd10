"""The backend's errors for bad arguments, beside Gloo's: code written for torch catches them."""

import datetime
import re

import backends
import pytest
import torch
import torch.distributed as dist

import pycomm

SIZE = 2
ones, Op = torch.ones, dist.ReduceOp


def blocks(*sizes, dtype=torch.float32):
    return [ones(size, dtype=dtype) for size in sizes]


def gathering(group, outputs, root):
    options = dist.GatherOptions()
    options.rootRank = root
    return group.gather(outputs, [ones(4)], options)


# Calls that both backends refuse before they begin; they get a group, and this rank.
CALLS = {
    "band of floats": lambda g, _r: dist.all_reduce(ones(4), Op.BAND, g),
    "min of complex numbers": lambda g, _r: dist.all_reduce(ones(4) + 1j, Op.MIN, g),
    "factor for integers": lambda g, _r: dist.all_reduce(
        ones(4, dtype=torch.int64), dist._make_nccl_premul_sum(2.0), g
    ),
    "no tensors": lambda g, _r: dist.all_reduce_coalesced([], group=g),
    "mixed dtypes": lambda g, _r: dist.all_reduce_coalesced([ones(2), ones(2).long()], group=g),
    "no such dtype": lambda g, _r: dist.broadcast(torch.empty(4, dtype=torch.bits8), 0, g),
    "no such source": lambda g, _r: g.broadcast(ones(4), 5),
    "no such root": lambda g, _r: g.reduce(ones(4), -3),
    "short list": lambda g, _r: dist.all_gather(blocks(4), ones(4), g),
    "other dtype in a list": lambda g, _r: dist.all_gather(
        blocks(4, 4, dtype=torch.int64), ones(4), g
    ),
    "other sizes in a list": lambda g, _r: dist.all_gather(blocks(3, 3), ones(4), g),
    "output too small": lambda g, _r: dist.all_gather_into_tensor(ones(5), ones(4), g),
    "output of another dtype": lambda g, _r: dist.all_gather_into_tensor(
        ones(8, dtype=torch.int64), ones(4), g
    ),
    "no list at the root": lambda g, r: dist.gather(ones(4), None, dst=r, group=g),
    "a list elsewhere": lambda g, r: gathering(g, [blocks(4, 4)], 1 - r),
    "short gather_list": lambda g, r: gathering(g, [blocks(4)], r),
    "short scatter_list": lambda g, r: g.scatter(ones(4), blocks(4), r),
    "other sizes to scatter": lambda g, r: g.scatter(ones(4), blocks(3, 3), r),
    "short input_list": lambda g, _r: dist.reduce_scatter(ones(4), blocks(4), group=g),
    "input too large": lambda g, _r: dist.reduce_scatter_tensor(ones(3), ones(8), group=g),
    "input of another dtype": lambda g, _r: dist.reduce_scatter_tensor(
        ones(4), ones(8, dtype=torch.int64), group=g
    ),
    "wrong splits": lambda g, _r: dist.all_to_all_single(ones(4), ones(4), [3, 3], [2, 2], g),
    "too few splits": lambda g, _r: dist.all_to_all_single(ones(4), ones(4), [4], [2, 2], g),
    "other number": lambda g, _r: dist.all_to_all_single(ones(2), ones(4), group=g),
    "short all_to_all": lambda g, _r: dist.all_to_all(blocks(4), blocks(4, 4), group=g),
    "two tensors to send": lambda g, r: g.send([ones(4), ones(4)], 1 - r, 0),
    "sparse message": lambda g, r: g.send([ones(4).to_sparse()], 1 - r, 0),
}
# Calls that Gloo accepts or only waits for.
OURS = {
    "no such rank to send to": lambda g, _r: g.send([ones(4)], 9, 0),
    "no such rank to receive from": lambda g, _r: g.recv([ones(4)], -2, 0),
    "uneven all_to_all": lambda g, _r: dist.all_to_all_single(ones(5), ones(5), group=g),
    "negative timeout": lambda g, _r: g.barrier(timeout=datetime.timedelta(seconds=-5)),
    "negative patience": lambda g, _r: g.barrier().wait(datetime.timedelta(seconds=-5)),
}


def error_of(call, group, rank):
    try:
        work = call(group, rank)
        if work is not None:
            work.wait()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def call_all(rank, _size):
    """Errors by name of the call: this backend's, and Gloo's."""
    group = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    ours = {name: error_of(call, group, rank) for name, call in (CALLS | OURS).items()}
    theirs = {name: error_of(call, gloo, rank) for name, call in CALLS.items()}
    x = ones(3)
    dist.all_reduce(x)  # no call has begun
    assert x.tolist() == [2.0] * 3
    return ours, theirs


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_errors_beside_those_of_gloo():
    for ours, theirs in backends.run(SIZE, call_all):
        for name, (kind, text) in ours.items():
            assert kind is not None, name
            if name in theirs:
                wanted = theirs[name][0]
                assert wanted is not None, name
                caught = (ValueError, TypeError, RuntimeError)
                for base in caught:
                    assert not issubclass(wanted, base) or issubclass(kind, base), (name, kind)
            else:
                assert kind is pycomm.ArgumentError, (name, kind, text)
            if kind in (pycomm.ArgumentError, pycomm.ArgumentTypeError):
                assert clean(text), text


def clean(text):
    """Whether a message has no place in the source and no frames of C++."""
    return not re.search(r"\.(h|cpp|cuh|cu):\d|csrc/|Exception raised from|frame #", text)


def test_messages_name_no_source_files(world):
    """The messages of pycomm._C, of torch.ops, and of the optimizers."""
    group = world(1).groups[0]
    x = ones(4)
    calls = [
        lambda: torch.ops.pycomm.all_reduce_(x, "medium", "auto", group.name),
        lambda: torch.ops.pycomm.all_reduce_(x, "sum", "auto", "no group"),
        lambda: torch.ops.pycomm.all_reduce_(x[::2], "sum", "auto", group.name),
        lambda: pycomm.all_reduce(x, "band", group=group),
        lambda: pycomm.Int8(block=3),
        lambda: pycomm.isend(x, 0, group=group, timeout=-1),
        lambda: group._core.isend(x.data_ptr(), x.nbytes, 0, 0, 0, -1.0),
        lambda: group._core.published(7),
        lambda: pycomm.LocalWorld(2, staging_bytes=1),
    ]
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        assert clean(str(error.value)), str(error.value)


def late(rank, _size):
    if rank == 1:
        x = ones(1)
        dist.recv(x, 0)
        dist.barrier()
        return None
    work = dist.barrier(async_op=True)
    with pytest.raises(dist.DistBackendError) as error:
        work.wait(datetime.timedelta(milliseconds=20))
    dist.send(ones(1), 1)
    work.wait()
    return str(error.value)


def test_a_late_work_shows_no_frames_of_cpp():
    text = backends.run(2, late)[0]
    assert "not complete after 20 ms" in text
    assert clean(text), text
