"""A forked child may not touch its parent's group, and cannot spoil it by accident."""

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import subprocess
import threading
import weakref
from pathlib import Path

import pytest
import torch
from forked import in_child
from torch.utils.data import DataLoader, Dataset

import pycomm
from pycomm import _C
from pycomm._runtime import lifetime
from pycomm._training.replicas import Kinds, StateKind, _Area


def test_waits_are_refused(world):
    groups = world(2).groups
    done = pycomm.all_reduce(torch.ones(4), group=world(1).groups[0], async_op=True)
    done.wait()
    work = pycomm.all_reduce(torch.ones(4), group=groups[0], async_op=True)

    def body():
        done.wait()
        with pytest.raises(pycomm.GroupUnusable, match="parent of this forked"):
            work.wait()

    in_child(body)
    pycomm.all_reduce(torch.ones(4), group=groups[1])
    work.wait()


def test_operations_are_refused(world):
    local_world = world(2)
    group = local_world.groups[0]
    x, y = torch.ones(4), torch.ones(8)
    local_world.run(lambda g: pycomm.barrier(group=g))

    def body():
        for call in (
            lambda: pycomm.all_reduce(x, group=group),
            lambda: pycomm.all_reduce(x, out=torch.empty(4), group=group),
            lambda: pycomm.all_reduce(x, group=group, async_op=True),
            lambda: pycomm.reduce_scatter(x, y, group=group),
            lambda: pycomm.all_gather(y, x, group=group),
            lambda: pycomm.broadcast(x, group=group),
            lambda: pycomm.barrier(group=group),
            lambda: torch.ops.pycomm.all_reduce(x, "sum", "auto", group.name),
            lambda: group.empty(4),
        ):
            with pytest.raises((pycomm.GroupUnusable, RuntimeError), match="parent of this forked"):
                call()

    in_child(body)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]


def test_a_child_has_nothing_to_name(world):
    (group,) = world(1)
    group._core.subject = "mine"

    def body():
        assert group._core.subject == ""

    in_child(body)
    assert group._core.subject == "mine"
    group._core.subject = ""


