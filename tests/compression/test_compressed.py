"""Compressed all-reduces of every kind: same bits however and wherever, and every kind of array."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import compressing
import golden
import helpers
import numpy as np
import pytest
import torch
from compressing import ALGORITHMS, Case, gradient

import pycomm

COMPRESSIONS = {
    "int8": pycomm.Int8(),
    "stochastic": pycomm.Int8(128, "stochastic", seed=7),
    "bf16": pycomm.Cast(),
    "identity": pycomm.Identity(),
    "top-k": pycomm.TopK(0.05),
}
WAYS = [
    (name, algorithm)
    for name in COMPRESSIONS
    for algorithm in (ALGORITHMS if name != "top-k" else ("two_shot",))
]


def reduce_once(group, compression, source, **options):
    return pycomm.compressed_all_reduce(source, compression, group=group, **options)


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_more_ranks_than_cores(name, algorithm):
    case = Case(COMPRESSIONS[name], count=5003, algorithm=algorithm, steps=3)
    compressing.check(case, 9, staging_bytes=4 << 20)


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_processes(name, algorithm):
    """Ranks that are processes have the model's results, too."""
    size, case = 3, Case(COMPRESSIONS[name], torch.bfloat16, 20_001, algorithm, steps=2)
    seen = helpers.run_group(size, compressing.run, case)
    model = compressing.Model(case, size)
    for step in range(case.steps):
        expected = model.step(step)
        for rank in range(size):
            compressing.compare(f"rank {rank}", seen[rank][step].result, expected)
            kept = torch.from_numpy(model.residuals[rank])
            compressing.compare(f"residual of rank {rank}", seen[rank][step].residual, kept)


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_same_bits_on_all_ranks_and_from_run_to_run(world, name, algorithm):
    case = Case(COMPRESSIONS[name], count=70_001, algorithm=algorithm, steps=2)
    size, runs = 4, [world(4).run(compressing.run, case) for _ in range(3)]
    for step in range(case.steps):
        for run in runs:
            for rank in range(size):
                got, first = run[rank][step], runs[0][rank][step]
                assert golden.same_bits(got.result, runs[0][0][step].result)
                assert golden.same_bits(got.residual, first.residual)


def cuts(count, unit, seed):
    """Slices of whole blocks; the last one may end anywhere."""
    dice = random.Random(seed)
    ends = sorted({dice.randrange(unit, count, unit) for _ in range(6)})
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, count], strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["int8", "stochastic", "bf16"])
def test_same_bits_however_the_whole_is_split(world, name, size):
    """With offset this also holds for residuals and random bits, with other pieces in each step."""
    compression, count = COMPRESSIONS[name], 3 * 16384 * size // 2 + 1001
    unit = getattr(compression, "block", 128)

    def body(group, split):
        residual, results = torch.zeros(count), []
        for step in range(3):
            x = gradient(torch.float32, count, group.rank, step)
            for part in cuts(count, unit, step) if split else [slice(0, count)]:
                options = {"residual": residual[part], "step": step, "offset": part.start}
                reduce_once(group, compression, x[part], **options)
            results.append(x)
        return [*results, residual]

    whole, split = (world(size).run(body, how) for how in (False, True))
    for ours, theirs in zip(whole, split, strict=True):
        assert all(golden.same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["int8", "bf16", "identity"])
def test_to_nearest_without_feedback_needs_no_offset(world, name):
    compression, size, count = COMPRESSIONS[name], 3, 150_001

    def body(group, split):
        x = gradient(torch.float16, count, group.rank)
        for part in cuts(count, 256, 5) if split else [slice(0, count)]:
            reduce_once(group, compression, x[part])
        return x

    whole, split = (world(size).run(body, how) for how in (False, True))
    assert all(golden.same_bits(a, b) for a, b in zip(whole, split, strict=True))


