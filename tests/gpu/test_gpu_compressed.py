"""Compressed all-reduces and codecs on a real device: the same bits as the CPU."""

from __future__ import annotations

import functools
from typing import Any

import compressing
import gpu_ranks
import pytest
import sweep
import torch
from compressing import FLOATS, gradient, on_device

import pycomm
from pycomm import _C
from pycomm._inputs import operation_of
from pycomm._runtime import cuda

pytestmark = pytest.mark.gpu

COUNTS = (0, 1, 17, 4099, 16_383, 16_384, 16_385, 3 * 16_384 + 1, 300_007)
BLOCKS = (
    pycomm.Int8(),
    pycomm.Int8(block=128),
    pycomm.Int8(block=4096),
    pycomm.Int8(rounding="stochastic", seed=7),
    pycomm.Int8(block=128, rounding="stochastic"),
    pycomm.Cast(torch.bfloat16),
    pycomm.Cast(torch.float16),
    pycomm.Identity(),
)
LISTS = (
    pycomm.TopK(0.01),
    pycomm.TopK(0.05, values=torch.bfloat16),
    pycomm.TopK(0.02, values=torch.int8, momentum=0.9),
)


Case = functools.partial(compressing.Case, algorithm="auto", steps=2, scale=0.01)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def check(world: pycomm.LocalWorld, case: compressing.Case) -> None:
    want = world.run(on_device, case, "cpu")
    for rank, (mine, wanted) in enumerate(
        zip(world.run(on_device, case, "cuda"), want, strict=True)
    ):
        assert all(map(same_bits, mine, wanted)), (rank, case)


@pytest.mark.parametrize(
    ("size", "compression", "dtype"), sweep.a_third_of(gpu_ranks.SIZES, BLOCKS, FLOATS), ids=str
)
def test_blocks_have_the_bits_of_the_cpu(
    size: int, compression: pycomm.Compression, dtype: torch.dtype
) -> None:
    block = getattr(compression, "block", 128)
    with pycomm.LocalWorld(size) as world:
        for turn, count in enumerate(COUNTS):
            op, feedback = ("avg", "sum")[turn % 2], turn % 3 > 0
            offset = (0, 7, 1234)[turn % 3] * block
            check(world, Case(compression, dtype, count, op=op, feedback=feedback, offset=offset))


@pytest.mark.parametrize(
    ("size", "compression", "dtype"), sweep.a_third_of(gpu_ranks.SIZES, LISTS, FLOATS), ids=str
)
def test_top_k_has_the_bits_of_the_cpu(
    size: int, compression: pycomm.Compression, dtype: torch.dtype
) -> None:
    with pycomm.LocalWorld(size) as world:
        for turn, count in enumerate((0, 1, 1501, 65_536, 65_537, 390_001)):
            check(world, Case(compression, dtype, count, op=("avg", "sum")[turn % 2]))


def run_fed(
    group: pycomm.Group, compression: pycomm.Compression | None, used: bool, device: str
) -> list[torch.Tensor]:
    """A call as hooks make it: returns the result, the residuals, and the residuals before."""
    count = 70_001
    x = gradient(torch.float32, count, group.rank).to(device) * used
    fed = ("residual", "velocity", "residual_before", "velocity_before")
    kept = {
        name: gradient(torch.float32, count, group.rank, step).to(device)
        for step, name in enumerate(fed if compression is not None else (), 1)
    }
    scale = torch.tensor(0.37, device=device)
    codec = _C.Codec(0) if compression is None else compression.codec(count, x.dtype, 0)
    call = _C.Call(
        operation_of("all_reduce", "two_shot", x.dtype, "avg"),
        count=count,
        input=x.data_ptr(),
        output=x.data_ptr(),
        codec=codec,
        momentum=0.9,
        seed=0,
        step=0,
        offset=65_536,  # the second chunk of the whole: the second rank's
        hold_unused=True,
        scale=scale.data_ptr(),
        **{name: kept[name].data_ptr() if name in kept else 0 for name in fed},
    )
    tensors = (x, *kept.values(), scale)
    if device == "cpu":
        group._core.run_call(call)
    else:
        group._cuda_side(x.device).run_bucket([call], tensors)
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("users", [0, 1, 2])
@pytest.mark.parametrize("compression", [None, pycomm.Int8(), pycomm.TopK(0.01)], ids=str)
def test_scaled_and_unused_tensors_have_the_bits_of_the_cpu(
    compression: pycomm.Compression | None, users: int
) -> None:
    def body(group: pycomm.Group) -> None:
        mine, wanted = (run_fed(group, compression, group.rank < users, d) for d in ("cuda", "cpu"))
        assert all(map(same_bits, mine, wanted))

    with pycomm.LocalWorld(2) as world:
        world.run(body)


