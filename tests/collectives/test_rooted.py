"""Reduce, gather and scatter: every root, size, dtype and place of the tensors."""

import golden
import helpers
import pytest
import sweep
import torch

import pycomm
from pycomm._inputs import ELEMENTS

LAYOUTS = ("plain", "offset", "strided", "window", "window offset", "window on even ranks")


def counts(size, dtype):
    slot = golden.slot_elements(sweep.small_staging(size), dtype.itemsize)
    return sorted({0, 1, 3, 17, slot - 1, slot, slot + 1, 4 * slot, 5 * slot + 1, 9 * slot + 7})


def all_cases(size):
    return [
        (root, dtype, count, LAYOUTS[(turn + root + at) % len(LAYOUTS)])
        for root in range(size)
        for at, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.int8))
        for turn, count in enumerate(counts(size, dtype))
    ]


def buffer(group, dtype, count, layout):
    how = layout
    if layout == "window on even ranks":
        how = "plain" if group.rank % 2 else "window"
    return sweep.Buffer(group, dtype, count, how)


def sample(dtype, count, rank):
    return sweep.Case("", "sum", dtype, count).input(rank)


def reduced(group, cases):
    seen = []
    for turn, (root, dtype, count, layout) in enumerate(cases):
        op = sweep.OPS[turn % len(sweep.OPS)]
        place = buffer(group, dtype, count, layout)
        place.tensor.copy_(sample(dtype, count, group.rank))
        returned = pycomm.reduce(place.tensor, root, op, group=group)
        inputs = [sample(dtype, count, r) for r in range(group.size)]
        expected = golden.all_reduced(
            "two_shot", inputs, op, staging_bytes=sweep.small_staging(group.size), zero_copy=False
        )
        wanted = expected if group.rank == root else inputs[group.rank]
        right = golden.same_bits(place.tensor.clone(), wanted) and place.surroundings_intact()
        flags = group._core.published(group.rank)[1:]
        seen.append((right and returned.data_ptr() == place.tensor.data_ptr(), flags))
    return seen


def gathered(group, cases):
    seen = []
    for root, dtype, count, layout in cases:
        place, everyone = (buffer(group, dtype, n, layout) for n in (count, count * group.size))
        place.tensor.copy_(sample(dtype, count, group.rank))
        mine = group.rank == root
        to = everyone.tensor if mine else None
        returned = pycomm.gather(place.tensor, to, root, group=group)
        right = returned is to and everyone.surroundings_intact() and place.surroundings_intact()
        expected = torch.cat([sample(dtype, count, r) for r in range(group.size)])
        right = right and (not mine or golden.same_bits(everyone.tensor.clone(), expected))
        seen.append((right, group._core.published(group.rank)[1:]))
    return seen


def scattered(group, cases):
    seen = []
    for root, dtype, count, layout in cases:
        place, everyone = (buffer(group, dtype, n, layout) for n in (count, count * group.size))
        everyone.tensor.copy_(torch.cat([sample(dtype, count, r) for r in range(group.size)]))
        given = everyone.tensor if group.rank == root else None
        pycomm.scatter(place.tensor, given, root, group=group)
        right = golden.same_bits(place.tensor.clone(), sample(dtype, count, group.rank))
        right = right and place.surroundings_intact() and everyone.surroundings_intact()
        seen.append((right, group._core.published(group.rank)[1:]))
    return seen


def check(cases, by_rank):
    for index, case in enumerate(cases):
        for rank, seen in enumerate(by_rank):
            right, flags = seen[index]
            assert right, (case, rank, len(by_rank))
            assert flags == by_rank[0][index][1], (case, rank)


@pytest.mark.parametrize("body", [reduced, gathered, scattered])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_exact_for_every_root(world, size, body):
    cases = all_cases(size)
    check(cases, world(size, staging_bytes=sweep.small_staging(size)).run(body, cases))


@pytest.mark.parametrize("body", [reduced, gathered, scattered])
def test_exact_in_processes(body):
    cases = all_cases(3)
    by_rank = helpers.run_group(3, body, cases, staging_bytes=sweep.small_staging(3))
    check(cases, by_rank)


def test_the_bits_of_all_reduce(world):
    def body(group):
        x = torch.randn(70_001, generator=torch.Generator().manual_seed(group.rank))
        y = x.clone()
        pycomm.reduce(x, 1, "avg", group=group)
        pycomm.all_reduce(y, "avg", algorithm="two_shot", group=group)
        return golden.same_bits(x, y)

    assert world(3).run(body) == [False, True, False]


