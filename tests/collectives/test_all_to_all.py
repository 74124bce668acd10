"""All-to-all, and blocks of different sizes, also in all-gather and reduce-scatter."""

import golden
import helpers
import pytest
import sweep
import torch

import pycomm
from pycomm._inputs import ELEMENTS

LAYOUTS = ("plain", "offset", "strided", "window", "window offset", "window on even ranks")


def block(dtype, count, sender, receiver):
    return sweep.Case("", "sum", dtype, count).input(sender * 31 + receiver)


def exchanged(group, cases):
    """Even blocks in one tensor."""
    seen = []
    n, me = group.size, group.rank
    for dtype, count, layout in cases:
        how = layout
        if layout == "window on even ranks":
            how = "plain" if me % 2 else "window"
        given, to = (sweep.Buffer(group, dtype, count * n, how) for _ in range(2))
        given.tensor.copy_(torch.cat([block(dtype, count, me, r) for r in range(n)]))
        pycomm.all_to_all(to.tensor, given.tensor, group=group)
        expected = torch.cat([block(dtype, count, r, me) for r in range(n)])
        unchanged = torch.cat([block(dtype, count, me, r) for r in range(n)])
        right = golden.same_bits(to.tensor.clone(), expected) and to.surroundings_intact()
        right = right and golden.same_bits(given.tensor.clone(), unchanged)
        traffic = group.traffic()
        nbytes = (n - 1) * count * dtype.itemsize
        seen.append((right and traffic[1:] == (nbytes, 0), group._core.published(me)[1:]))
    return seen


def even_cases(size):
    staging = sweep.small_staging(size)
    return [
        (dtype, count, LAYOUTS[(turn + at) % len(LAYOUTS)])
        for at, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.int8))
        for turn, count in enumerate(
            sorted({0, 1, 3, 17, 64, 65, golden.slot_elements(staging, dtype.itemsize) * 2 + 5})
        )
    ]