def test_a_child_makes_a_group_of_its_own(world):
    local_world = world(2)
    local_world.run(lambda g: pycomm.barrier(group=g))

    def body():
        with pycomm.LocalWorld(2) as own:
            assert own.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]

    in_child(body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_child_that_closes_or_drops_the_group_harms_nobody(asynchronous):
    local_world = pycomm.LocalWorld(2, timeout=20)

    def use(group):
        work = pycomm.all_reduce(torch.ones(1), group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()

    local_world.run(use)

    def body():
        nonlocal local_world
        local_world.close()
        del local_world
        gc.collect()

    in_child(body)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]
    local_world.close()


def test_a_child_that_aborts_harms_nobody(world):
    local_world = world(2, timeout=20)
    in_child(local_world.groups[0].abort)
    assert local_world.run(lambda g: pycomm.all_reduce(torch.ones(1), group=g).item()) == [2, 2]


def test_a_child_that_drops_a_tensor_of_the_window_leaves_its_memory(world):
    group = world(2).groups[0]
    kept = [group.empty(100_000).fill_(7)]

    def body():
        kept.clear()
        gc.collect()

    in_child(body)
    assert bool((kept[0] == 7).all())


@pytest.mark.parametrize("count", [10, 1000, 5_000_000], ids=["small", "page", "own mapping"])
def test_a_child_has_tensors_of_the_window_as_they_were(world, count):
    group = world(2).groups[0]
    x, y = group.empty(count).fill_(1), group.empty(count).fill_(2)

    def body():
        assert bool((x == 1).all())
        assert bool((y == 2).all())
        x.fill_(3)
        in_child(lambda: x.add_(1), lambda: x.mul_(2))  # a grandchild
        assert bool((x == 6).all())

    in_child(body, lambda: x.fill_(5))
    assert bool((x == 5).all())
    assert bool((y == 2).all())


def test_children_of_many_forks_have_what_each_fork_saw(world):
    """Also if forks share a copy, if a copy is dropped meanwhile, or if a later copy is smaller."""
    group = world(1).groups[0]
    kept = [group.empty(100_000).fill_(0), group.empty(2000).fill_(0)]

    def check(number, size):
        assert [int(x.sum()) for x in kept] == [number * x.numel() for x in kept]
        assert len(kept) == size
        for x in kept:
            x.fill_(-1)

    def fork(number):
        size = len(kept)
        in_child(lambda: check(number, size), lambda: change(number))

    def change(number):
        if number % 2:
            pycomm.all_reduce(torch.ones(1), group=group)  # drops the copy
        for x in kept:
            x.fill_(number + 1)

    for number in range(4):
        in_child(lambda number=number: check(number, len(kept)))
        fork(number)
    kept.pop(0)
    gc.collect()
    fork(4)
    kept.append(group.empty(300_000).fill_(5))
    fork(5)
    assert [set(x.tolist()) for x in kept] == [{6.0}] * 2


def test_a_copy_goes_with_the_next_operation(world):
    group = world(1).groups[0]
    nbytes = 32 << 20
    x = group.empty(nbytes, dtype=torch.uint8).fill_(1)

    def anonymous():
        """Bytes of private memory that is in use."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if "Anonymous:" in line)

    before = anonymous()
    in_child(lambda: x.fill_(2))
    assert anonymous() - before > nbytes // 2
    pycomm.all_reduce(torch.ones(1), group=group)
    assert anonymous() - before < nbytes // 2


def test_without_memory_a_child_still_has_its_own(world, monkeypatch, caplog):
    """The child sees its parent's writes until it writes to a page; its own writes stay its own."""
    group = world(1).groups[0]
    x = group.empty(100_000).fill_(1)
    monkeypatch.setattr(lifetime._C, "copy_at_fork", lambda: False)

    def body():
        assert bool((x == 2).all())
        x.fill_(3)

    in_child(body, lambda: x.fill_(2))
    assert bool((x == 2).all())
    assert "writes to the tensors later" in caplog.text


class Writing(Dataset):
    """Writes to a tensor that the worker has inherited."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.x.fill_(7)
        return index


def test_workers_of_a_loader_and_programs_get_no_copy(world, monkeypatch):
    group = world(1).groups[0]
    x, copies = group.empty(1000).fill_(1), []
    monkeypatch.setattr(lifetime._C, "copy_at_fork", lambda: copies.append(1) or True)
    loader = DataLoader(Writing(x), num_workers=2, multiprocessing_context="fork")
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    subprocess.run(["true"], preexec_fn=lambda: x.fill_(7), check=True)
    assert copies == []
    assert bool((x == 1).all())
    in_child(lambda: None)
    assert copies == [1]


def test_threads_allocate_while_others_fork(world):
    group = world(1).groups[0]
    x, over = group.empty(1000).fill_(1), threading.Event()

    def allocate():
        while not over.is_set():
            kept = [group.empty(n * 1000).fill_(2) for n in range(1, 6)]
            del kept

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            in_child(lambda: x.fill_(3))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert bool((x == 1).all())


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (3, 5), (6, 8), (0, 8), (2, 3)])
def test_pages_are_private_to_children_until_they_are_taken_back(begin, end):
    """Of eight pages, which are given in two pieces; then some of them are taken back."""
    page, fd = mmap.PAGESIZE, os.memfd_create("pages")
    os.ftruncate(fd, 10 * page)
    with contextlib.closing(mmap.mmap(fd, 8 * page, offset=2 * page)) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for first, last in ((0, 4), (4, 8)):
            at = address + first * page
            _C.make_private_in_children(at, (last - first) * page, fd, (2 + first) * page)
        try:
            _C.leave_as_is_in_children(address + begin * page, (end - begin) * page)

            def write():
                for number in range(8):
                    memory[number * page] = 1 + number

            def look_and_write():
                shared = [memory[number * page] == 1 + number for number in range(8)]
                assert shared == [begin <= number < end for number in range(8)]
                memory[: 8 * page] = bytes(8 * page)

            in_child(look_and_write, write)
            left = [memory[number * page] for number in range(8)]
            assert left == [0 if begin <= n < end else 1 + n for n in range(8)]
        finally:
            _C.leave_as_is_in_children(address, 8 * page)
            gc.collect()
    os.close(fd)


def test_replicas_are_private_to_children_as_long_as_their_tensors_live():
    """Also if the replicas that they belonged to are gone; then the memory is, too."""
    kinds = Kinds([StateKind(torch.float32, (1000,))], [])
    file = _C.create_file(kinds.nbytes([0]), "replicas")
    area = _Area(file, [0], kinds)
    area.make_private_in_children(file)
    os.close(file)
    kept, gone = [area.own.versions[0][0].fill_(1)], weakref.ref(area._map)
    del area
    gc.collect()
    in_child(lambda: kept[0].fill_(2))
    assert bool((kept[0] == 1).all())
    kept.clear()
    gc.collect()
    assert gone() is None


def test_sockets_are_closed_in_children():
    """A descriptor that is another file by then stays open."""
    (one, other), (kept, _far) = socket.socketpair(), socket.socketpair()
    _C.close_in_children([one.fileno(), kept.fileno()])
    read, write = os.pipe()
    number = kept.detach()
    os.dup2(write, number)
    with one, other:

        def body():
            with pytest.raises(OSError, match="socket"):
                one.send(b"x")
            os.write(number, b"y")

        in_child(body)
        os.set_blocking(read, False)
        assert os.read(read, 1) == b"y"
        one.send(b"z")
        assert other.recv(1) == b"z"
    for fd in (read, write, number):
        os.close(fd)