@pytest.mark.parametrize("lanes", [1, 5])
def test_few_blocks_and_large_tensors(lanes: int) -> None:
    count = (1 << (19 if gpu_ranks.EMULATED else 21)) + 3
    with pycomm.LocalWorld(2, max_blocks=lanes) as world:
        for compression in (pycomm.Int8(), pycomm.Identity(), pycomm.TopK(0.01)):
            check(world, Case(compression, count=count))


@pytest.mark.parametrize(
    ("size", "compression", "algorithm"),
    sweep.a_third_of([2, 3, 8], BLOCKS, ["ring", "tree"]),
    ids=str,
)
def test_ring_and_tree_lose_nothing(
    size: int, compression: pycomm.Compression, algorithm: str
) -> None:
    """Their order of addition is that of the device's lanes; so ranks agree, and sums are kept."""
    case = Case(compression, count=100_003, algorithm=algorithm, op="sum", steps=1)
    with pycomm.LocalWorld(size) as world:
        seen = world.run(on_device, case, "cuda")
    results, residuals = zip(*seen, strict=True)
    assert all(same_bits(result, results[0]) for result in results)
    before = sum(case.input(rank, 0).double() for rank in range(size))
    after = results[0].double() + sum(residual.double() for residual in residuals)
    assert torch.allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("compression", [*BLOCKS, *LISTS[:2]], ids=str)
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_what_is_not_finite_is_told_and_residuals_stay(
    poison: float, compression: pycomm.Compression
) -> None:
    def body(group: pycomm.Group) -> None:
        tensor = gradient(torch.float32, 20_000, group.rank).cuda()
        residual = torch.full((20_000,), 0.5, device="cuda")
        work = pycomm.compressed_all_reduce(
            tensor.clone(), compression, residual=residual, group=group, async_op=True
        )
        assert not work.nonfinite
        before = residual.clone()
        if group.rank == 1:
            tensor[777] = poison
        with pytest.raises(pycomm.NonFinite):
            pycomm.compressed_all_reduce(
                tensor, compression, residual=residual, group=group, strict=True
            )
        assert not tensor[777].isfinite()
        assert torch.equal(residual, before)

    with pycomm.LocalWorld(2) as world:
        world.run(body)


@pytest.mark.parametrize(
    ("compression", "dtype"), sweep.a_third_of([*BLOCKS, *LISTS], FLOATS), ids=str
)
def test_encode_and_decode_are_those_of_the_cpu(
    compression: pycomm.Compression, dtype: torch.dtype
) -> None:
    for count in (0, 1, 15, 4097, 65_536, 65_537, 200_003):
        x = gradient(dtype, count, 0)
        wire = compression.encode(x, step=3, offset=4096)
        on_device = compression.encode(x.cuda(), step=3, offset=4096)
        assert same_bits(on_device.cpu(), wire), count
        for kind in [dtype] if isinstance(compression, pycomm.Identity) else FLOATS:
            want = compression.decode(wire, count, dtype=kind)
            assert same_bits(compression.decode(on_device, count, dtype=kind).cpu(), want), count
        if isinstance(compression, pycomm.Identity) and dtype != torch.float32:
            continue  # its wire has the tensor's own type
        sums = gradient(torch.float32, count, 1)
        want = compression.decode(wire, count, sums.clone(), add=True)
        got = compression.decode(on_device, count, sums.cuda(), add=True)
        assert same_bits(got.cpu(), want), count


