"""Groups that span nodes, over NCCL: the same bits as on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import compressing
import gpu_nodes
import helpers
import pytest
import scattering
import sweep
import torch
from compressing import Case

import pycomm
from pycomm._nccl import compressed as nccl_compressed

pytestmark = [pytest.mark.gpu, gpu_nodes.needs_gpus]

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ARITHMETIC = ("sum", "avg", "min", "max", "prod")
BITWISE = ("band", "bor", "bxor")
REDUCTIONS = [
    *((dtype, op) for dtype in FLOATS for op in ARITHMETIC),
    *((dtype, op) for dtype in INTEGERS for op in (*ARITHMETIC, *BITWISE)),
    *((torch.bool, op) for op in ("sum", "min", "max", "prod", *BITWISE)),
    *((torch.uint16, op) for op in ("sum", "prod", *BITWISE)),
    *((torch.complex64, op) for op in ("sum", "avg")),
]
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 65504.0]
COUNTS = (0, 1, 1003, 300_001)
INT8, TOPK = pycomm.Int8(), pycomm.TopK(density=0.01)
STOCHASTIC = pycomm.Int8(block=1024, rounding="stochastic", seed=5)
REDUCED = [
    Case(INT8, count=0),
    Case(TOPK, count=1),
    Case(INT8, count=200_003, offset=65_536 + 256, steps=2),
    Case(INT8, torch.bfloat16, count=150_000, op="sum", steps=2),
    Case(STOCHASTIC, count=150_000, offset=49_152 + 1024, steps=2),
    Case(pycomm.Cast(), count=40_003, feedback=False),
    Case(pycomm.Identity(), torch.float16, count=70_000, steps=2),
    Case(TOPK, count=3000, steps=3),
    Case(TOPK, count=400_003, offset=3 << 17, steps=2),
    Case(pycomm.TopK(k=2000, values=torch.int8), torch.float16, count=300_000, steps=2),
    Case(pycomm.TopK(density=0.02, momentum=0.9), count=150_000, op="sum", steps=2),
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


def values(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Random values; floats begin with special ones, each pair of which meets on some two ranks."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 200, (count,), generator=generator).to(dtype)
    x = torch.randn(count, generator=generator)
    special = torch.tensor(SPECIAL)
    x[:64] = special.repeat(8) if rank % 2 else special.repeat_interleave(8)
    return torch.complex(x, x.flip(0)) if dtype.is_complex else x.to(dtype)


def reductions(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    return [
        pycomm.all_reduce(values(dtype, 1003, group.rank).to(device), op, group=group)
        for dtype, op in REDUCTIONS
    ]


def collectives(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """On a stream that is not the default one; nothing waits on the host before the end."""
    seen = []
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16):
            x = compressing.gradient(dtype, count, group.rank).to(device)
            for op in ("sum", "avg", "max"):
                seen.append(pycomm.all_reduce(x.clone(), op, group=group))
            seen.append(pycomm.all_reduce(x, out=torch.empty_like(x), group=group))
            seen.append(pycomm.broadcast(x.clone(), group.size - 1, group=group))
            gathered = torch.empty(count * group.size, dtype=dtype, device=device)
            seen.append(pycomm.all_gather(gathered, x, group=group))
            part = torch.empty(count, dtype=dtype, device=device)
            seen.append(pycomm.reduce_scatter(part, gathered.clone(), group=group))
            later = x.clone()
            pycomm.all_reduce(later, group=group, async_op=True).wait()
            seen.append(later)
    return seen


def other_forms(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """Several tiles, strides, types that are only moved, and two operations under way."""
    seen = []
    x = values(torch.float32, 3_000_001, group.rank).to(device)
    seen.append(pycomm.all_reduce(x.clone(), "avg", group=group))
    for dtype in (torch.bool, torch.float8_e5m2, torch.uint16):
        x = values(torch.float32, 3001, group.rank).to(dtype).to(device)
        gathered = torch.empty(3001 * group.size, dtype=dtype, device=device)
        seen.append(pycomm.all_gather(gathered, x, group=group))
    square = values(torch.float32, 64, group.rank).to(device).view(8, 8)
    seen.append(pycomm.all_reduce(square.clone().t(), group=group))
    twice = square.clone()
    works = [pycomm.all_reduce(twice, group=group, async_op=True) for _ in range(2)]
    for work in reversed(works):
        work.wait()
    return [*seen, twice]


def compressed(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """Results, and what is left to send."""
    return [kept for case in REDUCED for kept in compressing.on_device(group, case, device)]


def tiles(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    nccl_compressed._TILE_ELEMENTS = 1 << 17
    cases = [Case(INT8, count=750_000, offset=256), Case(STOCHASTIC, count=350_000, steps=2)]
    return [kept for case in cases for kept in compressing.on_device(group, case, device)]


def scattered(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    seen = []
    for case in SCATTERED:
        for step in scattering.run(group, case, device):
            seen += [step.result] if step.residual is None else [step.result, step.residual]
    return seen


def on_both(
    group: pycomm.Group, function: Callable[[pycomm.Group, str], list[torch.Tensor]]
) -> None:
    """Compares a GPU with the CPU."""
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = [tensor.cpu() for tensor in function(group, "cuda")]
    wanted = function(group, "cpu")
    for index, (ours, other) in enumerate(zip(mine, wanted, strict=True)):
        same = torch.equal(
            ours.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        )
        assert same, index


@pytest.mark.parametrize(
    ("nodes", "function"),
    sweep.a_third_of(
        gpu_nodes.LAYOUTS, [reductions, collectives, compressed, other_forms, scattered]
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bits_of_the_cpu(
    nodes: list[int] | str, function: Callable[[pycomm.Group, str], list[torch.Tensor]]
) -> None:
    gpu_nodes.run(nodes, on_both, function)


def test_several_tiles() -> None:
    gpu_nodes.run([2, 2], on_both, tiles)


def infinities(group: pycomm.Group) -> list[tuple[bool, ...]]:
    """A value that is infinite, or whose sum the type might not hold, on one rank."""
    seen, last, count = [], group.size - 1, 100_000
    for dtype, value in ((torch.float32, float("inf")), (torch.float16, 40_000.0)):
        for compression in (INT8, TOPK):
            x = compressing.gradient(dtype, count, group.rank).cuda()
            if group.rank == last:
                x[70_000] = value
            residual = torch.full((count,), 0.5, device="cuda")
            work = pycomm.compressed_all_reduce(
                x, compression, residual=residual, op="sum", group=group, async_op=True
            )
            seen.append((work.nonfinite, not x[70_000].isfinite(), bool((residual == 0.5).all())))
    for feedback in (False, True):
        x = torch.ones(1000 * group.size, device="cuda")
        x[300] = float("inf") if group.rank == last else 1.0
        residual = torch.full_like(x, 0.5) if feedback else None
        output = torch.empty(1000, device="cuda")
        with pytest.raises(pycomm.NonFinite):
            pycomm.compressed_reduce_scatter(
                output, x, INT8, residual=residual, strict=True, group=group
            )
        unharmed = residual is None or bool((residual == 0.5).all())
        seen.append((True, bool(output.isfinite().all()) == (group.rank > 0), unharmed))
    work = pycomm.compressed_all_reduce(
        torch.empty(0, device="cuda"), INT8, group=group, async_op=True
    )
    assert not work.nonfinite
    return seen


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [2, 1]], ids=str)
def test_infinities_reach_no_residual(nodes: list[int]) -> None:
    assert gpu_nodes.run(nodes, infinities) == [[(True, True, True)] * 6] * sum(nodes)


def rooted(group: pycomm.Group) -> None:
    """These go through host memory."""
    n, r = group.size, group.rank
    blocks = [torch.full((100,), 10.0 * r + to, device="cuda") for to in range(n)]
    out = torch.empty(100 * n, device="cuda")
    pycomm.all_to_all(out, torch.cat(blocks), group=group)
    assert out.cpu().view(n, 100)[:, 0].tolist() == [10.0 * source + r for source in range(n)]
    whole = torch.empty(100 * n, device="cuda") if r == 1 else None
    pycomm.gather(blocks[1], whole, 1, group=group)
    if whole is not None:
        assert whole.cpu().view(n, 100)[:, 0].tolist() == [10.0 * s + 1 for s in range(n)]
    mine = torch.empty(100, device="cuda")
    pycomm.scatter(mine, torch.cat(blocks) if r == 1 else None, 1, group=group)
    assert (mine == 10 + r).all()
    x = torch.full((1000,), float(r), device="cuda")
    pycomm.reduce(x, 1, group=group)
    assert (x == (sum(range(n)) if r == 1 else r)).all()


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1]], ids=str)
def test_rooted_operations(nodes: list[int]) -> None:
    gpu_nodes.run(nodes, rooted)


def refused(group: pycomm.Group) -> None:
    x = torch.ones(1000, device="cuda")
    two_shot = "algorithm must be auto or two_shot between nodes over NCCL, got ring"
    with pytest.raises(ValueError, match=two_shot):
        pycomm.all_reduce(x, algorithm="ring", group=group)
    with pytest.raises(ValueError, match=two_shot):
        pycomm.compressed_all_reduce(x, INT8, algorithm="ring", group=group)
    with pytest.raises(ValueError, match="bool"):
        pycomm.all_reduce(x.bool(), "avg", group=group)
    pycomm.all_reduce(x, group=group)  # the group is as good as before
    assert (x == 2).all()


def test_what_is_refused() -> None:
    gpu_nodes.run([1, 1], refused)


def abandoned(group: pycomm.Group) -> None:
    """A tensor of another stream, which is gone before the operation on it has ended."""
    for _ in range(2):
        given = torch.ones(1003, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pycomm.all_reduce(given, group=group)
        del given
    torch.cuda.synchronize()


def close_in_a_child(group: pycomm.Group) -> tuple[int, list[float]]:
    """A forked child gives the group up; its parent goes on."""
    pid = os.fork()
    if pid == 0:
        group.abort()
        group.close()
        os._exit(7)
    helpers.wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), 20)
    status = os.waitpid(pid, 0)[1]
    tensor = torch.ones(3, device="cuda")
    return os.waitstatus_to_exitcode(status), pycomm.all_reduce(tensor, group=group).tolist()


def test_a_forked_child_leaves_the_parents_connections() -> None:
    assert gpu_nodes.run([1, 1], close_in_a_child) == [(7, [2.0] * 3)] * 2


def test_memory_waits_for_the_streams_that_use_it() -> None:
    gpu_nodes.run([1, 1], abandoned)
