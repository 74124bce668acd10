"""Ranks touch only certain neighbours' memory: they still work with the rest made inaccessible."""

import ctypes
import mmap
from pathlib import Path

import golden
import helpers
import pytest
import torch

import pycomm
from pycomm._runtime.rendezvous import slice_bytes

PROT = {"none": 0, "read": 1}
SIZE = 5
STAGING = 1 << 20
SUBJECTS = 256 * 128  # bytes of texts behind it
LIBC = ctypes.CDLL(None, use_errno=True)


def mappings():
    """Mappings of the only window: address, length, offset in the file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:pycomm" in line:
            addresses, _, offset = line.split()[:3]
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.append((begin, end - begin, int(offset, 16)))
    return found


def forbid(ranks, size, what):
    """Makes ranks' staging and heaps inaccessible: a process that touches them is killed."""
    data = helpers.data_begin(size)
    before_heap = data + STAGING + SUBJECTS
    heap = slice_bytes() - before_heap
    assert data % mmap.PAGESIZE == STAGING % mmap.PAGESIZE == 0
    forbidden = []
    for address, length, offset in mappings():
        if offset == 0:  # what comes before the heaps, of all ranks
            forbidden += [(address + rank * before_heap + data, STAGING) for rank in ranks]
        elif (offset - size * before_heap) // heap in ranks:
            forbidden.append((address, length))
    for address, length in forbidden:
        done = LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), PROT[what])
        assert done == 0, ctypes.get_errno()
    return len(forbidden)


def reduce_with_blinkers(group, algorithm, in_window, needed, what):
    """The data of the ranks `needed` stay accessible; of other ranks only the page of flags."""
    x = group.empty(50_000) if in_window else torch.empty(50_000)
    for turn in range(4):
        x.fill_(group.rank + 1)
        pycomm.barrier(group=group)
        pycomm.all_reduce(x, algorithm=algorithm, group=group)
        assert torch.equal(x, torch.full((50_000,), float(sum(range(1, group.size + 1)))))
        pycomm.barrier(group=group)
        if turn == 0:  # by now all heaps are mapped
            ranks = set(range(group.size)) - {group.rank} - needed[group.rank]
            assert forbid(ranks, group.size, what) == len(ranks) * (2 if in_window else 1)
    return True


def tree_neighbours():
    near = [set() for _ in range(SIZE)]
    for root in golden.double_tree(SIZE):
        for node in root.walk():
            for child in node.children():
                near[node.rank].add(child.rank)
                near[child.rank].add(node.rank)
    return near


NEEDED = {
    "ring": [{(rank - 1) % SIZE} for rank in range(SIZE)],
    "tree": tree_neighbours(),
}


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("algorithm", NEEDED)
def test_only_neighbours_are_read(algorithm, in_window):
    arguments = (algorithm, in_window, NEEDED[algorithm], "none")
    results = helpers.run_group(SIZE, reduce_with_blinkers, *arguments, staging_bytes=STAGING)
    assert results == [True] * SIZE


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "tree"])
def test_nobody_writes_to_others_unless_in_the_window(algorithm):
    arguments = (algorithm, False, [set()] * SIZE, "read")
    results = helpers.run_group(SIZE, reduce_with_blinkers, *arguments, staging_bytes=STAGING)
    assert results == [True] * SIZE


def test_the_blinkers_work():
    """The same, with one neighbour too many forbidden: the process ends by SIGSEGV."""
    needed = [set(), *NEEDED["ring"][1:]]
    with helpers.Ranks(
        SIZE,
        helpers.in_group,
        reduce_with_blinkers,
        {"staging_bytes": STAGING},
        "ring",
        False,
        needed,
        "none",
    ) as ranks:
        outcomes = ranks.join()
    assert outcomes[0].exitcode == -11
    assert {type(outcome.error) for outcome in outcomes[1:]} == {pycomm.PeerDied}
    assert {outcome.error.rank for outcome in outcomes[1:]} == {0}
