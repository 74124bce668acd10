"""Compressed operations between nodes, over process groups of torch.distributed."""

from __future__ import annotations

import compressing
import golden
import pytest
import scattering
import spanning
import torch
from compressing import Case

import pycomm
from pycomm._spanning import call, coded, scatter

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], [1, 3, 2], "abba"]
INT8, TOPK = pycomm.Int8(), pycomm.TopK(density=0.01)
STOCHASTIC = pycomm.Int8(block=1024, rounding="stochastic", seed=5)
REDUCED = [
    Case(INT8, count=0),
    Case(TOPK, count=1),
    Case(INT8, count=1000, steps=2),
    Case(INT8, count=200_003, offset=65_536 + 256, steps=2),
    Case(INT8, torch.bfloat16, count=150_000, op="sum", steps=2),
    Case(STOCHASTIC, count=150_000, offset=49_152 + 1024, steps=2),
    Case(pycomm.Cast(), count=150_000, feedback=False),
    Case(pycomm.Identity(), torch.float16, count=70_000, steps=2),
    Case(TOPK, count=3000, steps=3),
    Case(TOPK, count=400_003, offset=3 << 17, steps=2),
    Case(pycomm.TopK(k=2000, values=torch.int8), torch.float16, count=300_000, steps=2),
    Case(pycomm.TopK(density=0.02, momentum=0.9), count=200_000, op="sum", steps=2),
    Case(TOPK, torch.bfloat16, count=70_000, feedback=False),
]
ALL = 12 * 3  # divisible by every number of ranks
SCATTERED = [
    Case(INT8, count=0),
    Case(INT8, count=ALL),
    Case(INT8, count=ALL * 1024, steps=3),
    Case(INT8, torch.bfloat16, count=ALL * 1024, op="sum", steps=3),
    Case(INT8, torch.float16, count=ALL * 1001, steps=2),
    Case(STOCHASTIC, count=ALL * 1024, offset=3 << 20, steps=2),
    Case(pycomm.Cast(), torch.bfloat16, count=ALL * 500, feedback=False),
    Case(pycomm.Identity(), count=ALL * 777, op="sum", steps=2),
]


def everything(group: pycomm.Group) -> list[list]:
    reduced = [compressing.run(group, case) for case in REDUCED]
    return reduced + [scattering.run(group, case) for case in SCATTERED]


def compare(seen: list[list[list]], wanted: list[list[list]]) -> None:
    for rank, (found, expected) in enumerate(zip(seen, wanted, strict=True)):
        for case, steps, others in zip([*REDUCED, *SCATTERED], found, expected, strict=True):
            for step, (got, other) in enumerate(zip(steps, others, strict=True)):
                for name in ("result", "residual", "velocity"):
                    value = getattr(got, name, None)
                    if value is not None:
                        where = f"{name} of {case}, step {step}, rank {rank}"
                        compressing.compare(where, value, getattr(other, name))


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_the_bits_of_the_other_transport(world, nodes):
    if nodes == "abba":
        wanted = spanning.run(nodes, everything)
    else:
        wanted = world(sum(nodes), nodes=nodes).run(everything)
    compare(spanning.run(nodes, everything, transport="process_group"), wanted)


def without_reading(group: pycomm.Group) -> list[list]:
    """As on a GPU, where the host does not read what ranks have found out."""
    agree = call.agree

    def agreed(*args):
        found = agree(*args)
        return call.Found(torch.tensor(found.overflow), torch.tensor(found.unused))

    coded.agree = scatter.agree = agreed
    return everything(group)


def test_the_bits_do_not_depend_on_what_the_host_reads(world):
    wanted = world(3, nodes=[2, 1]).run(everything)
    compare(spanning.run([2, 1], without_reading, transport="process_group"), wanted)


def tiles(group: pycomm.Group) -> list:
    coded._TILE_ELEMENTS = 1 << 17
    cases = [Case(INT8, count=1_500_000, offset=256), Case(STOCHASTIC, count=700_000, steps=2)]
    return [compressing.run(group, case) for case in cases]


def test_several_tiles(world):
    wanted = world(4, nodes=[2, 2]).run(tiles)
    seen = spanning.run([2, 2], tiles, transport="process_group")
    for found, expected in zip(seen, wanted, strict=True):
        for steps, others in zip(found, expected, strict=True):
            for got, other in zip(steps, others, strict=True):
                assert golden.same_bits(got.result, other.result)
                assert golden.same_bits(got.residual, other.residual)


def infinities(group: pycomm.Group) -> list[tuple]:
    """A value that is infinite, or whose sum the type might not hold, on one rank."""
    seen, last, count = [], group.size - 1, 100_000
    for dtype, value in ((torch.float32, float("inf")), (torch.float16, 40_000.0)):
        for compression in (INT8, TOPK):
            x = compressing.gradient(dtype, count, group.rank)
            if group.rank == last:
                x[70_000] = value
            residual = torch.full((count,), 0.5)
            work = pycomm.compressed_all_reduce(
                x, compression, residual=residual, op="sum", group=group, async_op=True
            )
            seen.append((work.nonfinite, not x[70_000].isfinite(), bool((residual == 0.5).all())))
    for feedback in (False, True):
        x = torch.ones(1000 * group.size)
        x[300] = float("inf") if group.rank == last else 1.0
        residual = torch.full_like(x, 0.5) if feedback else None
        output = torch.empty(1000)
        with pytest.raises(pycomm.NonFinite):
            pycomm.compressed_reduce_scatter(
                output, x, INT8, residual=residual, strict=True, group=group
            )
        unharmed = residual is None or bool((residual == 0.5).all())
        seen.append((True, bool(output.isfinite().all()) == (group.rank > 0), unharmed))
    return seen


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [2, 1]], ids=str)
def test_infinities_reach_no_residual(nodes):
    seen = spanning.run(nodes, infinities, transport="process_group")
    assert seen == [[(True, True, True)] * 6] * sum(nodes)


def differing(group: pycomm.Group) -> str:
    x = torch.ones(1000)
    with pytest.raises(pycomm.Mismatch) as raised:
        pycomm.compressed_all_reduce(x, [INT8, TOPK][group.rank], group=group)
    return str(raised.value)


def test_ranks_compare_compressions():
    for told in spanning.run([1, 1], differing, transport="process_group"):
        assert "int8 in blocks of 256" in told
        assert "top 10" in told


def refused(group: pycomm.Group) -> None:
    x = torch.ones(1000)
    with pytest.raises(ValueError, match="algorithm must be auto or two_shot in a group that"):
        pycomm.compressed_all_reduce(x, INT8, algorithm="ring", group=group)
    pycomm.compressed_all_reduce(x, INT8, group=group)
    assert (x == 1).all()


def test_an_algorithm_that_does_not_span_nodes():
    spanning.run([1, 1], refused, transport="process_group")
