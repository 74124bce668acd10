"""Groups, timeouts and reductions as in torch.distributed, and NumPy arrays."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import helpers
import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pycomm
from pycomm.group import DEFAULT_TIMEOUT


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, DEFAULT_TIMEOUT),
        (timedelta(minutes=1), 60),
        (7, 7),
        (numpy.float32(0.5), 0.5),
        (torch.tensor(3.0).item(), 3),
    ],
)
def test_timeouts(timeout, expected):
    with pycomm.LocalWorld(1, timeout) as world:
        assert world.groups[0].timeout == expected
        assert isinstance(world.groups[0].timeout, float)


WRONG_TIMEOUTS = {
    "60": (TypeError, "timeout must be seconds, a datetime.timedelta or None for 300 s, got '60'"),
    True: (TypeError, "got True"),
    0: (ValueError, "timeout must be positive, got 0"),
    timedelta(seconds=-1): (ValueError, "timeout must be positive, got -1 day, 23:59:59"),
    float("nan"): (ValueError, "timeout must be positive, got nan"),
    float("inf"): (ValueError, "timeout must be at most 1000000000 s, got inf"),
}


@pytest.mark.parametrize("timeout", WRONG_TIMEOUTS, ids=str)
def test_wrong_timeouts(timeout):
    kind, message = WRONG_TIMEOUTS[timeout]
    for make in (lambda: pycomm.init(timeout=timeout), lambda: pycomm.LocalWorld(2, timeout)):
        with pytest.raises(kind, match=re.escape(message)):
            make()


def test_what_is_no_process_group():
    allowed = "a torch.distributed process group, a DeviceMesh of one dimension or None"
    with pytest.raises(TypeError, match=f"group must be {allowed}, got 60: pass timeout=60"):
        pycomm.init(60)
    with pytest.raises(TypeError, match=f"group must be {allowed}, got 'gloo'"):
        pycomm.init("gloo")
    with pytest.raises(ValueError, match="group must contain this process"):
        pycomm.init(dist.GroupMember.NON_GROUP_MEMBER)


def meshes(rank, size, store):
    helpers.join_world(rank, size, store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with pytest.raises(ValueError, match="group must be a DeviceMesh of one dimension, got Dev"):
        pycomm.init(mesh)
    with pytest.raises(TypeError, match=r"group must be a pycomm\.Group or None, got .*: make a"):
        pycomm.all_reduce(torch.ones(1), group=mesh["inner"])
    with pytest.raises(
        TypeError, match=r"make a pycomm.Group from it, once, with pycomm\.init\(group\)"
    ):
        pycomm.barrier(group=dist.group.WORLD)
    with pytest.raises(
        TypeError, match=r"make a pycomm.Group from it, once, with pycomm\.init\(group\)"
    ):
        pycomm.DataParallel(torch.nn.Linear(1, 1), group=dist.group.WORLD)
    with pycomm.init(mesh["inner"]) as group, pycomm.init(dist.group.WORLD, None) as world:
        ranks = torch.tensor([rank])
        inner = pycomm.all_reduce(ranks.clone(), dist.ReduceOp.MAX, group=group)
        return inner.item(), pycomm.all_reduce(ranks, "max", group=world).item()


def test_groups_of_torch():
    assert helpers.run_ranks(4, meshes) == [(1, 3), (1, 3), (3, 3), (3, 3)]


REDUCTIONS = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_torch(world, name):
    own, torchs = REDUCTIONS[name], getattr(dist.ReduceOp, name)

    def body(group):
        x = torch.arange(8.0) + group.rank
        for op in (torchs, dist.ReduceOp(torchs)):
            assert torch.equal(
                pycomm.all_reduce(x.clone(), op, group=group),
                pycomm.all_reduce(x.clone(), own, group=group),
            )
        halves = [pycomm.reduce_scatter(torch.empty(4), x, op, group=group) for op in (torchs, own)]
        assert torch.equal(*halves)
        if own in ("sum", "avg"):
            sums = [
                pycomm.compressed_all_reduce(x.clone(), pycomm.Int8(), op=op, group=group)
                for op in (torchs, own)
            ]
            assert torch.equal(*sums)

    world(2).run(body)


def arrays(group):
    """Results lie in the arrays themselves, which also come back."""
    x = numpy.arange(4, dtype=numpy.float32) + group.rank
    total = numpy.arange(4) * 2 + 1
    out = numpy.empty_like(x)
    assert pycomm.all_reduce(x, out=out, group=group) is out
    assert (out == total).all()
    strided = numpy.zeros(8, dtype=numpy.float32)[::2]
    strided[:] = x
    assert pycomm.all_reduce(strided, group=group) is strided
    assert (strided == total).all()
    later = x.copy()
    pycomm.all_reduce(later, group=group, async_op=True).wait()
    assert (later == total).all()
    half = numpy.empty(2, dtype=numpy.float32)
    assert pycomm.reduce_scatter(half, x, group=group) is half
    assert (half == total[2 * group.rank :][:2]).all()
    everything = numpy.empty(4, dtype=numpy.float32)
    x.flags.writeable = False  # what is only read may be read-only
    assert pycomm.all_gather(everything, x[:2], group=group) is everything
    assert everything.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="tensor must be writable, got a read-only array"):
        pycomm.all_reduce(x, group=group)
    theirs = numpy.array([group.rank], dtype=numpy.int64)
    assert pycomm.broadcast(theirs, 1, group=group) is theirs
    assert theirs == 1


def arrays_elsewhere(group):
    """Compressed operations, codecs and messages."""
    x = numpy.arange(400, dtype=numpy.float32) + group.rank
    residual, out = numpy.zeros_like(x), numpy.empty_like(x)
    options = {"residual": residual, "out": out, "group": group}
    assert pycomm.compressed_all_reduce(x, pycomm.Int8(), **options) is out
    assert abs(out - numpy.arange(400) - 0.5).max() < 2
    assert residual.any()
    own = numpy.empty(200, dtype=numpy.float32)
    assert pycomm.compressed_reduce_scatter(own, x, pycomm.Int8(), group=group) is own
    wire = pycomm.Int8().encode(x)
    assert type(wire) is numpy.ndarray
    assert wire.tolist() == pycomm.Int8().encode(torch.from_numpy(x)).tolist()
    decoded = pycomm.Int8().decode(wire, 400)
    assert type(decoded) is numpy.ndarray
    assert abs(decoded - x).max() < 2
    half = pycomm.Int8().decode(wire, 400, dtype=torch.bfloat16)  # which NumPy lacks
    assert torch.equal(half, torch.from_numpy(decoded).bfloat16())
    assert pycomm.Int8().decode(wire, 400, own := numpy.empty_like(x)) is own
    assert (own == decoded).all()
    indices, values = pycomm.TopK(k=2).select(x)
    assert type(indices) is type(values) is numpy.ndarray
    assert (x[indices] == values).all()
    if group.rank == 0:
        pycomm.send(x[::2], 1, group=group)
    else:
        with pytest.raises(ValueError, match="tensor must be writable, got a read-only array"):
            pycomm.recv(numpy.broadcast_to(x[:1], (200,)), 0, group=group)
        strided = numpy.zeros(400, dtype=numpy.float32)[::2]
        assert pycomm.irecv(strided, 0, group=group).source == 0
        assert (strided == numpy.arange(0, 400, 2)).all()


def test_arrays_in_compressed_operations_codecs_and_messages(world):
    world(2).run(arrays_elsewhere)
    helpers.run_group(2, arrays_elsewhere)


def test_arrays_in_all_collectives(world):
    world(2).run(arrays)
    helpers.run_group(2, arrays)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import pycomm

class Careless(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return pycomm.all_reduce(torch.ones(1))

if sys.argv[1] == "without a guard":
    try:
        pycomm.init(timeout=20)
    except RuntimeError as error:
        print(error, flush=True)  # the loader may kill its worker
if __name__ == "__main__":
    for context in ("spawn", "fork"):
        loader = DataLoader(Careless(), num_workers=1, multiprocessing_context=context, timeout=60)
        try:
            print("made a group:", next(iter(loader)))
        except RuntimeError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["with a guard", "without a guard"])
def test_a_worker_of_a_data_loader_is_no_rank(tmp_path, how):
    """Workers inherit torchrun's environment; spawned ones import the script once more."""
    (tmp_path / "script.py").write_text(SCRIPT)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), how],
        env={**os.environ, **rank},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "made a group" not in done.stdout
    # A forked worker of a process that has a group refuses that one instead.
    assert done.stdout.count("such as a worker of a DataLoader, and not a rank itself") == 2