def check(cases, by_rank):
    for index, case in enumerate(cases):
        for rank, seen in enumerate(by_rank):
            right, flags = seen[index]
            assert right, (case, rank, len(by_rank))
            assert flags == by_rank[0][index][1], (case, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_even_blocks(world, size):
    cases = even_cases(size)
    check(cases, world(size, staging_bytes=sweep.small_staging(size)).run(exchanged, cases))


def test_even_blocks_in_processes():
    cases = even_cases(3)
    by_rank = helpers.run_group(3, exchanged, cases, staging_bytes=sweep.small_staging(3))
    check(cases, by_rank)


def sizes(size, unit, turn):
    """A matrix of counts, with many zeros."""
    return [[(3 * i + 5 * j + turn) % 4 * unit for j in range(size)] for i in range(size)]


def uneven(group, cases):
    """Every way to give blocks: lists, split sizes, and both; whether each was right."""
    seen = []
    n, me = group.size, group.rank
    for turn, (dtype, unit) in enumerate(cases):
        matrix = sizes(n, unit, turn)
        row, column = matrix[me], [matrix[r][me] for r in range(n)]
        blocks = [block(dtype, row[r], me, r) for r in range(n)]
        expected = [block(dtype, column[r], r, me) for r in range(n)]

        to = [torch.empty(c, dtype=dtype) for c in column]
        pycomm.all_to_all(to, blocks, group=group)
        seen.append(all(map(golden.same_bits, to, expected)))

        whole = group.empty(sum(column), dtype=dtype)
        pycomm.all_to_all(whole, torch.cat(blocks), column, row, group=group)
        seen.append(golden.same_bits(whole, torch.cat(expected)))

        rows = torch.empty(sum(column), 2, dtype=dtype)
        pairs = [torch.stack([b, b], dim=1) for b in blocks]
        work = pycomm.all_to_all(rows, pairs, column, group=group, async_op=True)
        work.wait()
        seen.append(golden.same_bits(rows[:, 1].clone(), torch.cat(expected)))

        of_rank = matrix[0]
        mine = block(dtype, of_rank[me], me, 0)
        everyone = [torch.empty(c, dtype=dtype) for c in of_rank]
        assert pycomm.all_gather(everyone, mine, group=group) is everyone
        wanted = [block(dtype, of_rank[r], r, 0) for r in range(n)]
        seen.append(all(map(golden.same_bits, everyone, wanted)))

        parts = [[block(dtype, of_rank[r], s, r) for r in range(n)] for s in range(n)]
        got = torch.empty(of_rank[me], dtype=dtype)
        pycomm.reduce_scatter(got, parts[me], "avg", group=group)
        total = golden.all_reduced(
            "two_shot", [parts[s][me] for s in range(n)], "avg",
            staging_bytes=sweep.small_staging(n), zero_copy=False,
        )  # fmt: skip
        seen.append(golden.same_bits(got, total))
    return seen


UNEVEN_CASES = [
    (dtype, unit)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8)
    for unit in (0, 1, 33, 3001)
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_uneven_blocks(world, size):
    by_rank = world(size, staging_bytes=sweep.small_staging(size)).run(uneven, UNEVEN_CASES)
    assert by_rank == [[True] * 5 * len(UNEVEN_CASES)] * size


def test_uneven_blocks_in_processes():
    staging = sweep.small_staging(3)
    by_rank = helpers.run_group(3, uneven, UNEVEN_CASES, staging_bytes=staging)
    assert by_rank == [[True] * 5 * len(UNEVEN_CASES)] * 3


def test_every_dtype(world):
    def body(group):
        wrong = []
        for dtype in ELEMENTS:
            bits = (torch.arange(6 * dtype.itemsize) % 2).to(torch.uint8)
            given = bits.view(dtype)
            even = torch.empty(6, dtype=dtype)
            pycomm.all_to_all(even, given, group=group)
            row = [2, 4] if group.rank == 0 else [1, 5]
            column = [2, 1] if group.rank == 0 else [4, 5]
            to = [torch.empty(n, dtype=dtype) for n in column]
            pycomm.all_to_all(to, list(given.split(row)), group=group)
            start = (0, 0) if group.rank == 0 else (2, 1)
            halves = bits.view(2, -1)[group.rank]
            expected = [given[s : s + n] for s, n in zip(start, column, strict=True)]
            right = torch.equal(even.view(torch.uint8), torch.cat([halves, halves]))
            for one, other in zip(to, expected, strict=True):
                right = right and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            if not right:
                wrong.append(dtype)
        return wrong

    assert world(2).run(body) == [[], []]


def test_equal_lists_agree_with_one_tensor(world):
    """Ranks may pass a list or a tensor where all blocks are equal."""

    def body(group):
        mine = torch.full((3,), float(group.rank))
        to = [torch.empty(3), torch.empty(3)] if group.rank == 0 else torch.empty(6)
        pycomm.all_gather(to, mine, group=group)
        return torch.cat(list(to)).tolist() if group.rank == 0 else to.tolist()

    assert world(2).run(body) == [[0.0] * 3 + [1.0] * 3] * 2


def failing(group, call):
    with pytest.raises(pycomm.Mismatch) as caught:
        call(group)
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.barrier(group=group)
    return str(caught.value), caught.value.rank


def expects_too_few(group):
    row = [3, 4, 5]
    column = [row[group.rank]] * group.size
    if group.rank == 2:
        column[1] = 9
    pycomm.all_to_all([torch.empty(n) for n in column], [torch.empty(n) for n in row], group=group)


def other_counts(group):
    counts = [3, 4, 5] if group.rank else [3, 4, 7]
    pycomm.all_gather(
        [torch.empty(n) for n in counts], torch.empty(counts[group.rank]), group=group
    )


def counts_in_another_order(group):
    """The largest is the same, so only the counts themselves tell."""
    counts = [3, 4, 5] if group.rank else [4, 3, 5]
    blocks = [torch.empty(n) for n in counts]
    pycomm.reduce_scatter(torch.empty(counts[group.rank]), blocks, group=group)


def sizes_on_one_rank(group):
    sizes = [2, 2, 2] if group.rank == 1 else None
    pycomm.all_to_all(torch.empty(6), torch.empty(6), sizes, sizes, group=group)


DISAGREEMENTS = [
    (expects_too_few, ["rank 1 sends 5 elements to rank 2, which expects 9"]),
    (other_counts, ["counts=(3, 4, 7)", "counts=(3, 4, 5)", "rank 0 called all_gather("]),
    (counts_in_another_order, ["counts=(4, 3, 5)", "counts=(3, 4, 5)", "reduce_scatter("]),
    (sizes_on_one_rank, ["uneven", "2 elements", "all_to_all("]),
]


@pytest.mark.parametrize(("call", "words"), DISAGREEMENTS)
def test_disagreement(world, call, words):
    for _ in range(10):
        by_rank = world(3, timeout=20).run(failing, call)
        assert len(set(by_rank)) == 1
        for word in words:
            assert word in by_rank[0][0]


@pytest.mark.parametrize(("call", "words"), DISAGREEMENTS)
def test_disagreement_of_processes(call, words):
    by_rank = helpers.run_group(3, failing, call)
    assert len(set(by_rank)) == 1
    for word in words:
        assert word in by_rank[0][0]


def test_a_group_of_one_compares_with_itself(world):
    with pytest.raises(pycomm.Mismatch, match="rank 0 sends 2 elements to rank 0, which expects 3"):
        pycomm.all_to_all([torch.empty(3)], [torch.empty(2)], group=world(1).groups[0])


X = torch.ones(6)
BAD_CALLS = {
    "overlap": (
        lambda g: pycomm.all_to_all(X, X, group=g),
        "output must be another tensor than input",
    ),
    "overlapping lists": (
        lambda g: pycomm.all_to_all([X[:3], X[3:]], [X[1:4], X[:1]], group=g),
        "output must not overlap input",
    ),
    "odd": (lambda g: pycomm.all_to_all(torch.ones(5), torch.ones(5), group=g), "a multiple of"),
    "lengths": (lambda g: pycomm.all_to_all(torch.ones(4), X, group=g), "the same number of elem"),
    "sizes": (
        lambda g: pycomm.all_to_all(torch.ones(4), X, [2, 3], [3, 3], group=g),
        r"split sizes of output must be 2 numbers, none negative, that add up to its first dim",
    ),
    "sizes of a list": (
        lambda g: pycomm.all_to_all(torch.ones(4), [X, X], [2, 2], [6, 6], group=g),
        "input must be a tensor if its split sizes are given",
    ),
    "own block": (
        lambda g: pycomm.all_gather([torch.ones(2), torch.ones(3)], X, group=g),
        r"input must have as many elements as output\[\d\]",
    ),
    "own block's dtype": (
        lambda g: pycomm.reduce_scatter(torch.ones(3), [X.int(), X.int()], group=g),
        r"output must have input\[0\]'s dtype torch.int32, got torch.float32",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(world, name):
    call, message = BAD_CALLS[name]
    for group in world(2).groups:
        with pytest.raises(ValueError, match=message):
            call(group)
