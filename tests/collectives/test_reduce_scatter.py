"""Reduce-scatter: rank r gets block r, added in rank order and rounded once."""

import golden
import helpers
import pytest
import sweep
import torch
from textbook import lengths

import pycomm

LAYOUTS = ("plain", "offset", "strided", "window", "window offset", "window on even ranks")


def block_counts(size, dtype):
    """Counts around the size of a rank's share of a slot."""
    slot = golden.slot_elements(sweep.small_staging(size), dtype.itemsize)
    share = max(slot // size, 1)
    return sorted(
        {0, 1, 3, 13, share - 1, share, share + 1, 4 * share, 5 * share + 1, 9 * share + 7}
    )


def scattered(group, cases):
    """For each case: the block, whether all else is untouched, traffic and flags."""
    seen = []
    for op, dtype, count, layout in cases:
        how = layout
        if layout == "window on even ranks":
            how = "plain" if group.rank % 2 else "window"
        source = sweep.Buffer(group, dtype, count * group.size, how)
        given = sweep.Case("", op, dtype, count * group.size).input(group.rank)
        source.tensor.copy_(given)
        target = sweep.Buffer(group, dtype, count, how)
        output = target.tensor
        returned = pycomm.reduce_scatter(output, source.tensor, op, group=group)
        clean = returned is output and golden.same_bits(source.tensor, given)
        clean = clean and target.surroundings_intact() and source.surroundings_intact()
        flags = group._core.published(group.rank)[1:]
        seen.append((output.clone(), clean, group.traffic(), flags))
    return seen


def check(cases, seen, staging_bytes):
    size = len(seen)
    for index, (op, dtype, count, layout) in enumerate(cases):
        inputs = [sweep.Case("", op, dtype, count * size).input(rank) for rank in range(size)]
        whole = golden.in_rank_order(inputs, op) if size > 1 else inputs[0]
        for rank in range(size):
            result, clean, traffic, flags = seen[rank][index]
            where = (op, dtype, count, layout, rank, size)
            assert golden.same_bits(result, whole[rank * count : (rank + 1) * count]), where
            assert clean, where
            assert traffic == cost(count, dtype, size, layout, staging_bytes), where
            assert flags == seen[0][index][3], where


def cost(count, dtype, size, layout, staging_bytes):
    """Each rank reads its own block from all the others; a signal per tile, one in the window."""
    if size == 1 or count == 0:
        return (0, 0, 0)
    slot = golden.slot_elements(staging_bytes, dtype.itemsize)
    share = lengths(slot, size, dtype.itemsize)[-1]
    steps = 1 if layout in sweep.ZERO_COPY else -(-count // share)
    return (steps, (size - 1) * count * dtype.itemsize, 0)


def all_cases(size):
    return [
        (op, dtype, count, LAYOUTS[(at + 2 * turn) % len(LAYOUTS)])
        for at, op in enumerate(sweep.OPS)
        for dtype in sweep.DTYPES
        for turn, count in enumerate(block_counts(size, dtype))
    ]


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact(world, size):
    cases, staging_bytes = all_cases(size), sweep.small_staging(size)
    check(cases, world(size, staging_bytes=staging_bytes).run(scattered, cases), staging_bytes)


def test_exact_in_processes():
    cases, staging_bytes = all_cases(3)[::3], sweep.small_staging(3)
    seen = helpers.run_group(3, scattered, cases, staging_bytes=staging_bytes)
    check(cases, seen, staging_bytes)


@pytest.mark.parametrize("size", [2, 5])
def test_large_blocks(world, size):
    cases = [("sum", torch.float32, 200_003, "plain"), ("avg", torch.bfloat16, 300_001, "window")]
    check(cases, world(size).run(scattered, cases), 2 << 20)


def test_only_the_inputs_need_lie_in_the_window(world):
    """One signal, nothing staged."""

    def body(group):
        source = group.empty(4 * 100).fill_(group.rank)
        output = pycomm.reduce_scatter(torch.empty(100), source, group=group)
        return output.tolist(), group.traffic()

    assert world(4).run(body) == [([6.0] * 100, (1, 3 * 400, 0))] * 4


def test_in_place_shapes(world):
    """Any shapes with the right numbers of elements."""

    def body(group):
        source = torch.arange(24).view(2, 3, 4) * (group.rank + 1)
        return pycomm.reduce_scatter(torch.empty(3, 4, dtype=torch.int64), source, group=group)

    for rank, output in enumerate(world(2).run(body)):
        assert torch.equal(output, 3 * torch.arange(24).view(2, 3, 4)[rank])
