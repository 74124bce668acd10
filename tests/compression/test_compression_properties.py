"""Properties that hold for every gradient: bounds, conservation, scaling, zeros, no bias."""

import math

import golden
import pytest
import torch
from compressing import ALGORITHMS, FLOATS
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm

ULP = 2.0**-23
BLOCKS = (128, 256, 512, 1024, 2048, 4096)
KINDS = ("normal", "uniform", "sparse", "outliers", "ties", "opposite", "tiny", "subnormal", "zero")


def contribution(kind, dtype, count, rank, seed):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    x = torch.randn(count, generator=generator)
    if kind == "uniform":
        x = torch.rand(count, generator=generator) - 0.5
    elif kind == "sparse":
        x[torch.rand(count, generator=generator) < 0.95] = 0
    elif kind == "outliers":
        x *= torch.where(torch.rand(count, generator=generator) < 0.01, 1000, 1)
    elif kind == "ties":
        x = torch.randint(-2, 3, (count,), generator=generator).float()
    elif kind == "opposite":  # ranks cancel each other all but completely
        x = torch.ones(count) * (-1) ** rank + x * 2**-10
    elif kind == "tiny":
        x = x * 1e-30
    elif kind == "subnormal":
        x = x * 2.0**-140
    elif kind == "zero":
        x = x * 0
    return x.to(dtype)


int8_codecs = st.builds(
    pycomm.Int8, st.sampled_from(BLOCKS), st.sampled_from(("nearest", "stochastic"))
)
top_k_codecs = st.builds(
    pycomm.TopK,
    density=st.sampled_from((0.001, 0.01, 0.1, 0.2)),
    values=st.sampled_from((torch.float32, torch.bfloat16, torch.int8)),
)
block_codecs = st.one_of(
    int8_codecs,
    st.builds(pycomm.Cast, st.sampled_from((torch.bfloat16, torch.float16))),
    st.just(pycomm.Identity()),
)
# What a codec may be used with.
ways = st.one_of(
    st.tuples(block_codecs, st.sampled_from(ALGORITHMS)),
    st.tuples(top_k_codecs, st.just("two_shot")),
)
sizes, counts, seeds = st.integers(1, 6), st.integers(1, 3000), st.integers(0, 1 << 20)
dtypes, kinds = st.sampled_from(FLOATS), st.sampled_from(KINDS)
operations = st.sampled_from(("avg", "sum"))


def run(size, body):
    with pycomm.LocalWorld(size, 30) as world:
        return world.run(body)


def encodings(algorithm, size):
    """The bound of a mean's error, in A / 254: A is the largest magnitude that any rank has in the
    block, so a partial sum of m contributions has m A at most, and is off by half of m A / 127.

    Two-shot encodes each contribution and the mean: 1 + 1. A ring encodes sums of 1, 2, ..., n - 1
    and the mean: ((n - 1) n / 2) / n + 1. A tree encodes every rank's subtree; those of one depth
    have n ranks at most, and there are log2(n) depths below the root: log2(n) + 1. No decoded
    magnitude exceeds the largest encoded one, so errors do not make partial sums any larger.
    """
    if algorithm == "two_shot" or size == 1:
        return 2
    return (size + 1) / 2 if algorithm == "ring" else math.log2(size) + 1