@pytest.mark.parametrize("compression", LISTS, ids=str)
def test_selection_is_that_of_the_cpu(compression: pycomm.TopK) -> None:
    ties = torch.ones(100_000)
    sparse = torch.zeros(100_000)
    sparse[::5000] = -1
    for x in (gradient(torch.float32, 100_000, 0), ties, sparse, torch.zeros(1000)):
        for mine, wanted in zip(compression.select(x.cuda()), compression.select(x), strict=True):
            assert torch.equal(mine.cpu(), wanted)


@pytest.mark.parametrize("compression", [BLOCKS[0], BLOCKS[5], LISTS[0]], ids=str)
def test_wrong_bytes_are_refused(compression: pycomm.Compression) -> None:
    wire = compression.encode(gradient(torch.float32, 5000, 0).cuda())
    for wrong in (wire[:12], wire[:-4].clone()):
        with pytest.raises(ValueError, match=r"wire|truncated"):
            compression.decode(wrong, 5000)
    with pytest.raises(ValueError, match="5000 elements"):
        compression.decode(wire, 4999)
    broken = wire.clone()
    broken[0] = 0
    with pytest.raises(ValueError, match="not a pycomm encoding"):
        compression.decode(broken, 5000)
    if isinstance(compression, pycomm.TopK):
        # Of ones, the indices 0 to 49, with 6 low bits each, after a header, a count and 50 values.
        twice = compression.encode(torch.ones(5000).cuda())
        twice[16 + 4 + 50 * 4] = 0
        few, many = wire.clone(), wire.clone()
        few[-8:], many[-8:] = 0, 255
        for wrong in (twice, few, many):
            with pytest.raises(ValueError, match="wrong index"):
                compression.decode(wrong, 5000)


def test_lists_beyond_the_window_are_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "STAGING_BYTES", 4 << 20)

    def body(group: pycomm.Group) -> None:
        tensor = torch.ones(1 << 19, device="cuda")
        with pytest.raises(ValueError, match="staging_bytes of at least"):
            pycomm.compressed_all_reduce(tensor, pycomm.TopK(0.6), group=group)
        assert pycomm.all_reduce(torch.ones(3, device="cuda"), group=group).sum().item() == 6

    with pycomm.LocalWorld(2) as world:
        world.run(body)
    with pycomm.LocalWorld(2, staging_bytes=8 << 20) as world:
        check(world, Case(pycomm.TopK(0.6), count=1 << 19, steps=1))


def test_disagreement_about_compression_is_told() -> None:
    def body(group: pycomm.Group) -> None:
        with pytest.raises(pycomm.Mismatch, match=r"blocks of 256.*blocks of 512"):
            pycomm.compressed_all_reduce(
                torch.ones(10, device="cuda"), pycomm.Int8(256 * (group.rank + 1)), group=group
            )

    with pycomm.LocalWorld(2) as world:
        world.run(body)


def check_cases(group: pycomm.Group, wanted: Any) -> None:
    for case, of_rank in wanted:
        assert all(map(same_bits, on_device(group, case, "cuda"), of_rank[group.rank])), case


@pytest.mark.parametrize(
    ("size", "layout"), sweep.half_of([1, 2, 4], [gpu_ranks.PEER, gpu_ranks.PINNED])
)
def test_processes(size: int, layout: str) -> None:
    cases = [Case(c, count=70_001) for c in (pycomm.Int8(), pycomm.Cast(), pycomm.TopK(0.01))]
    with pycomm.LocalWorld(size) as world:
        wanted = [(case, world.run(on_device, case, "cpu")) for case in cases]
    gpu_ranks.run(size, layout, check_cases, wanted)
