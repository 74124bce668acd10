"""Broadcast: the root's tensor, with every bit; and the barrier."""

import threading
import time

import golden
import helpers
import pytest
import sweep
import torch

import pycomm

LAYOUTS = ("plain", "offset", "strided", "window", "window offset", "window on even ranks")


def counts(size, dtype):
    slot = golden.slot_elements(sweep.small_staging(size), dtype.itemsize)
    return sorted({0, 1, 3, 17, slot - 1, slot, slot + 1, 4 * slot, 5 * slot + 1, 9 * slot + 7})


def told(group, cases):
    seen = []
    for src, dtype, count, layout in cases:
        how = layout
        if layout == "window on even ranks":
            how = "plain" if group.rank % 2 else "window"
        buffer = sweep.Buffer(group, dtype, count, how)
        tensor = buffer.tensor
        tensor.copy_(sweep.Case("", "sum", dtype, count).input(group.rank))
        returned = pycomm.broadcast(tensor, src, group=group)
        clean = returned is tensor and buffer.surroundings_intact()
        flags = group._core.published(group.rank)[1:]
        seen.append((tensor.clone(), clean, group.traffic(), flags))
    return seen


def check(cases, seen, staging_bytes):
    size = len(seen)
    for index, (src, dtype, count, layout) in enumerate(cases):
        expected = sweep.Case("", "sum", dtype, count).input(src)
        zero_copy = layout in sweep.ZERO_COPY
        tile = count if zero_copy else golden.slot_elements(staging_bytes, dtype.itemsize)
        steps = 2 * -(-count // tile) if count and size > 1 else 0
        for rank in range(size):
            result, clean, traffic, flags = seen[rank][index]
            where = (src, dtype, count, layout, rank, size)
            assert golden.same_bits(result, expected), where
            assert clean, where
            read = count * dtype.itemsize if rank != src else 0
            assert traffic == (steps, read, 0), where
            assert flags == seen[0][index][3], where


def all_cases(size):
    return [
        (src, dtype, count, LAYOUTS[(turn + src + at) % len(LAYOUTS)])
        for src in range(size)
        for at, dtype in enumerate(sweep.DTYPES)
        for turn, count in enumerate(counts(size, dtype))
    ]


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact_from_every_source(world, size):
    cases, staging_bytes = all_cases(size), sweep.small_staging(size)
    check(cases, world(size, staging_bytes=staging_bytes).run(told, cases), staging_bytes)


def test_exact_in_processes():
    cases, staging_bytes = all_cases(3), sweep.small_staging(3)
    check(cases, helpers.run_group(3, told, cases, staging_bytes=staging_bytes), staging_bytes)


@pytest.mark.parametrize("size", [2, 5])
def test_large_tensors(world, size):
    cases = [(0, torch.float32, 900_001, "plain"), (1, torch.float16, 700_000, "window")]
    check(cases, world(size).run(told, cases), 2 << 20)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_nobody_leaves_a_barrier_before_all_have_come(world, size):
    arrived, lock = [0], threading.Lock()

    def body(group):
        for turn in range(30):
            if turn % size == group.rank:
                time.sleep(0.003)
            with lock:
                arrived[0] += 1
            pycomm.barrier(group=group)
            with lock:
                assert arrived[0] >= size * (turn + 1)
            pycomm.barrier(group=group, async_op=True).wait()

    world(size).run(body)


def test_a_barrier_gives_no_signals_and_moves_nothing(world):
    def body(group):
        before = group._core.published(group.rank)
        assert pycomm.barrier(group=group) is None
        after = group._core.published(group.rank)
        return before[1:] == after[1:], group.traffic()

    assert world(4).run(body) == [(True, (0, 0, 0))] * 4


def meet(group, path):
    """Each process leaves a mark, then all must see all marks."""
    complete = True
    for turn in range(20):
        (path / f"{turn}-{group.rank}").touch()
        pycomm.barrier(group=group)
        complete = complete and len(list(path.glob(f"{turn}-*"))) == group.size
    return complete


def test_a_barrier_between_processes(tmp_path):
    assert helpers.run_group(3, meet, tmp_path) == [True] * 3
