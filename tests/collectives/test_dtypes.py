"""Element types beyond those with arithmetic of their own, and bitwise reductions."""

import functools
import operator

import helpers
import pytest
import torch

import pycomm
from pycomm._inputs import ELEMENTS

SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # beside uint8
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = tuple(dtype for dtype in ELEMENTS if "float8" in str(dtype))
WHOLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
BITWISE = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
COUNTS = (0, 1, 3, 17, 5003)

# Every reduction of every dtype that there is; the others are refused.
REDUCTIONS = {
    **dict.fromkeys(FLOATS, ("sum", "avg", "min", "max", "prod")),
    **dict.fromkeys((*SIGNED, torch.uint8), ("sum", "avg", "min", "max", "prod", *BITWISE)),
    torch.bool: ("sum", "min", "max", "prod", *BITWISE),
    **dict.fromkeys(UNSIGNED, ("sum", "prod", *BITWISE)),
    **dict.fromkeys(COMPLEX, ("sum", "avg")),
    **dict.fromkeys(FLOAT8, ()),
}


def random_bytes(dtype, count, rank):
    """Any bits, but a bool's are 0 or 1."""
    generator = torch.Generator().manual_seed(count * 31 + rank)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.6
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def numbers(dtype, count, rank):
    """Complex numbers with small whole parts, whose sums are exact."""
    if dtype not in COMPLEX:
        return random_bytes(dtype, count, rank)
    generator = torch.Generator().manual_seed(count * 37 + rank)
    parts = torch.randint(-9, 9, (count, 2), generator=generator)
    return torch.view_as_complex(parts.double()).to(dtype)


def reference(dtype, op, tensors):
    """The result of torch, which takes the ranks' tensors one after the other."""
    if op in BITWISE:
        whole = [tensor.view(WHOLE.get(dtype, dtype)) for tensor in tensors]
        return functools.reduce(BITWISE[op], whole).view(dtype)
    if dtype in UNSIGNED:
        whole = [tensor.view(WHOLE[dtype]) for tensor in tensors]
        combine = {"sum": torch.add, "prod": torch.mul}[op]
        return functools.reduce(combine, whole).view(dtype)
    if dtype is torch.bool:
        either = op in ("sum", "max")
        return functools.reduce(torch.logical_or if either else torch.logical_and, tensors)
    total = functools.reduce(torch.add, [tensor.to(torch.complex128) for tensor in tensors])
    parts = torch.view_as_real(total) / (len(tensors) if op == "avg" else 1)
    return torch.view_as_complex(parts).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


CASES = [
    (dtype, op)
    for dtype, ops in REDUCTIONS.items()
    for op in ops
    if op in BITWISE or dtype in (torch.bool, *UNSIGNED, *COMPLEX)
]


def reduce_all(group):
    """True for each case that every way to reduce gave the reference's bits."""
    seen = []
    for dtype, op in CASES:
        for count in COUNTS:
            tensors = [numbers(dtype, count * group.size, r) for r in range(group.size)]
            expected = reference(dtype, op, tensors)
            mine = tensors[group.rank]
            for algorithm in ("one_shot", "two_shot", "ring", "tree"):
                x = mine.clone()
                pycomm.all_reduce(x, op, algorithm=algorithm, group=group)
                seen.append(((dtype, op, count, algorithm), same(x, expected)))
            inside = group.empty(mine.numel(), dtype=dtype).copy_(mine)
            pycomm.all_reduce(inside, op, algorithm="two_shot", group=group)
            seen.append(((dtype, op, count, "window"), same(inside, expected)))
            block = torch.empty(count, dtype=dtype)
            pycomm.reduce_scatter(block, mine, op, group=group)
            part = expected[group.rank * count : (group.rank + 1) * count]
            seen.append(((dtype, op, count, "scattered"), same(block, part)))
    return seen


def check(by_rank):
    for seen in by_rank:
        assert [case for case, right in seen if not right] == []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions(world, size):
    check(world(size, staging_bytes=16 << 10).run(reduce_all))


def test_reductions_in_processes():
    check(helpers.run_group(2, reduce_all))


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]])
def test_reductions_between_nodes(world, nodes):
    def body(group):
        seen = []
        for dtype, op in CASES:
            tensors = [numbers(dtype, 1001, r) for r in range(group.size)]
            x = tensors[group.rank].clone()
            pycomm.all_reduce(x, op, group=group)
            seen.append(((dtype, op), same(x, reference(dtype, op, tensors))))
        return seen

    check(world(sum(nodes), nodes=nodes).run(body))


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_moves(world, size):
    def body(group):
        seen = []
        for dtype in ELEMENTS:
            for count in COUNTS:
                tensors = [random_bytes(dtype, count, r) for r in range(size)]
                everyone = torch.empty(size * count, dtype=dtype)
                pycomm.all_gather(everyone, tensors[group.rank].clone(), group=group)
                expected = b"".join(map(bytes_of, tensors))
                seen.append(((dtype, count, "all_gather"), bytes_of(everyone) == expected))
                x = group.empty(count, dtype=dtype).copy_(tensors[group.rank])
                pycomm.broadcast(x, size - 1, group=group)
                seen.append(((dtype, count, "broadcast"), same(x, tensors[size - 1])))
        return seen

    check(world(size).run(body))


def test_reductions_that_there_are_not(world):
    group = world(1).groups[0]
    assert set(REDUCTIONS) == set(ELEMENTS)
    for dtype, ops in REDUCTIONS.items():
        for op in ("sum", "avg", "min", "max", "prod", *BITWISE):
            x = torch.zeros(3, dtype=dtype)
            if op in ops:
                pycomm.all_reduce(x, op, group=group)
                continue
            name = str(dtype).removeprefix("torch.")
            reason = rf"for {name}, got {op}" if ops else f"tensor of {name} can be moved but not"
            with pytest.raises(ValueError, match=reason):
                pycomm.all_reduce(x, op, group=group)


def test_torchs_names_of_bitwise_reductions(world):
    def body(group):
        x = torch.tensor([group.rank + 1])
        pycomm.all_reduce(x, torch.distributed.ReduceOp.BOR, group=group)
        return x.item()

    assert world(2).run(body) == [3, 3]


# The same bytes, but another dtype.
PAIRS = [
    (torch.complex64, 5, torch.float32, 10, "sum"),
    (torch.int32, 5, torch.uint8, 20, "bxor"),
    (torch.bool, 5, torch.uint8, 5, "max"),
    (torch.uint16, 5, torch.int16, 5, "sum"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_same_bytes_of_another_dtype_are_a_mismatch(world, pair):
    one, n, other, m, op = pair

    def body(group):
        x = torch.zeros(n, dtype=one) if group.rank == 0 else torch.zeros(m, dtype=other)
        with pytest.raises(pycomm.Mismatch) as caught:
            pycomm.all_reduce(x, op, group=group)
        return str(caught.value)

    for message in world(2).run(body):
        for dtype, count in ((one, n), (other, m)):
            name = str(dtype).removeprefix("torch.")
            assert f"all_reduce({name}, {count} elements, op={op}" in message


def test_a_lazily_conjugated_tensor_is_refused(world):
    group = world(1).groups[0]
    with pytest.raises(ValueError, match="call resolve_conj"):
        pycomm.all_reduce(torch.ones(3, dtype=torch.complex64).conj(), group=group)