@settings(max_examples=150)
@given(int8_codecs, st.sampled_from(ALGORITHMS), sizes, counts, dtypes, kinds, seeds, operations)
def test_int8_is_off_by_no_more_than_documented(
    compression, algorithm, size, count, dtype, kind, seed, op
):
    inputs = [contribution(kind, dtype, count, rank, seed) for rank in range(size)]

    def body(group):
        return pycomm.compressed_all_reduce(
            inputs[group.rank].clone(), compression, algorithm=algorithm, op=op, group=group
        )

    result = run(size, body)[0].double()
    exact = torch.stack(inputs).double().sum(0) / (size if op == "avg" else 1)
    largest = torch.stack(inputs).double().abs().amax(0)
    padded = torch.zeros(-(-count // compression.block) * compression.block, dtype=torch.float64)
    padded[:count] = largest
    per_block = padded.view(-1, compression.block).amax(1).repeat_interleave(compression.block)
    largest = per_block[:count] * (1 if op == "avg" else size)
    step = 2 if compression.rounding == "stochastic" else 1
    bound = encodings(algorithm, size) * step * largest / 254
    bound += largest * (size + 4) * 4 * ULP  # of fp32, on the way
    info = torch.finfo(dtype)
    bound += exact.abs().add(bound) * info.eps + info.tiny * info.eps  # of the tensor's type
    bound += encodings(algorithm, size) * size * 127 * 2.0**-126  # blocks that become zero
    assert ((result - exact).abs() <= bound).all()


@settings(max_examples=200)
@given(ways, sizes, counts, dtypes, kinds, seeds, operations, st.booleans())
def test_nothing_is_lost(way, size, count, dtype, kind, seed, op, fed):
    """Gradients plus residuals before equal n times the result plus residuals after."""
    (compression, algorithm), inputs, before = way, [], []
    for rank in range(size):
        inputs.append(contribution(kind, dtype, count, rank, seed))
        more = contribution(kind, torch.float32, count, rank, seed + 1) / 10
        before.append(more if fed else torch.zeros(count))

    def body(group):
        residual = before[group.rank].clone()
        result = inputs[group.rank].clone()
        options = {"op": op, "algorithm": algorithm, "residual": residual, "group": group}
        work = pycomm.compressed_all_reduce(result, compression, async_op=True, **options)
        assert not work.nonfinite
        return result, residual

    if refused(compression, count, dtype):
        return
    seen = run(size, body)
    own = torch.stack([x.double() + e.double() for x, e in zip(inputs, before, strict=True)])
    times = size if op == "avg" else 1
    out = times * seen[0][0].double() + torch.stack([e.double() for _, e in seen]).sum(0)
    close(out, own, size)


def refused(compression, count, dtype):
    """True if top-k is refused because it would save nothing on such a small tensor."""
    try:
        compression.codec(count, dtype)
    except ValueError:
        return True
    return False


def close(out, own, size, times=1):
    """Equal up to fp32 rounding of the sum and of a block's scale."""
    allowed = own.abs().sum(0) + size * own.abs().max() / 100
    slack = times * size * 2 * (allowed * 4 * ULP + 2.0**-148)
    wrong = (out - own.sum(0)).abs() > slack
    assert not wrong.any(), (out - own.sum(0))[wrong]


@settings(max_examples=12)
@given(ways, sizes, dtypes, st.sampled_from(("normal", "outliers", "ties")), seeds)
def test_what_is_lost_in_a_step_comes_in_later_ones(way, size, dtype, kind, seed):
    """Over a hundred steps, the sum of all gradients equals all results plus the last residuals."""
    (compression, algorithm), count, steps = way, 600, 100
    if refused(compression, count, dtype):
        return

    def body(group):
        residual, total = torch.zeros(count), torch.zeros(count, dtype=torch.float64)
        came = torch.zeros(count, dtype=torch.float64)
        for step in range(steps):
            x = contribution(kind, dtype, count, group.rank, seed + step) / 8
            came += x.double()
            pycomm.compressed_all_reduce(
                x, compression, residual=residual, algorithm=algorithm, step=step, group=group
            )
            total += x.double()
        return came, total, residual

    seen = run(size, body)
    own = torch.stack([came for came, *_ in seen])
    out = size * seen[0][1] + torch.stack([e.double() for *_, e in seen]).sum(0)
    # The rounding error of a step is proportional to its own gradients and residuals.
    kept = torch.stack([e.double().abs() for *_, e in seen]).max() + 1000
    slack = steps * size * 8 * ULP * (own.abs().max() / 10 + kept)
    assert (out - own.sum(0)).abs().max() <= slack
    if not isinstance(compression, pycomm.TopK):  # and the rest is that of a single step
        last = torch.stack([e.double().abs() for *_, e in seen]).max()
        assert last <= 1000 * size / 8


@settings(max_examples=80)
@given(ways, sizes, counts, st.sampled_from(KINDS[:6]), seeds, st.integers(-50, 50))
def test_scaling_by_a_power_of_two_commutes(way, size, count, kind, seed, power):
    """Bit for bit, residuals included."""
    compression, algorithm = way
    if refused(compression, count, torch.float32):
        return
    if "float16" in str(compression) and "bfloat16" not in str(compression):
        power %= 3  # upwards, within its range
        kind = "ties"

    def body(group, factor):
        x = contribution(kind, torch.float32, count, group.rank, seed) * factor
        residual = contribution(kind, torch.float32, count, group.rank, seed + 1) * factor
        options = {"residual": residual, "algorithm": algorithm, "group": group}
        return pycomm.compressed_all_reduce(x, compression, **options), residual

    factor = 2.0**power
    for plain, scaled in zip(
        run(size, lambda group: body(group, 1.0)),
        run(size, lambda group: body(group, factor)),
        strict=True,
    ):
        assert golden.same_bits(plain[0] * factor, scaled[0])
        assert golden.same_bits(plain[1] * factor, scaled[1])


@settings(max_examples=80)
@given(ways, sizes, counts, dtypes, st.sampled_from(KINDS[:6]), seeds, st.booleans())
def test_zeros_stay_zeros(way, size, count, dtype, kind, seed, fed):
    (compression, algorithm) = way
    if refused(compression, count, dtype):
        return
    empty = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.3

    def body(group):
        x = contribution(kind, dtype, count, group.rank, seed)
        x[empty] = -0.0 if seed % 2 else 0.0
        residual = torch.zeros(count) if fed else None
        options = {"residual": residual, "algorithm": algorithm, "group": group}
        pycomm.compressed_all_reduce(x, compression, **options)
        return bool((x[empty] == 0).all()) and (not fed or bool((residual[empty] == 0).all()))

    assert all(run(size, body))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_subnormal_gradients_wait_in_the_residual(algorithm):
    """A block too small for a scale becomes zero and is kept, exactly, until there is enough."""

    def body(group):
        x = torch.full((300,), 2.0**-130)
        residual = torch.zeros(300)
        options = {"residual": residual, "algorithm": algorithm, "op": "sum", "group": group}
        got = [
            pycomm.compressed_all_reduce(x.clone(), pycomm.Int8(), **options).double().sum().item()
            for _ in range(3000)
        ]
        return got, residual.double()

    seen = run(2, body)
    got = seen[0][0]
    assert got[:200] == [0.0] * 200
    kept = sum(residual for _, residual in seen).sum().item()
    assert sum(got) > 0
    assert sum(got) + kept == pytest.approx(2 * 300 * 3000 * 2.0**-130, rel=1e-5)


@settings(max_examples=100)
@given(st.integers(1, 5000), st.sampled_from((0.0003, 0.01, 0.1, 0.5)), kinds, seeds)
def test_top_k_contracts(count, density, kind, seed):
    """|x - C(x)|^2 <= (1 - k/n) |x|^2: no other k elements leave less."""
    compression = pycomm.TopK(density)
    x = contribution(kind, torch.float32, count, 0, seed)
    if refused(compression, count, torch.float32):
        return
    sent = compression.decode(compression.encode(x), count).double()
    k = math.ceil(density * count)
    left, whole = (x.double() - sent).square().sum(), x.double().square().sum()
    assert left <= (1 - k / count) * whole * (1 + 1e-12)
    assert int(sent.count_nonzero()) == min(k, int(x.count_nonzero()))
    if k < count:
        best = x.double().square().sort().values[: count - k].sum()
        assert left == pytest.approx(best.item(), rel=1e-9)


def test_stochastic_rounding_has_no_bias():
    """Over many draws the mean is the value, wherever it lies between two integers."""
    count, draws, block = 4096, 300, 256
    x = torch.randn(count, generator=torch.Generator().manual_seed(11))
    compression = pycomm.Int8(block, "stochastic", seed=2024)
    scale = (x.view(-1, block).abs().amax(1) / 127).repeat_interleave(block).double()
    errors = (
        torch.stack(
            [
                compression.decode(compression.encode(x, step=step), count).double() / scale
                for step in range(draws)
            ]
        )
        - x.double() / scale
    )
    assert errors.abs().max() < 1 + 1e-4
    part = (x.double() / scale) % 1
    variance = part * (1 - part)
    for begin in range(16):
        here = (part >= begin / 16) & (part < (begin + 1) / 16)
        z = errors[:, here].sum() / (variance[here].sum() * draws).sqrt()
        assert abs(z) < 4
    spread = errors.square().mean(0)[variance > 0.1] / variance[variance > 0.1]
    assert 0.98 < spread.mean() < 1.02
    each = errors.sum(0) / (variance * draws).sqrt().clamp(min=0.5)
    assert each.abs().max() < 5.5
    # Errors of neighbours, and of successive steps, are not correlated.
    lucky = errors / variance.sqrt().clamp(min=0.1)
    for a, b in (
        (lucky[1:], lucky[:-1]),
        (lucky[:, 1:], lucky[:, :-1]),
        (lucky[:, 64:], lucky[:, :-64]),
    ):
        assert abs((a * b).mean() * math.sqrt(a.numel())) < 4.5


def test_ranks_and_results_draw_apart():
    """Two ranks round the same gradient with other random bits, so errors cancel in the mean."""
    x = torch.randn(8192, generator=torch.Generator().manual_seed(3))
    compression = pycomm.Int8(256, "stochastic", seed=5)

    def body(group):
        residual = torch.zeros_like(x)
        pycomm.compressed_all_reduce(x.clone(), compression, residual=residual, group=group)
        return residual

    # Rank 0 owns all of it, so that its residual also has what the result lost.
    first, second = (e.double() for e in run(2, body))
    correlation = (first * second).sum() / (first.square().sum() * second.square().sum()).sqrt()
    assert abs(correlation) * math.sqrt(8192) < 4.5
