"""Many all-reduces in one world: their inputs, results, and checks of these."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

import golden
import pytest
import textbook
import torch

import pycomm

ALGORITHMS = ("one_shot", "two_shot", "ring", "tree")
OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int16,
    torch.int8,
)
SENTINEL = 77
# One rank, and even and odd numbers of them; other sizes differ little, and are long tests.
SIZES = [
    pytest.param(size, marks=[] if size in (1, 2, 3, 4, 7) else pytest.mark.slow)
    for size in range(1, 10)
]

# How a rank's tensor and `out` lie in memory.
LAYOUTS = (
    "plain",
    "offset",  # data that starts one element into its storage
    "strided",
    "out",
    "strided out",
    "window",
    "window offset",
    "window out",
    "window on even ranks",
    "window without out",  # the input lies in the window, the output does not
)
ZERO_COPY = ("window", "window offset", "window out")


def a_third_of(*lists: Iterable[Any]) -> list[Any]:
    """All combinations for `parametrize`; of those in which a value occurs, two thirds are slow."""
    return _one_in(3, lists)


def a_fifth_of(*lists: Iterable[Any]) -> list[Any]:
    """As :func:`a_third_of`, of longer lists; four fifths are slow."""
    return _one_in(5, lists)


def half_of(*lists: Iterable[Any]) -> list[Any]:
    """As :func:`a_third_of`, also for two lists of which one has two values."""
    return _one_in(2, lists)


def _one_in(parts: int, lists: Iterable[Iterable[Any]]) -> list[Any]:
    lists = [list(values) for values in lists]
    combinations = list(product(*(range(len(values)) for values in lists)))  # of places in lists
    quick = [places for places in combinations if sum(places) % parts == 0]
    if len(lists) > 1:
        for values, places in zip(lists, zip(*quick, strict=True), strict=True):
            assert len(set(places)) == len(values), f"one of {values} is in slow cases only"
    return [
        pytest.param(
            *(values[place] for values, place in zip(lists, places, strict=True)),
            marks=[] if places in quick else pytest.mark.slow,
        )
        for places in combinations
    ]


@dataclass(frozen=True)
class Case:
    """One all-reduce."""

    algorithm: str
    op: str
    dtype: torch.dtype
    count: int
    layout: str = "plain"

    def input(self, rank: int) -> torch.Tensor:
        """A rank's contribution, which is the same in every process."""
        make = contribution if self.count < 1 << 15 else contribution.__wrapped__
        return make(self.op, self.dtype, self.count, rank).clone()

    @property
    def zero_copy(self) -> bool:
        """True if all tensors of all ranks lie in the window."""
        return self.layout in ZERO_COPY and self.count > 0 and self.algorithm != "one_shot"


