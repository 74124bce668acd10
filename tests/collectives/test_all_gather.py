"""All-gather: every rank's block, in rank order, with every bit as it was."""

import golden
import helpers
import pytest
import sweep
import torch

import pycomm

LAYOUTS = ("plain", "offset", "strided", "window", "window offset", "window on even ranks")


def block_counts(size, dtype):
    slot = golden.slot_elements(sweep.small_staging(size), dtype.itemsize)
    return sorted({0, 1, 3, 17, slot - 1, slot, slot + 1, 4 * slot, 5 * slot + 1, 9 * slot + 7})


def block(dtype, count, rank):
    return sweep.Case("", "sum", dtype, count).input(rank)


def gathered(group, cases):
    seen = []
    for dtype, count, layout in cases:
        how = layout
        if layout == "window on even ranks":
            how = "plain" if group.rank % 2 else "window"
        source = sweep.Buffer(group, dtype, count, how)
        source.tensor.copy_(block(dtype, count, group.rank))
        target = sweep.Buffer(group, dtype, count * group.size, how)
        output = target.tensor
        returned = pycomm.all_gather(output, source.tensor, group=group)
        clean = returned is output and target.surroundings_intact() and source.surroundings_intact()
        clean = clean and golden.same_bits(source.tensor, block(dtype, count, group.rank))
        flags = group._core.published(group.rank)[1:]
        seen.append((output.clone(), clean, group.traffic(), flags))
    return seen


def check(cases, seen, staging_bytes):
    size = len(seen)
    for index, (dtype, count, layout) in enumerate(cases):
        # Data that is only moved keeps even the payload of a NaN.
        expected = torch.cat([block(dtype, count, rank) for rank in range(size)])
        others = (size - 1) * count * dtype.itemsize
        slot = golden.slot_elements(staging_bytes, dtype.itemsize)
        cost = (-(-count // slot), others, 0)
        if layout in sweep.ZERO_COPY and count:
            cost = (1, 0, others)
        if size == 1:
            cost = (0, 0, 0)
        for rank in range(size):
            result, clean, traffic, flags = seen[rank][index]
            where = (dtype, count, layout, rank, size)
            assert golden.same_bits(result, expected), where
            assert clean, where
            assert traffic == cost, where
            assert flags == seen[0][index][3], where


def all_cases(size):
    return [
        (dtype, count, layout)
        for dtype in sweep.DTYPES
        for count in block_counts(size, dtype)
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize("size", sweep.SIZES)
def test_exact(world, size):
    cases, staging_bytes = all_cases(size), sweep.small_staging(size)
    check(cases, world(size, staging_bytes=staging_bytes).run(gathered, cases), staging_bytes)


def test_exact_in_processes():
    cases, staging_bytes = all_cases(4)[::3], sweep.small_staging(4)
    seen = helpers.run_group(4, gathered, cases, staging_bytes=staging_bytes)
    check(cases, seen, staging_bytes)


@pytest.mark.parametrize("size", [2, 5])
def test_large_blocks(world, size):
    cases = [(torch.float32, 200_003, "plain"), (torch.bfloat16, 300_001, "window")]
    check(cases, world(size).run(gathered, cases), 2 << 20)


def test_the_input_may_not_be_a_part_of_the_output(world):

    def body(group):
        output = torch.zeros(6)
        with pytest.raises(ValueError, match="output must not overlap input in memory"):
            pycomm.all_gather(output, output[:2], group=group)
        return pycomm.all_gather(output, torch.full((2,), group.rank + 1.0), group=group).tolist()

    assert world(3).run(body) == [[1, 1, 2, 2, 3, 3]] * 3
