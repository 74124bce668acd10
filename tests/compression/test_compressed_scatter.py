"""Compressed reduce-scatters on one node: the model's bits, nothing lost, bad input refused."""

from __future__ import annotations

import re

import compressing
import golden
import pytest
import scattering
import torch
from compressing import Case

import pycomm

INT8 = pycomm.Int8()


def alone(size: int) -> list[list[int]]:
    """On one node, every rank acts as a node."""
    return [[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "case",
    [
        Case(INT8, count=30 * 1024, steps=3),
        Case(INT8, torch.bfloat16, count=30 * 1024, op="sum", steps=3),
        Case(INT8, torch.float16, count=30 * 1001, steps=2),  # blocks with a short last block
        Case(pycomm.Int8(block=128), count=30 * 128, steps=2, feedback=False),
        Case(
            pycomm.Int8(block=1024, rounding="stochastic", seed=5),
            count=30 * 2048,
            offset=3 << 20,
            steps=2,
        ),
        Case(pycomm.Int8(rounding="stochastic"), torch.bfloat16, count=30 * 900, steps=2),
        Case(pycomm.Cast(), count=30 * 3000, steps=2),
        Case(pycomm.Identity(), torch.float16, count=30 * 777, op="sum", steps=2),
        Case(INT8, count=30 * 30_000, steps=2),  # several tiles
        Case(INT8, count=0),
    ],
    ids=str,
)
def test_follows_the_model(world, size, case):
    scattering.check(case, alone(size), world(size).run)


@pytest.mark.parametrize("compression", [INT8, pycomm.Cast()], ids=str)
def test_does_not_depend_on_tiles(world, compression):
    """Staging for one block per rank, so that there are many tiles."""
    case = Case(compression, torch.bfloat16, count=3 * 20_000, steps=2)
    scattering.check(case, alone(3), world(3, staging_bytes=16 << 10).run)


def test_nothing_is_lost_over_steps(world):
    """Sums of gradients over steps, of results over steps and the last residuals."""
    size, steps, count = 3, 30, 3 * 4096

    def body(group):
        residual, out = torch.zeros(count), torch.empty(count // size)
        given, made = torch.zeros(count).double(), torch.zeros(count // size).double()
        for step in range(steps):
            x = compressing.gradient(torch.float32, count, group.rank, step)
            given += x
            pycomm.compressed_reduce_scatter(
                out, x, pycomm.Int8(rounding="stochastic"), residual=residual, step=step,
                group=group,
            )  # fmt: skip
            made += out
        return given, made, residual.double()

    seen = world(size).run(body)
    given = sum(x for x, _, _ in seen)
    had = size * torch.cat([made for _, made, _ in seen]) + sum(kept for _, _, kept in seen)
    assert ((given - had).abs() <= 1e-5 * given.abs().max()).all()


def test_the_residual_makes_up_for_rounding(world):
    """bfloat16 cannot hold the mean of a fixed gradient, but the results are right on average."""
    size, steps = 2, 64

    def body(group):
        x = torch.full((2 * 1024,), 1 + group.rank / 128).bfloat16()
        residual, out, total = torch.zeros(2048), torch.empty(1024).bfloat16(), torch.zeros(1024)
        for _ in range(steps):
            pycomm.compressed_reduce_scatter(out, x, INT8, residual=residual, group=group)
            total += out.float()
        return total / steps

    for mean in world(size).run(body):
        assert (mean - (1 + 1 / 256)).abs().max() < 2e-3 / 8


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, float("nan")), (torch.float16, 40_000.0)], ids=str
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_rank_hears_of_infinities(world, dtype, value, feedback, asynchronous):
    """Also ranks whose own blocks and contributions are finite. No rank's residual changes."""
    size, block = 3, 2048

    def body(group):
        x = compressing.gradient(dtype, size * block, group.rank).clamp(-100, 100)
        if group.rank < 2:
            x[block + 5] = value  # the sum of two is too large for float16
        residual = torch.full((size * block,), 0.5) if feedback else None
        out = torch.empty(block, dtype=dtype)
        options = {"residual": residual, "op": "sum", "group": group}
        if asynchronous:
            work = pycomm.compressed_reduce_scatter(out, x, INT8, async_op=True, **options)
            assert work.nonfinite
        else:
            with pytest.raises(pycomm.NonFinite):
                pycomm.compressed_reduce_scatter(out, x, INT8, strict=True, **options)
        kept = residual is None or bool((residual == 0.5).all())
        return kept, bool(out[5].isfinite())

    assert world(size).run(body) == [(True, True), (True, False), (True, True)]


def test_finite_values_are_no_infinities(world):
    def body(group):
        out, x = torch.empty(1024), torch.ones(2048)
        work = pycomm.compressed_reduce_scatter(out, x, INT8, async_op=True, group=group)
        return work.nonfinite, out[7].item()

    assert world(2).run(body) == [(False, 1.0)] * 2


def test_works_of_several_kinds_in_order(world):
    """Operations do not share staging: each has the bits that it has without the others."""
    size, block, rounds = 3, 5000, 8

    def body(group):
        works, outs, sums = [], [], []
        for turn in range(rounds):
            x = compressing.gradient(torch.float32, size * block, group.rank, turn)
            out, total = torch.empty(block), x.clone()
            works.append(pycomm.compressed_reduce_scatter(out, x, INT8, async_op=True, group=group))
            works.append(pycomm.all_reduce(total, async_op=True, group=group))
            works.append(
                pycomm.compressed_all_reduce(
                    x.clone(), pycomm.TopK(0.1), async_op=True, group=group
                )
            )
            outs.append(out)
            sums.append(total)
        for work in works:
            work.wait()
        return outs

    def one(group, turn):
        x, out = (
            compressing.gradient(torch.float32, size * block, group.rank, turn),
            torch.empty(block),
        )
        return pycomm.compressed_reduce_scatter(out, x, INT8, group=group)

    groups = world(size)
    mixed = groups.run(body)
    for turn in range(rounds):
        for rank, alone_ in enumerate(groups.run(one, turn)):
            assert golden.same_bits(mixed[rank][turn], alone_)


def test_any_strides_and_arrays(world):
    def body(group):
        x = compressing.gradient(torch.float32, 4096, group.rank)
        wanted = pycomm.compressed_reduce_scatter(torch.empty(2048), x, INT8, group=group)
        strided = torch.empty(4096)[::2]
        wide = torch.stack([x, x], 1)[:, 0]
        pycomm.compressed_reduce_scatter(strided, wide, INT8, group=group)
        array = torch.empty(2, 1024).numpy()
        pycomm.compressed_reduce_scatter(array, x.view(4, 1024).numpy(), INT8, group=group)
        return torch.equal(strided, wanted) and torch.equal(
            torch.from_numpy(array).view(-1), wanted
        )

    assert all(world(2).run(body))


X, OUT = torch.ones(2048), torch.empty(1024)
BAD = {
    "no compression": ({"compression": None}, TypeError, "compression must be pycomm.Int8()"),
    "top-k": (
        {"compression": pycomm.TopK(0.1)},
        ValueError,
        "compression must be Int8, Cast or Identity, got TopK",
    ),
    "a short output": (
        {"output": torch.empty(1000)},
        ValueError,
        "input must have 2 (the group's size) times as many elements as output, 2000, got 2048",
    ),
    "another dtype": ({"output": OUT.half()}, ValueError, "input must have output's dtype"),
    "doubles": (
        {"output": OUT.double(), "input": X.double()},
        ValueError,
        "input must have one of the dtypes float32, float16, bfloat16",
    ),
    "overlap": ({"output": X[:1024]}, ValueError, "output must not overlap input in memory"),
    "a residual of the output": (
        {"residual": torch.zeros(1024)},
        ValueError,
        "residual must have input's shape and device, (2048,) on cpu, got (1024,) on cpu",
    ),
    "a residual of 16 bits": (
        {"residual": torch.zeros(2048).half()},
        ValueError,
        "residual must be float32, got torch.float16",
    ),
    "the input as a residual": (
        {"residual": X},
        ValueError,
        "residual must not overlap input in memory",
    ),
    "max": ({"op": "max"}, ValueError, "op must be one of avg, sum, got 'max'"),
    "offset": ({"offset": 128}, ValueError, "offset must be a multiple of the block, 256"),
    "step": ({"step": -1}, ValueError, "step must be from 0 to 2^32 - 1, got -1"),
    "a list": ({"input": [X, X]}, TypeError, "input must be a torch.Tensor or an"),
    "velocity": ({"velocity": X}, TypeError, "unexpected keyword argument 'velocity'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(world, name):
    """Before any rank begins: the group can be used afterwards."""
    changed, error, message = BAD[name]
    options = {"output": OUT.clone(), "input": X, "compression": INT8, **changed}

    def body(group):
        with pytest.raises(error, match=re.escape(message)):
            pycomm.compressed_reduce_scatter(**options, group=group)
        return pycomm.all_reduce(torch.ones(3), group=group)[0].item()

    assert world(2).run(body) == [2.0, 2.0]


DIFFERENT = {
    "compression": lambda rank: {"compression": pycomm.Int8(block=256 << rank)},
    "op": lambda rank: {"op": ("avg", "sum")[rank]},
    "residual": lambda rank: {"residual": torch.zeros(2048) if rank else None},
    "step": lambda rank: {"compression": pycomm.Int8(rounding="stochastic"), "step": rank},
    "offset": lambda rank: {"offset": 256 * rank},
    "size": lambda rank: {"output": torch.empty(1024 << rank), "input": torch.ones(2048 << rank)},
    "shape": lambda rank: {"output": torch.empty(1024 >> rank, 1 << rank)},
    "tag": lambda rank: {"tag": rank},
}


@pytest.mark.parametrize("nodes", [None, [1, 1]], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree(world, name, nodes):
    def body(group):
        options = {"output": torch.empty(1024), "input": X, "compression": INT8}
        with pytest.raises(pycomm.Mismatch):
            pycomm.compressed_reduce_scatter(**options | DIFFERENT[name](group.rank), group=group)
        return True

    assert world(2, **({} if nodes is None else {"nodes": nodes})).run(body) == [True, True]


def test_another_collective_is_a_mismatch(world):
    def body(group):
        out = torch.empty(1024)
        calls = (
            lambda: pycomm.reduce_scatter(out, X, "avg", group=group),
            lambda: pycomm.compressed_reduce_scatter(out, X, INT8, group=group),
        )
        with pytest.raises(pycomm.Mismatch, match="reduce_scatter"):
            calls[group.rank]()
        return True

    assert world(2).run(body) == [True, True]