@cache
def specials(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, infinities, NaN with a sign and a payload, subnormals, the largest."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), info.max, -info.max]
    values += [info.tiny, info.tiny / 2, -info.tiny / 4, info.tiny * info.eps]
    made = torch.tensor(values, dtype=torch.float64).to(dtype)
    odd_nan = golden.bits(made[6:7].clone()) - 1  # all ones below; with the sign it is no default
    return torch.cat([made, odd_nan.view(dtype), -odd_nan.view(dtype)])


def sample(dtype: torch.dtype, count: int, op: str, generator: torch.Generator) -> torch.Tensor:
    """Random numbers; every eighth float is a special value, on all ranks alike."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        whole = torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)
        tiny = torch.randint(0, 4, (count,), generator=generator, dtype=dtype)
        return torch.where(torch.rand(count, generator=generator) < 0.5, whole, tiny)
    spread = 1 if op == "prod" else 6
    scale = torch.exp2(torch.randint(-spread, spread, (count,), generator=generator).double())
    values = (torch.randn(count, generator=generator).double() * scale).to(dtype)
    pool = specials(dtype)
    pick = torch.randint(0, len(pool), (count,), generator=generator)
    return torch.where(torch.arange(count) % 8 == 5, pool[pick], values)


@lru_cache(1000)  # the same in all layouts and algorithms
def contribution(op: str, dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    seed = zlib.crc32(f"{op} {dtype} {count} {rank}".encode())
    return sample(dtype, count, op, torch.Generator().manual_seed(seed))


class Buffer:
    """A flat tensor inside a larger one; other elements of the larger one must not change."""

    def __init__(self, group: pycomm.Group, dtype: torch.dtype, count: int, how: str) -> None:
        begin = 1 if "offset" in how else 0
        step = 3 if "strided" in how else 1
        size = begin + count * step + 2
        self.base = (
            group.empty(size, dtype=dtype) if "window" in how else torch.empty(size, dtype=dtype)
        )
        self.base.fill_(SENTINEL)
        self.place = slice(begin, begin + count * step, step)

    @property
    def tensor(self) -> torch.Tensor:
        return self.base[self.place]

    def surroundings_intact(self) -> bool:
        outside = torch.ones(self.base.numel(), dtype=torch.bool)
        outside[self.place] = False
        return bool((self.base[outside] == SENTINEL).all())


@dataclass
class Observed:
    """One rank's observations in one case."""

    result: torch.Tensor
    clean: bool  # returned the right object, left the input and the surroundings alone
    traffic: tuple[int, int, int]
    planned: tuple[int, int, int]
    flags: tuple[int, ...]


def buffers(group: pycomm.Group, case: Case) -> tuple[Buffer, Buffer | None]:
    how, to = case.layout, None
    if case.layout == "window on even ranks":
        how = "window" if group.rank % 2 == 0 else "plain"
    if case.layout == "window without out":
        to = Buffer(group, case.dtype, case.count, "plain")
    elif "out" in case.layout:
        to = Buffer(group, case.dtype, case.count, how)
    source = Buffer(group, case.dtype, case.count, how)
    source.tensor.copy_(case.input(group.rank))
    return source, to


def run_case(group: pycomm.Group, case: Case) -> Observed:
    source, to = buffers(group, case)
    tensor, out = source.tensor, to.tensor if to is not None else None
    returned = pycomm.all_reduce(tensor, case.op, out=out, algorithm=case.algorithm, group=group)
    target = tensor if out is None else out
    clean = returned is target and source.surroundings_intact()
    if to is not None:
        clean = clean and to.surroundings_intact()
        clean = clean and golden.same_bits(tensor, case.input(group.rank))
    nbytes = case.count * case.dtype.itemsize
    plan = group.explain(nbytes, case.dtype, algorithm=case.algorithm, in_window=case.zero_copy)
    return Observed(
        target.clone(),
        clean,
        tuple(group.traffic()),
        (plan.steps, plan.bytes_in, plan.bytes_out),
        tuple(group._core.published(group.rank)[1:]),
    )


def run_cases(group: pycomm.Group, cases: Iterable[Case]) -> list[Observed]:
    """One rank's part in all of them, back to back."""
    return [run_case(group, case) for case in cases]


def check(cases: list[Case], seen: list[list[Observed]], staging_bytes: int) -> None:
    """Fails on the first case that went otherwise than the references say; `seen` is by rank."""
    size = len(seen)
    for index, case in enumerate(cases):
        inputs = [case.input(rank) for rank in range(size)]
        expected = golden.all_reduced(
            case.algorithm, inputs, case.op, staging_bytes=staging_bytes, zero_copy=case.zero_copy
        )
        for rank in range(size):
            got = seen[rank][index]
            where = f"{case}, rank {rank} of {size}, staging_bytes={staging_bytes}"
            assert golden.same_bits(got.result, expected), _difference(where, got.result, expected)
            assert got.clean, f"touched what it should not have: {where}"
            cost = textbook.cost(
                case.algorithm,
                count=case.count,
                rank=rank,
                size=size,
                itemsize=case.dtype.itemsize,
                staging_bytes=staging_bytes,
                zero_copy=case.zero_copy,
            )
            assert got.traffic == cost, f"{got.traffic} is not the textbook's {cost}: {where}"
            assert got.planned == cost, f"explain() says {got.planned}, not {cost}: {where}"
            assert got.flags == seen[0][index].flags, f"flags differ from rank 0's: {where}"


def _difference(where: str, got: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (golden.bits(got) != golden.bits(expected)).nonzero().flatten().tolist()
    first = wrong[0]
    return (
        f"{len(wrong)} of {got.numel()} elements are wrong, the first at {first}: "
        f"{got[first].item()!r} instead of {expected[first].item()!r}: {where}"
    )


def small_staging(size: int) -> int:
    """So little that a chunk of a slot is two cache lines, and everything wraps."""
    return 1024 * size


def border_counts(dtype: torch.dtype, size: int) -> list[int]:
    """Counts around every border that `small_staging` makes: lines, tiles, all four slots."""
    slot = golden.slot_elements(small_staging(size), dtype.itemsize)
    line = golden.CACHE_LINE // dtype.itemsize
    counts = {0, 1, 2, 7, line - 1, line, line + 1, slot // 2 + 1, slot - 1, slot, slot + 1}
    counts |= {2 * slot - line, 3 * slot + 5, 4 * slot, 4 * slot + 1, 5 * slot - 3, 9 * slot + 31}
    return sorted(counts)


def grid(algorithm: str, dtype: torch.dtype, size: int) -> list[Case]:
    """Every op with every count, and with every layout, by turns."""
    cases = []
    for at, op in enumerate(OPS):
        for turn, count in enumerate(border_counts(dtype, size)):
            layout = LAYOUTS[(turn + 3 * at) % len(LAYOUTS)]
            cases.append(Case(algorithm, op, dtype, count, layout))
    return cases


def check_grid(algorithm: str, dtype: torch.dtype, size: int) -> None:
    cases, staging_bytes = grid(algorithm, dtype, size), small_staging(size)
    with pycomm.LocalWorld(size, timeout=60, staging_bytes=staging_bytes) as world:
        check(cases, world.run(run_cases, cases), staging_bytes)


def check_large(algorithm: str, size: int) -> None:
    """Default staging, with tensors of many pieces and tiles."""
    staging_bytes = 2 << 20
    cases = [
        Case(algorithm, "sum", torch.float32, 65_537, "plain"),
        Case(algorithm, "avg", torch.bfloat16, 4 * 131_072 + 4_099, "offset"),
        Case(algorithm, "avg", torch.float16, 4 * 32_768 * size + 77, "window"),
        Case(algorithm, "sum", torch.float32, 3 * 16_384 * size + 1, "window out"),
        Case(algorithm, "prod", torch.uint8, 262_144, "strided"),
        Case(algorithm, "max", torch.float64, 32_768 + 1, "window offset"),
    ]
    with pycomm.LocalWorld(size, timeout=60) as world:
        check(cases, world.run(run_cases, cases), staging_bytes)


def traffic(algorithm, size, elements, in_window):
    """Each rank's traffic in one all-reduce of float32."""

    def body(group):
        x = group.empty(elements) if in_window else torch.empty(elements)
        pycomm.all_reduce(x.fill_(1), algorithm=algorithm, group=group)
        return group.traffic()

    with pycomm.LocalWorld(size, timeout=60) as world:
        return world.run(body)
