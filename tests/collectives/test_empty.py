"""group.empty: tensors in the window, with memory that is freed together with them."""

import gc
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import helpers
import pytest
import sweep
import torch

import pycomm
from pycomm._runtime.rendezvous import slice_bytes


def window_bytes():
    """Memory that the windows of this process take."""
    taken = {}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:pycomm" in str(fd.readlink()):
                status = fd.stat()
                taken[status.st_ino] = status.st_blocks * 512
    return sum(taken.values())


def lies_in_a_window(tensor):
    """True if the tensor lies in a window according to the kernel."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:pycomm" in line
    raise AssertionError("no memory at all")


@pytest.fixture
def group(world):
    return world(2).groups[0]


@pytest.mark.parametrize("dtype", sweep.DTYPES, ids=str)
def test_shape_and_dtype(group, dtype):
    for shape in ((), (7,), (0,), (3, 0, 2), (2, 3, 5)):
        x = group.empty(*shape, dtype=dtype)
        assert x.shape == torch.Size(shape)
        assert x.dtype == dtype
        assert x.device.type == "cpu"
        assert x.is_contiguous()
        x.fill_(3)
        assert bool((x == 3).all())
    assert group.empty(4).dtype == torch.float32


def test_lies_in_the_window(group):
    x, y = group.empty(1000), torch.empty(1000)
    assert lies_in_a_window(x)
    assert not lies_in_a_window(y)
    assert x.data_ptr() % 64 == 0


def test_tensors_do_not_overlap(group):
    tensors = [group.empty(1000 + 300 * i).fill_(i) for i in range(50)]
    del tensors[::3]
    gc.collect()
    tensors += [group.empty(1000 + 700 * i).fill_(100 + i) for i in range(50)]
    for x in tensors:
        assert bool((x == x[0]).all())
    spans = sorted((x.data_ptr(), x.data_ptr() + 4 * x.numel()) for x in tensors)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_memory_goes_back(world, monkeypatch):
    """A loop takes far more memory in total than the window has, in pieces of different sizes."""
    monkeypatch.setattr("pycomm.local_world.slice_bytes", lambda: 256 << 20)
    group = world(2).groups[0]
    for turn in range(40):
        x = group.empty((100 << 20) + 4096 * turn, dtype=torch.uint8)
        y = group.empty(1000 + 1000 * turn)
        x[:: 1 << 20] = 1
        y.fill_(1)
        del x, y
    assert group.empty(200 << 20, dtype=torch.uint8).numel() == 200 << 20


def test_freed_memory_leaves_the_node(group):
    before = window_bytes()
    assert before >= 2 * (2 << 20)  # two ranks' staging
    x = group.empty(100_000_000, dtype=torch.uint8)
    assert window_bytes() - before >= 100_000_000  # reserved at once
    del x
    assert window_bytes() == before


def test_too_much_is_refused_and_the_group_still_works(world):
    def body(group):
        for count in (1 << 45, slice_bytes() - (1 << 20)):
            with pytest.raises(MemoryError, match="window"):
                group.empty(count, dtype=torch.uint8)
        x = group.empty(1000).fill_(1)
        pycomm.all_reduce(x, algorithm="ring", group=group)
        return x.sum().item()

    assert world(2).run(body) == [2000.0] * 2


def test_tensors_outlive_the_group():
    with pycomm.LocalWorld(2) as local_world:
        x = local_world.groups[1].empty(100_000)
        view = x.fill_(7)[500:]
        del x
    del local_world
    gc.collect()
    assert bool((view == 7).all())
    view.fill_(8)
    assert bool((view == 8).all())


def test_recycled_memory_serves_collectives(world):
    """Ranks allocate and free at their own pace, so that their offsets differ."""

    def body(group):
        kept = []
        for turn in range(40):
            if turn % (group.rank + 2) == 0:
                kept.append(group.empty(1024 * (turn + 1)))
            if len(kept) > 3:
                kept.pop(group.rank % 3)
            x = group.empty(2000 + turn).fill_(group.rank + turn)
            algorithm = sweep.ALGORITHMS[turn % 4]
            pycomm.all_reduce(x, algorithm=algorithm, group=group)
            assert torch.equal(x, torch.full((2000 + turn,), 3.0 * turn + 3)), (turn, group.rank)

    world(3).run(body)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.bits8])
def test_dtype_must_be_supported(group, dtype):
    with pytest.raises(ValueError, match="dtype must have one of the dtypes float64, float32"):
        group.empty(4, dtype=dtype)


def fill(group):
    before = window_bytes()
    x = group.empty(64 << 20, dtype=torch.uint8).fill_(group.rank + 1)
    pycomm.barrier(group=group)
    taken = window_bytes() - before
    pycomm.all_reduce(x, "max", algorithm="two_shot", group=group)
    return int(x[-1]), taken >= 64 << 20


def test_processes_share_one_window():
    """Every rank sees at least its own tensor in the file that all of them map."""
    assert helpers.run_group(3, fill) == [(3, True)] * 3
