"""Compressed reduce-scatters between nodes: the model's bits, nothing lost, half the bytes."""

from __future__ import annotations

import signal
import time
from itertools import accumulate
from pathlib import Path

import compressing
import golden
import helpers
import pytest
import scattering
import spanning
import torch
from compressing import Case
from golden_scatter import Scatter

import pycomm

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], [1, 3, 2], [2, 2, 2]]
INT8 = pycomm.Int8()
ALL = 12 * 3  # divisible by every number of ranks


def in_order(nodes: list[int]) -> list[list[int]]:
    ends = list(accumulate(nodes))
    return [list(range(end - n, end)) for end, n in zip(ends, nodes, strict=True)]


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(INT8, count=ALL * 1024, steps=3),
        Case(INT8, torch.bfloat16, count=ALL * 1024, op="sum", steps=3),
        Case(INT8, torch.float16, count=ALL * 1001, steps=2),
        Case(pycomm.Int8(block=128), count=ALL * 384, feedback=False),
        Case(
            pycomm.Int8(block=4096, rounding="stochastic", seed=5),
            count=ALL * 1024,
            offset=3 << 20,
            steps=2,
        ),
        Case(pycomm.Cast(), torch.bfloat16, count=ALL * 500, feedback=False),
        Case(pycomm.Identity(), count=ALL * 777, op="sum", steps=2),
        Case(INT8, count=ALL * 12_000),  # several tiles
        Case(INT8, count=0),
    ],
    ids=str,
)
def test_follows_the_model(world, nodes, case):
    scattering.check(case, in_order(nodes), world(sum(nodes), nodes=nodes).run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_per_node_is_as_on_one_node(world, size, dtype):
    case = Case(pycomm.Int8(rounding="stochastic"), dtype, count=size * 200_000, steps=2)
    spanning_nodes = world(size, nodes=[1] * size).run(scattering.run, case)
    together = world(size).run(scattering.run, case)
    for apart, whole in zip(spanning_nodes, together, strict=True):
        for a, b in zip(apart, whole, strict=True):
            assert golden.same_bits(a.result, b.result)
            assert golden.same_bits(a.residual, b.residual)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_lost(world, nodes, dtype):
    """For any residuals before, including residuals in other ranks' stripes."""
    size, count, steps = sum(nodes), ALL * 1024, 3
    before = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def body(group):
        residual, total = before[group.rank].clone(), torch.zeros(count // size).double()
        for step in range(steps):
            x = compressing.gradient(dtype, count, group.rank, step)
            out = torch.empty(count // size, dtype=dtype)
            total += pycomm.compressed_reduce_scatter(out, x, INT8, residual=residual, group=group)
        return total, residual

    seen = world(size, nodes=nodes).run(body)
    terms = [before[r].double() for r in range(size)]
    for step in range(steps):
        terms += [compressing.gradient(dtype, count, r, step).double() for r in range(size)]
    had = size * torch.cat([total for total, _ in seen]) + sum(kept.double() for _, kept in seen)
    assert ((sum(terms) - had).abs() <= 4e-6 * sum(term.abs() for term in terms)).all()


def test_ranks_use_their_stripes_of_the_residual(world):
    """A rank leaves the others as they are; together, a node's ranks use each element once."""
    nodes, count = [2, 3], 5 * 4096

    def body(group):
        residual = torch.zeros(count)
        x = torch.randn(count, generator=torch.Generator().manual_seed(group.rank))
        for _ in range(2):
            pycomm.compressed_reduce_scatter(
                torch.empty(4096), x, INT8, residual=residual, group=group
            )
        return residual != 0

    used = world(5, nodes=nodes).run(body)
    assert not (used[0] & used[1]).any()
    assert not (used[2] & used[3]).any()
    assert not used[4].any()
    assert (used[0] | used[1]).double().mean() > 0.9
    assert torch.equal(used[0].view(-1, 256).any(1), used[2].view(-1, 256).any(1))


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [3, 1], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, float("inf")), (torch.float16, 40_000.0)], ids=str
)
def test_every_rank_hears_of_infinities(world, nodes, dtype, value, feedback):
    """Also of a sum that float16 cannot hold, on one node or over all. No residual changes."""
    size, block = sum(nodes), 4096

    def body(group):
        x = compressing.gradient(dtype, size * block, group.rank).clamp(-100, 100)
        if group.rank in (0, size - 1):
            x[5] = value
        residual = torch.full((size * block,), 0.5) if feedback else None
        out = torch.empty(block, dtype=dtype)
        work = pycomm.compressed_reduce_scatter(
            out, x, INT8, residual=residual, op="sum", group=group, async_op=True
        )
        kept = residual is None or bool((residual == 0.5).all())
        return work.nonfinite, kept, bool(out[5].isfinite())

    wanted = [(True, True, rank > 0) for rank in range(size)]
    assert world(size, nodes=nodes).run(body) == wanted


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1], [2, 2]], ids=str)
def test_finite_values_are_no_infinities(world, nodes):
    size = sum(nodes)

    def body(group):
        x, out = torch.full((size * 512,), 40_000.0).half(), torch.empty(512).half()
        residual = torch.zeros(size * 512)
        for kept in (None, residual):
            work = pycomm.compressed_reduce_scatter(
                out, x, INT8, residual=kept, group=group, async_op=True
            )
            assert not work.nonfinite
        return out.unique().tolist()

    assert world(size, nodes=nodes).run(body) == [[40_000.0]] * size


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_bytes_between_nodes(world, nodes, feedback):
    """A node sends every other node its part once, in int8, and nothing else."""
    size, block = sum(nodes), 6 * 8192

    def sent(operation, group):
        operation(group)
        return group.link_traffic()

    def barrier(group):
        pycomm.barrier(group=group)

    def scatter(group):
        residual = torch.zeros(size * block) if feedback else None
        pycomm.compressed_reduce_scatter(
            torch.empty(block), torch.ones(size * block), INT8, residual=residual, group=group
        )

    groups = world(size, nodes=nodes)
    handshakes, seen = (
        groups.run(lambda g: sent(barrier, g)),
        groups.run(lambda g: sent(scatter, g)),
    )
    for ranks in in_order(nodes):
        out, into = (sum(seen[r][way] - handshakes[r][way] for r in ranks) for way in (0, 1))
        flags = 0 if feedback else min(nodes) * (len(nodes) - 1)
        others = size - len(ranks)
        assert out == others * block // 256 * 260 + flags
        assert into == (len(nodes) - 1) * len(ranks) * block // 256 * 260 + flags