def test_offset_and_step_and_seed_choose_the_random_bits(world):
    def body(group):
        x = gradient(torch.float32, 1000, group.rank)
        drawn = [({}, 7), ({"offset": 1280}, 7), ({"step": 1}, 7), ({}, 8), ({}, 7 + (1 << 32))]
        return [
            reduce_once(group, pycomm.Int8(128, "stochastic", seed), x.clone(), **options)
            for options, seed in drawn
        ]

    first, *others = world(2).run(body)[0]
    for other in others:
        assert not torch.equal(first, other)
        assert (first - other).abs().max() < 10


@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_asynchronous_and_synchronous_are_the_same(world, name, algorithm):
    compression, count, steps = COMPRESSIONS[name], 9001, 6

    def body(group, asynchronous):
        residual, tensors, works = torch.zeros(count), [], []
        for step in range(steps):
            tensors.append(gradient(torch.float32, count, group.rank, step))
            options = {"residual": residual, "step": step, "algorithm": algorithm}
            returned = reduce_once(
                group, compression, tensors[-1], async_op=asynchronous and step % 3 != 2, **options
            )
            if isinstance(returned, pycomm.Work):
                works.append(returned)
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
            assert not work.nonfinite
        assert len(works) == (4 if asynchronous else 0)
        return [*tensors, residual]

    plain, queued = (world(3).run(body, how) for how in (False, True))
    for ours, theirs in zip(plain, queued, strict=True):
        assert all(golden.same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_among_other_operations(world, name):
    """Dense and compressed operations of several sizes take turns, and do not affect each other."""

    def body(group, alone):
        results = []
        for step in range(8):
            x = gradient(torch.float32, (70_001, 300, 5000)[step % 3], group.rank, step)
            if not alone:
                y = torch.full((3000 * step,), float(group.rank))
                pycomm.all_reduce(y, group=group, algorithm=("ring", "tree")[step % 2])
                assert (y == 3).all()
            results.append(reduce_once(group, COMPRESSIONS[name], x, step=step))
        return results

    alone, among = (world(3).run(body, how) for how in (True, False))
    for ours, theirs in zip(alone, among, strict=True):
        assert all(golden.same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


# How a tensor reaches pycomm, and where the result then lies.


class Foreign:
    """An array of a library that torch does not know; it supports only DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def strided(x):
    return torch.zeros(2 * x.numel() + 1)[1::2].copy_(x)


def transposed(x):
    return torch.zeros(4, x.numel() // 4).t().copy_(x.view(-1, 4))


ARRAYS = {
    "tensor": (torch.clone, torch.flatten),
    "strided": (strided, torch.flatten),
    "transposed": (transposed, torch.flatten),
    "in three dimensions": (lambda x: x.clone().view(4, -1, 5), torch.flatten),
    "numpy": (lambda x: x.clone().numpy(), torch.from_numpy),
    "strided numpy": (lambda x: strided(x).numpy(), lambda array: torch.from_numpy(array.copy())),
    "foreign": (lambda x: Foreign(x.clone()), lambda array: array.tensor),
    "parameter": (lambda x: torch.nn.Parameter(x.clone()).detach(), torch.flatten),
}


OF_ONE_DIMENSION = [kind for kind in ARRAYS if kind not in ("transposed", "in three dimensions")]
PAIRS = [(kind, None) for kind in ARRAYS]
PAIRS += [(kind, out_kind) for kind in OF_ONE_DIMENSION for out_kind in OF_ONE_DIMENSION]


@pytest.mark.parametrize(("kind", "out_kind"), PAIRS)
def test_arrays_of_every_kind(world, kind, out_kind):
    """In place or to `out` the bits are the same; the passed tensor is returned."""
    count = 1000
    residual_kind = kind if kind in ("numpy", "foreign") else "tensor"

    def body(group):
        seen = []
        for compression in COMPRESSIONS.values():
            x = gradient(torch.float32, count, group.rank)
            make, look = ARRAYS[kind]
            array, out = make(x), None
            if out_kind is not None:
                out = ARRAYS[out_kind][0](torch.full((count,), 77.0))
            residual = torch.full((count,), 0.125)
            kept = ARRAYS[residual_kind][0](residual)
            if kind not in OF_ONE_DIMENSION:
                kept = kept.view(tuple(array.shape))
            returned = reduce_once(group, compression, array, residual=kept, out=out)
            assert returned is (array if out is None else out)
            if out is not None:
                assert golden.same_bits(look(array), x)
            result = look(array) if out is None else ARRAYS[out_kind][1](out)
            reference = reduce_once(group, compression, x, residual=residual)
            seen.append(
                golden.same_bits(result.flatten(), reference)
                and golden.same_bits(ARRAYS[residual_kind][1](kept).flatten(), residual)
                and not torch.equal(residual, torch.full((count,), 0.125))
            )
        return all(seen)

    assert all(world(2).run(body))


def test_tensors_in_the_window(world):
    def body(group):
        x = gradient(torch.float32, 40_000, group.rank)
        there = group.empty(40_000).copy_(x)
        residual, in_window = torch.zeros(40_000), group.empty(40_000).zero_()
        for compression in COMPRESSIONS.values():
            reduce_once(group, compression, x, residual=residual)
            reduce_once(group, compression, there, residual=in_window)
            assert golden.same_bits(x, there)
            assert golden.same_bits(residual, in_window)

    world(3).run(body)


def test_codec_alone_takes_arrays_of_every_kind():
    x = gradient(torch.float32, 1000, 0)
    for compression in COMPRESSIONS.values():
        wire = compression.encode(x)
        decoded = compression.decode(wire, 1000)
        for make, _ in ARRAYS.values():
            assert torch.equal(torch.from_dlpack(compression.encode(make(x))), wire)
        for make, look in (ARRAYS["numpy"], ARRAYS["foreign"]):
            out = make(torch.zeros(1000))
            compression.decode(make(wire), 1000, out)
            assert golden.same_bits(look(out), decoded)
            encoded = make(torch.zeros_like(wire))
            compression.encode(x, encoded)
            assert torch.equal(look(encoded), wire)


WITHOUT_CUPY = """
import sys

class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("cupy", "cupyx"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import numpy
import pycomm

with pycomm.LocalWorld(2) as world:
    for array in (numpy.ones(300, numpy.float32), numpy.ones(300, numpy.float32)):
        world.run(lambda group: pycomm.compressed_all_reduce(
            numpy.ones(300, numpy.float32), pycomm.Int8(), group=group))
assert "cupy" not in sys.modules
"""


def test_cupy_is_never_imported():
    subprocess.run([sys.executable, "-c", WITHOUT_CUPY], check=True, timeout=60)


def test_different_groups_at_once(world):
    """One rank uses two groups from two threads: their slots and lists are apart."""
    first, second = world(2), world(2)

    def steps(group, seed):
        residual = torch.zeros(66_000)
        for step in range(5):
            x = gradient(torch.float32, 66_000, group.rank + seed, step)
            for compression in COMPRESSIONS.values():
                reduce_once(group, compression, x, residual=residual, step=step)
        return residual

    alone = [world(2).run(steps, seed) for seed in (0, 50)]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(w.run, steps, s) for w, s in ((first, 0), (second, 50))]
        together = [run.result() for run in runs]
    for ours, theirs in zip(alone, together, strict=True):
        assert all(golden.same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_world_of_one_compresses(world):
    """A single rank also encodes and decodes, so it shows the effect in a larger group."""
    x = gradient(torch.float32, 3000, 0)

    def body(group):
        return reduce_once(group, pycomm.Int8(), x.clone()), reduce_once(
            group, pycomm.TopK(k=10), x.clone()
        )

    int8, top = world(1).run(body)[0]
    twice = pycomm.Int8().decode(pycomm.Int8().encode(x), 3000)
    assert torch.equal(int8, pycomm.Int8().decode(pycomm.Int8().encode(twice), 3000))
    assert int(top.count_nonzero()) == 10
    assert np.isin(top[top != 0].numpy(), x.numpy()).all()
