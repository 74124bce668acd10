"""How gradients are laid out in memory."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pycomm
from pycomm._training.buckets import Slab, partition, window_layout

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def tensors(sizes, dtype=torch.float32):
    return [torch.zeros(size, dtype=dtype) for size in sizes]


def sizes_of(parts):
    return [[tensor.numel() for tensor in part] for part in parts]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 100, []),
        ([5], 0, [[5]]),
        ([1, 2, 3], 0, [[1], [2], [3]]),
        ([1, 2, 3], 12, [[1, 2], [3]]),
        ([1, 2, 3], 24, [[1, 2, 3]]),
        ([9, 1, 1, 9], 12, [[9], [1, 1], [9]]),
        ([1, 2, 3], float("inf"), [[1, 2, 3]]),
    ],
)
def test_partition_fills_up_to_the_limit(sizes, limit, expected):
    assert sizes_of(partition(tensors(sizes), limit)) == expected


def test_partition_is_by_dtype_in_the_order_of_completion():
    a, b = tensors([1, 2]), tensors([3, 4], torch.bfloat16)
    parts = partition([a[0], b[0], b[1], a[1]], 100)
    assert sizes_of(parts) == [[3, 4], [1, 2]]
    parts = partition([b[0], a[0], a[1], b[1]], 5)
    assert sizes_of(parts) == [[3], [1], [2], [4]]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=30),
    st.sampled_from([0, 16, 100, 1000]),
)
def test_partition_keeps_everything_and_the_limit(kinds, limit):
    given_tensors = [torch.zeros(size, dtype=dtype) for size, dtype in kinds]
    place = {id(tensor): index for index, tensor in enumerate(given_tensors)}
    parts = partition(given_tensors, limit)
    assert sorted(place[id(tensor)] for part in parts for tensor in part) == list(range(len(kinds)))
    ends = [place[id(part[-1])] for part in parts]
    assert ends == sorted(ends)
    for part in parts:
        assert len({tensor.dtype for tensor in part}) == 1
        assert [place[id(t)] for t in part] == sorted(place[id(t)] for t in part)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part) <= limit


@pytest.fixture
def group(world):
    return world(1).groups[0]


@given(st.data())
def test_gradients_never_overlap_whatever_the_order(data):
    """Each begins at a cache line of the same piece of memory, which is enough for every order."""
    kinds = data.draw(
        st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=12)
    )
    parameters = [torch.zeros(size, dtype=dtype, requires_grad=True) for size, dtype in kinds]
    with pycomm.LocalWorld(1) as local_world:
        slab = Slab(parameters, 100, window_layout(parameters, local_world.groups[0]))
        for order in (parameters, data.draw(st.permutations(parameters))):
            buckets = slab.cut(order)
            spans = []
            for bucket in buckets:
                assert not bucket.flat.any()
                bucket.flat.fill_(9)
                for parameter, begin in zip(bucket.parameters, bucket.begins, strict=True):
                    bucket.adopt(parameter)
                    address = bucket.flat.data_ptr() + begin * parameter.itemsize
                    assert address % 64 == 0
                    assert parameter.grad.data_ptr() in (address, 0)
                    assert begin + parameter.numel() <= bucket.flat.numel()
                    spans.append((address, address + parameter.nbytes))
            spans = sorted(span for span in spans if span[0] != span[1])
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_large_models_have_buckets_of_the_limit_and_small_ones_sixteen(group):
    def count(sizes, limit):
        return len(
            Slab(parameters := tensors(sizes), limit, window_layout(parameters, group)).cut(
                parameters
            )
        )

    mib = 1 << 18  # elements
    assert count([mib] * 64, 2 << 20) == 32
    assert count([mib] * 16, 25 << 20) == 16
    assert count([mib // 16] * 16, 25 << 20) == 1


SHAPED = {
    "contiguous": torch.zeros(3, 4, 5),
    "channels last": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": torch.zeros(3, 4).t(),
    "permuted": torch.zeros(2, 3, 4).permute(1, 2, 0),
    "expanded": torch.zeros(1, 4).expand(3, 4),
    "with gaps": torch.zeros(6, 4)[::2],
    "scalar": torch.zeros(()),
    "empty": torch.zeros(0, 3),
    "ones": torch.zeros(1, 5, 1, 1),
}


def lies_in(whole, part):
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", SHAPED)
def test_gradients_have_the_parameters_shape_and_format(group, name):
    parameter = SHAPED[name].clone(memory_format=torch.preserve_format).requires_grad_()
    if name in ("expanded", "with gaps"):
        parameter = SHAPED[name].detach().requires_grad_()
    (bucket,) = Slab([parameter], 100, window_layout([parameter], group)).cut([parameter])
    values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
    parameter.grad = values
    bucket.put(parameter)
    assert torch.equal(parameter.grad, values)
    if parameter.numel():
        assert lies_in(bucket.flat, parameter.grad)
    assert sorted(bucket.flat.tolist()) == sorted(values.flatten().tolist())
    dense = name not in ("expanded", "with gaps")
    assert parameter.grad.stride() == (parameter if dense else values).stride()


def held(bucket):
    """The gradients in a bucket."""
    sized = zip(bucket.parameters, bucket.begins, strict=True)
    return [bucket.flat[begin : begin + p.numel()].tolist() for p, begin in sized]


def test_a_bucket_knows_who_is_missing(group):
    a, b, c = parameters = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    (bucket,) = Slab(parameters, 100, window_layout(parameters, group)).cut(parameters)
    a.grad, b.grad = torch.ones(3), torch.full((3,), 2.0)
    bucket.flat.fill_(9)
    assert (bucket.arrived, len(bucket.waiting)) == (0, 3)
    bucket.put(a)
    bucket.put(a)
    assert (bucket.arrived, len(bucket.waiting)) == (1, 2)
    assert [id(p) for p in bucket.complete()] == [id(c)]  # b has one of an earlier backward
    assert held(bucket) == [[1, 1, 1], [2, 2, 2], [0, 0, 0]]
    assert c.grad is None
    bucket.adopt(c)
    c.grad += 5
    assert held(bucket) == [[1, 1, 1], [2, 2, 2], [5, 5, 5]]
    assert not bucket.waiting
    bucket.reset()
    assert (bucket.arrived, bucket.sent) == (0, False)


def test_the_slab_is_reused(group):
    """New buckets take no new memory."""
    parameters = tensors([100, 200, 300])
    slab = Slab(parameters, 500, window_layout(parameters, group))
    before = {b.flat.untyped_storage().data_ptr() for b in slab.cut(parameters)}
    after = {b.flat.untyped_storage().data_ptr() for b in slab.cut(parameters[::-1])}
    assert before == after
    assert len(before) == 1