def scatter_case(group: pycomm.Group, case: Case) -> list[scattering.Step]:
    return scattering.run(group, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", ["ab", "abba", "aabab"])
def test_processes_whose_ranks_alternate(nodes, dtype):
    """Sums go node by node, blocks and residuals rank by rank."""
    of = [[rank for rank, name in enumerate(nodes) if name == node] for node in "ab"]
    case = Case(pycomm.Int8(rounding="stochastic"), dtype, count=len(nodes) * 5000, steps=2)
    scattering.check(case, of, lambda function, *args: spanning.run(nodes, function, *args))


def storm(group: pycomm.Group, folder: str):
    """Reduce-scatters until an error; returns it and its time."""
    size, block = group.size, 200_000
    x, out, residual = torch.ones(size * block), torch.empty(block), torch.zeros(size * block)
    for turn in range(100_000):
        if turn == 3:
            Path(folder, f"under-way-{group.rank}").touch()
        try:
            pycomm.compressed_reduce_scatter(out, x, INT8, residual=residual, group=group)
        except pycomm.CollectiveError as error:
            at = time.monotonic()
            with pytest.raises(pycomm.GroupUnusable):
                pycomm.barrier(group=group)
            group.close()
            return type(error), error.rank, error.operation, at
    return None


@pytest.mark.parametrize(("nodes", "victim"), [([1, 1], 1), ([2, 2], 0), ([2, 1], 1)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_rank_that_dies_or_stops(tmp_path, nodes, victim, number):
    size = sum(nodes)
    kind = pycomm.PeerDied if number == signal.SIGKILL else pycomm.Timeout
    with spanning.ranks(nodes, storm, str(tmp_path), timeout=2.0) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == size)
        hit = ranks.signal(victim, number)
        for outcome in ranks.wait_for([rank for rank in range(size) if rank != victim], 30):
            assert outcome.error is None, outcome.trace
            *what, at = outcome.value
            assert what == [kind, victim, "reduce_scatter"]
            assert at - hit < 6
        if number == signal.SIGSTOP:
            ranks.signal(victim, signal.SIGCONT)
            (late,) = ranks.wait_for([victim], 30)
            assert issubclass(late.value[0], pycomm.CollectiveError)


def test_the_model_itself():
    """Against sums in float64, so that the model cannot be wrong in the same way."""
    inputs = [compressing.gradient(torch.float32, 4 * 512, rank) for rank in range(4)]
    codec = compressing.codec_of(INT8, torch.float32)
    made = Scatter(inputs, [[0, 3], [1, 2]], codec).run()
    exact = sum(x.double() for x in inputs) / 4
    largest = max(x.abs().max() for x in inputs)
    for rank, block in enumerate(made):
        wanted = exact[rank * 512 : (rank + 1) * 512]
        assert (block - wanted).abs().max() <= 1.01 * largest / 254
