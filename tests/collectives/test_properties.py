"""Random shapes, strides, dtypes, operations, algorithms and sizes, against the references."""

import golden
import pytest
import sweep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm


@st.composite
def views(draw):
    """How to cut a view out of a contiguous tensor: its shape, a permutation, steps and starts."""
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    starts = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    return shape, order, steps, starts


def make_view(view, dtype):
    """The view, and the larger tensor that it is a part of."""
    shape, order, steps, starts = view
    full = [start + n * step for n, step, start in zip(shape, steps, starts, strict=True)]
    base = torch.full(full, sweep.SENTINEL, dtype=dtype)
    cuts = tuple(slice(a, a + n * s, s) for n, s, a in zip(shape, steps, starts, strict=True))
    return base[cuts].permute(order), base


@settings(max_examples=150)
@given(
    size=st.integers(1, 6),
    view=views(),
    out_order=st.permutations(range(4)),
    dtype=st.sampled_from(sweep.DTYPES),
    op=st.sampled_from(sweep.OPS),
    algorithm=st.sampled_from(sweep.ALGORITHMS),
    lines=st.integers(1, 40),
    with_out=st.booleans(),
    asynchronous=st.booleans(),
)
def test_any_view(size, view, out_order, dtype, op, algorithm, lines, with_out, asynchronous):
    staging_bytes = 8 * 64 * size * lines
    count = make_view(view, dtype)[0].numel()
    case = sweep.Case(algorithm, op, dtype, count)

    def body(group):
        tensor, base = make_view(view, dtype)
        tensor.copy_(case.input(group.rank).view(tensor.shape))
        out = None
        if with_out:
            axes = [axis for axis in out_order if axis < tensor.dim()]
            inverse = [axes.index(axis) for axis in range(tensor.dim())]
            out = torch.empty([tensor.shape[axis] for axis in axes], dtype=dtype).permute(inverse)
        before = base.clone()
        result = pycomm.all_reduce(
            tensor, op, out=out, algorithm=algorithm, group=group, async_op=asynchronous
        )
        if asynchronous:
            result.wait()
            result = tensor if out is None else out
        got = result.clone()
        if with_out:
            assert golden.same_bits(base, before)
        else:
            tensor.copy_(case.input(group.rank).view(tensor.shape))
            assert golden.same_bits(base, before)  # nothing around the view has changed
        return got

    with pycomm.LocalWorld(size, 30, staging_bytes=staging_bytes) as world:
        results = world.run(body)
    inputs = [case.input(rank) for rank in range(size)]
    expected = golden.all_reduced(
        algorithm, inputs, op, staging_bytes=staging_bytes, zero_copy=False
    )
    for result in results:
        assert golden.same_bits(result.reshape(-1), expected)


@settings(max_examples=100)
@given(
    size=st.integers(1, 6),
    count=st.integers(0, 5000),
    dtype=st.sampled_from(sweep.DTYPES),
    op=st.sampled_from(sweep.OPS),
    algorithm=st.sampled_from(sweep.ALGORITHMS),
    lines=st.integers(1, 40),
    layout=st.sampled_from(sweep.LAYOUTS),
)
def test_any_count_and_layout(size, count, dtype, op, algorithm, lines, layout):
    staging_bytes = 8 * 64 * size * lines
    cases = [sweep.Case(algorithm, op, dtype, count, layout)] * 2
    with pycomm.LocalWorld(size, 30, staging_bytes=staging_bytes) as world:
        sweep.check(cases, world.run(sweep.run_cases, cases), staging_bytes)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    size=st.integers(2, 5),
    calls=st.lists(
        st.tuples(
            st.sampled_from((*sweep.ALGORITHMS, "auto")),
            st.integers(0, 3000),
            st.booleans(),
            st.booleans(),
        ),
        max_size=25,
    ),
)
def test_any_sequence(size, calls):
    """Operations of all kinds back to back, some asynchronous, some in the window."""

    def body(group):
        waiting = []
        for algorithm, count, in_window, asynchronous in calls:
            x = (
                group.empty(count, dtype=torch.int64)
                if in_window
                else torch.empty(count, dtype=torch.int64)
            )
            torch.arange(count, out=x).add_(group.rank)
            work = pycomm.all_reduce(x, algorithm=algorithm, group=group, async_op=asynchronous)
            waiting.append((work if asynchronous else None, x, count))
        for work, x, count in waiting:
            if work is not None:
                work.wait()
            assert torch.equal(x, size * torch.arange(count) + size * (size - 1) // 2)

    with pycomm.LocalWorld(size, 30, staging_bytes=8 * 64 * size * 3) as world:
        world.run(body)