@pytest.mark.parametrize("in_window", [False, True])
def test_traffic(world, in_window):
    """Zero copy writes to the root or reads from it; no rank reads data that it does not need."""
    count, size, root = 3000, 3, 2

    def body(group):
        make = group.empty if in_window else torch.empty
        block, whole = make(count), make(count * size)
        mine = group.rank == root
        pycomm.gather(block, whole if mine else None, root, group=group)
        gather = group.traffic()[1:]
        pycomm.scatter(block, whole if mine else None, root, group=group)
        return gather, group.traffic()[1:]

    nbytes = 4 * count
    for rank, (gather, scatter) in enumerate(world(size).run(body)):
        to_root = (0, nbytes) if in_window else (0, 0)
        at_root = (0, 0) if in_window else (2 * nbytes, 0)
        assert gather == (at_root if rank == root else to_root)
        assert scatter == ((0, 0) if rank == root else (nbytes, 0))


def test_every_dtype_and_lists(world):
    def body(group):
        wrong = []
        for dtype in ELEMENTS:
            for count in (0, 1, 1001):
                bits = torch.arange(count * dtype.itemsize * group.size) % 2
                whole = bits.to(torch.uint8).view(dtype)
                blocks = list(whole.clone().chunk(group.size)) if count else [whole] * group.size
                mine = group.rank == 1
                got = torch.empty(count, dtype=dtype)
                pycomm.scatter(got, blocks if mine else None, 1, group=group)
                back = [torch.empty(count, dtype=dtype) for _ in blocks]
                pycomm.gather(got, back if mine else None, 1, group=group)
                seen = [got.view(torch.uint8), torch.cat([b.view(torch.uint8) for b in back])]
                part = whole.view(torch.uint8).view(group.size, -1)[group.rank]
                if not torch.equal(seen[0], part):
                    wrong.append(("scatter", dtype, count))
                if mine and not torch.equal(seen[1], whole.view(torch.uint8)):
                    wrong.append(("gather", dtype, count))
        return wrong

    assert world(3).run(body) == [[]] * 3


def test_lists_that_are_not_contiguous_and_async(world):
    def body(group):
        grid = torch.arange(12.0).view(3, 4).t()  # strided rows
        mine = group.rank == 0
        got = torch.empty(6)[::2]
        work = pycomm.scatter(got, list(grid[:2]) if mine else None, group=group, async_op=True)
        work.wait()
        to = torch.zeros(3, 2)
        rows = [to[:, 0], to[:, 1]]
        pycomm.gather(got, rows if mine else None, group=group, async_op=True).wait()
        return got.tolist(), to.t().tolist()

    first, second = world(2).run(body)
    assert first[0] == [0.0, 4.0, 8.0]
    assert second[0] == [1.0, 5.0, 9.0]
    assert first[1] == [first[0], second[0]]
    assert second[1] == [[0.0] * 3] * 2


BAD_CALLS = {
    "dst": (lambda g, x: pycomm.reduce(x, 2, group=g), "dst must be a rank from 0 to 1, got 2"),
    "src": (lambda g, x: pycomm.scatter(x, None, -1, group=g), "src must be a rank from 0 to 1"),
    "list without root": (
        lambda g, x: pycomm.gather(x, [x, x], 1 - g.rank, group=g),
        "gather_list must be None except on the root, got list",
    ),
    "root without list": (
        lambda g, x: pycomm.scatter(x, None, g.rank, group=g),
        "scatter_list must be given on the root, got NoneType",
    ),
    "length": (
        lambda g, x: pycomm.gather(x, [x], g.rank, group=g),
        "gather_list must have 2 tensors",
    ),
    "sizes": (
        lambda g, x: pycomm.scatter(x, [x, x[:2]], g.rank, group=g),
        r"scatter_list\[1\] must have as many elements as tensor, 6, got 2",
    ),
    "dtypes": (
        lambda g, x: pycomm.scatter(x, [x.int(), x.int()], g.rank, group=g),
        r"scatter_list\[0\] must have tensor's dtype torch.float32, got torch.int32",
    ),
    "whole": (
        lambda g, x: pycomm.gather(x, torch.empty(7), g.rank, group=g),
        "gather_list must have 2 .* times as many elements as tensor, 12, got 7",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(world, name):
    call, message = BAD_CALLS[name]
    for group in world(2).groups:
        with pytest.raises(ValueError, match=message):
            call(group, torch.ones(6))


def test_tensors_without_a_result_are_not_written_to():
    """Not even to restore their values: they may be expanded, or in use elsewhere."""

    def body(group):
        strided, out = torch.arange(8.0)[::2], [torch.empty(4) for _ in range(2)]
        ones = torch.ones(1).expand(4) if group.rank == 1 else torch.ones(4)
        version = strided._version
        pycomm.reduce(ones, 0, group=group)
        pycomm.gather(strided, out if group.rank == 0 else None, 0, group=group)
        return ones.tolist(), strided._version - version

    with pycomm.LocalWorld(2) as world:
        assert world.run(body) == [([2.0] * 4, 0), ([1.0] * 4, 0)]
