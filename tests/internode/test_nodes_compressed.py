"""Compressed all-reduces between nodes: the model's bits, nothing lost, few bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import compressing
import golden
import golden_nodes
import numpy as np
import pytest
import sweep
import torch
from compressing import Case

import pycomm

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], [1, 3, 2], [2, 2, 2]]
INT8, TOPK = pycomm.Int8(), pycomm.TopK(density=0.01)


@dataclass
class Model:
    """The expected results of all ranks, step by step."""

    case: Case
    nodes: list[int]

    def __post_init__(self) -> None:
        def zeros():
            return [np.zeros(self.case.count, np.float32) for _ in range(sum(self.nodes))]

        self.residuals = zeros() if self.case.feedback else None
        self.velocities = zeros() if self.case.compression.momentum else None

    def step(self, step: int) -> torch.Tensor:
        case = self.case
        exchange = golden_nodes.Exchange(
            [case.input(rank, step) for rank in range(sum(self.nodes))],
            self.nodes,
            case.op,
            self.residuals,
            self.velocities,
            case.offset,
        )
        if isinstance(case.compression, pycomm.TopK):
            k = compressing.sent_elements(case.compression, case.count)
            return exchange.top_k(k, case.compression.values, case.compression.momentum)
        codec = compressing.codec_of(case.compression, case.dtype, step)
        return exchange.blocks(codec, case.algorithm)


def check(case: Case, nodes: list[int], groups) -> None:
    seen = groups.run(compressing.run, case)
    model = Model(case, nodes)
    for step in range(case.steps):
        wanted = model.step(step)
        for rank, steps in enumerate(seen):
            assert golden.same_bits(steps[step].result, wanted), (step, rank)
            if case.feedback:
                kept = torch.from_numpy(model.residuals[rank])
                assert golden.same_bits(steps[step].residual, kept), (step, rank)
            if model.velocities is not None:
                kept = torch.from_numpy(model.velocities[rank])
                assert golden.same_bits(steps[step].velocity, kept), (step, rank)


CASES = [
    Case(INT8, count=1000, steps=2),
    Case(INT8, count=200_003, offset=65_536 + 256, steps=2),
    Case(INT8, torch.bfloat16, count=150_000, op="sum", steps=2),
    Case(pycomm.Int8(block=1024, rounding="stochastic", seed=5), count=150_000, steps=2),
    Case(pycomm.Cast(), count=150_000, feedback=False),
    Case(pycomm.Identity(), torch.float16, count=70_000, steps=2),
    Case(INT8, count=1000, steps=2, algorithm="ring"),
    Case(INT8, count=200_003, offset=65_536 + 256, steps=2, algorithm="tree"),
    Case(INT8, torch.bfloat16, count=150_000, op="sum", steps=2, algorithm="ring"),
    Case(
        pycomm.Int8(block=1024, rounding="stochastic", seed=5),
        count=150_000,
        steps=2,
        algorithm="ring",
    ),
    Case(pycomm.Cast(), count=150_000, feedback=False, algorithm="tree"),
    Case(pycomm.Identity(), torch.float16, count=70_000, steps=2, algorithm="tree"),
    Case(TOPK, count=3000, steps=3),
    Case(TOPK, count=400_003, steps=2),
    Case(pycomm.TopK(k=2000, values=torch.int8), torch.float16, count=300_000, steps=2),
    Case(pycomm.TopK(density=0.02, momentum=0.9), count=200_000, op="sum", steps=2),
]


@pytest.mark.parametrize(("nodes", "case"), sweep.a_third_of(LAYOUTS, CASES), ids=str)
def test_follows_the_model(world, nodes, case):
    check(case, nodes, world(sum(nodes), nodes=nodes))


@pytest.mark.parametrize(
    "case",
    [
        Case(INT8, count=900_000),
        Case(INT8, count=2_500_000),
        Case(INT8, count=2_500_000, feedback=False, offset=32_768 + 256),  # in a turn's middle
    ],
    ids=str,
)
def test_tiles_of_transfers(world, case):
    """More than one tile under way."""
    check(case, [2, 2], world(4, nodes=[2, 2]))


@pytest.mark.parametrize("compression", [INT8, TOPK, pycomm.Cast()], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_per_node_is_as_on_one_node(world, size, compression):
    case = Case(compression, torch.bfloat16, count=300_000, steps=2)
    spanning = world(size, nodes=[1] * size).run(compressing.run, case)
    together = world(size).run(compressing.run, case)
    for apart, whole in zip(spanning, together, strict=True):
        for a, b in zip(apart, whole, strict=True):
            assert golden.same_bits(a.result, b.result)
            assert golden.same_bits(a.residual, b.residual)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("compression", [INT8, TOPK], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_lost(world, nodes, compression, dtype):
    size, count = sum(nodes), 200_000
    case = Case(compression, dtype, count=count)
    before = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def body(group):
        residual = before[group.rank].clone()
        gradient = case.input(group.rank, 0)
        out = pycomm.compressed_all_reduce(gradient, compression, residual=residual, group=group)
        return out, residual

    seen = world(size, nodes=nodes).run(body)
    given = sum(case.input(r, 0).double() + before[r].double() for r in range(size))
    had = size * seen[0][0].double() + sum(residual.double() for _, residual in seen)
    scale = sum(case.input(r, 0).abs().double() + before[r].abs().double() for r in range(size))
    assert ((given - had).abs() <= 4e-6 * scale).all()


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [2, 1]], ids=str)
def test_does_not_depend_on_how_the_whole_is_cut(world, nodes):
    """Pieces at whole blocks, with offset=, have the bits of the whole; residuals too."""
    cuts = [0, 8192, 300_032, 300_288, 500_001]
    inputs = [compressing.gradient(torch.float32, cuts[-1], rank) for rank in range(sum(nodes))]

    def body(group):
        outcomes = []
        for bounds in ([0, cuts[-1]], cuts):
            x, residual = inputs[group.rank].clone(), torch.zeros(cuts[-1])
            for begin, end in itertools.pairwise(bounds):
                pycomm.compressed_all_reduce(
                    x[begin:end], pycomm.Int8(rounding="stochastic"), offset=begin,
                    residual=residual[begin:end], group=group,
                )  # fmt: skip
            outcomes.append((x, residual))
        return outcomes

    for whole, pieces in world(sum(nodes), nodes=nodes).run(body):
        assert golden.same_bits(whole[0], pieces[0])
        assert golden.same_bits(whole[1], pieces[1])


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [3, 1]], ids=str)
@pytest.mark.parametrize("compression", [INT8, TOPK], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, float("inf")), (torch.float16, 40_000.0)], ids=str
)
def test_infinities_reach_no_residual(world, nodes, compression, dtype, value):
    """They are reported on all ranks. So are numbers whose sum the type might not hold."""
    size, count = sum(nodes), 100_000
    last = size - 1

    def body(group):
        x = compressing.gradient(dtype, count, group.rank)
        if group.rank == last:
            x[70_000] = value
        residual = torch.full((count,), 0.5)
        work = pycomm.compressed_all_reduce(
            x, compression, residual=residual, op="sum", group=group, async_op=True
        )
        return work.nonfinite, bool(x[70_000].isfinite()), bool((residual == 0.5).all())

    assert world(size, nodes=nodes).run(body) == [(True, False, True)] * size


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2]], ids=str)
def test_bytes_between_nodes(world, nodes):
    """A node sends as much as a rank of a group with as many ranks as there are nodes."""
    count = 1 << 20

    def body(group):
        sent = []
        for compression in (INT8, TOPK):
            x = compressing.gradient(torch.float32, count, group.rank)
            pycomm.compressed_all_reduce(x, compression, group=group)
            sent.append(group.link_traffic()[0])
        return sent

    seen = world(sum(nodes), nodes=nodes).run(body)
    for ranks in golden_nodes.by_node(seen, nodes):
        int8, topk = (sum(sent) for sent in zip(*ranks, strict=True))
        assert int8 == pytest.approx(INT8.wire_bytes(count, len(nodes)), rel=0.02)
        assert topk <= 1.02 * TOPK.wire_bytes(count, len(nodes))
