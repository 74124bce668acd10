"""Bad arguments: an error at once, on the rank that made it, which names the argument."""

import re

import pytest
import torch
import torch.distributed as dist

import pycomm


@pytest.fixture(scope="module")
def group():
    with pycomm.LocalWorld(1) as local_world:
        yield local_world.groups[0]


@pytest.fixture(scope="module")
def pair():
    """Rank 0 of two: bad arguments must raise before it waits for rank 1."""
    with pycomm.LocalWorld(2, timeout=5) as local_world:
        yield local_world.groups[0]


X = torch.ones(6)

# The call, the type of the exception, a part of its message.
BAD_CALLS = {
    "op": (
        lambda g: pycomm.all_reduce(X, "mean", group=g),
        ValueError,
        "op must be one of sum, avg, min, max, prod, band, bor, bxor, got 'mean'",
    ),
    "op of reduce_scatter": (
        lambda g: pycomm.reduce_scatter(X[:3], X, "SUM", group=g),
        ValueError,
        "op must be one of sum",
    ),
    "algorithm": (
        lambda g: pycomm.all_reduce(X, algorithm="nccl", group=g),
        ValueError,
        "algorithm must be one of auto, one_shot, two_shot, ring, tree, multicast, got",
    ),
    "deterministic ring": (
        lambda g: pycomm.all_reduce(X, algorithm="ring", deterministic=True, group=g),
        ValueError,
        "algorithm must be auto, one_shot or two_shot when deterministic, got 'ring'",
    ),
    "deterministic tree": (
        lambda g: pycomm.all_reduce(X, algorithm="tree", deterministic=True, group=g),
        ValueError,
        "got 'tree'",
    ),
    "multicast": (
        lambda g: pycomm.all_reduce(X, algorithm="multicast", group=g),
        ValueError,
        "algorithm must be auto, one_shot, two_shot, ring or tree for CPU tensors, got multicast",
    ),
    "deterministic multicast": (
        lambda g: pycomm.all_reduce(X, algorithm="multicast", deterministic=True, group=g),
        ValueError,
        "algorithm must be auto, one_shot or two_shot when deterministic, got 'multicast'",
    ),
    "a list": (
        lambda g: pycomm.all_reduce([1.0], group=g),
        TypeError,
        "tensor must be a torch.Tensor or an array with __dlpack__, got list",
    ),
    "None": (
        lambda g: pycomm.broadcast(None, group=g),
        TypeError,
        "tensor must be a torch.Tensor or an array with __dlpack__, got NoneType",
    ),
    "a number": (
        lambda g: pycomm.all_reduce(3.0, group=g),
        TypeError,
        "tensor must be a torch.Tensor or an array with __dlpack__, got float: pass "
        "torch.tensor(3.0)",
    ),
    "a reduction of torch's": (
        lambda g: pycomm.all_reduce(X, dist.ReduceOp.PREMUL_SUM, group=g),
        ValueError,
        "op must be one of sum, avg, min, max, prod, band, bor, bxor, or the same ReduceOp of "
        "torch.distributed, got <RedOpType.PREMUL_SUM",
    ),
    "a reduction that is not compressed": (
        lambda g: pycomm.compressed_all_reduce(X, pycomm.Int8(), op=dist.ReduceOp.MAX, group=g),
        ValueError,
        "op must be one of avg, sum, or the same ReduceOp of torch.distributed, got",
    ),
    "a name as src": (
        lambda g: pycomm.broadcast(X, "0", group=g),
        ValueError,
        ", got '0'",
    ),
    "a name as group": (
        lambda _: pycomm.barrier(group="world"),
        TypeError,
        "group must be a pycomm.Group or None, got 'world'",
    ),
    "a name as group of the call that takes the short way": (
        lambda _: pycomm.all_reduce(X, group="world"),
        TypeError,
        "group must be a pycomm.Group or None, got 'world'",
    ),
    "a default group": (
        lambda _: pycomm.set_default_group(3),
        TypeError,
        "group must be a pycomm.Group or None, got 3",
    ),
    "a forgotten group": (
        lambda _: pycomm.all_reduce(X),
        ValueError,
        "group must be given by the ranks of a pycomm.LocalWorld, which have no default group: "
        "pass the group that LocalWorld.run gave to this rank",
    ),
    "an int as output": (
        lambda g: pycomm.all_gather(3, X, group=g),
        TypeError,
        "output must be a torch.Tensor or an array with __dlpack__, got int",
    ),
    "an int as input": (
        lambda g: pycomm.all_gather(X, 3, group=g),
        TypeError,
        "input must be a torch.Tensor or an array with __dlpack__, got int",
    ),
    "requires grad": (
        lambda g: pycomm.all_reduce(torch.ones(3, requires_grad=True), group=g),
        ValueError,
        "tensor must not require grad",
    ),
    "out requires grad": (
        lambda g: pycomm.all_reduce(X, out=torch.ones(6, requires_grad=True), group=g),
        ValueError,
        "out must not require grad",
    ),
    "sparse": (
        lambda g: pycomm.all_reduce(torch.eye(3).to_sparse(), group=g),
        ValueError,
        "tensor must be dense, got layout torch.sparse_coo",
    ),
    "quantised": (
        lambda g: pycomm.broadcast(torch.quantize_per_tensor(X, 1.0, 0, torch.qint8), group=g),
        ValueError,
        "tensor must have one of the dtypes float64, float32, float16, bfloat16, int64, int32, "
        "uint8, int16, int8, bool, uint16, uint32, uint64, complex32, complex64, complex128, "
        "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, float8_e8m0fnu, "
        "got torch.qint8",
    ),
    "complex product": (
        lambda g: pycomm.all_reduce(torch.ones(3, dtype=torch.complex64), "prod", group=g),
        ValueError,
        "op must be one of sum, avg for complex64, got prod",
    ),
    "bitwise on floats": (
        lambda g: pycomm.all_reduce(torch.ones(3), "bxor", group=g),
        ValueError,
        "op must be one of sum, avg, min, max, prod for float32, got bxor",
    ),
    "float8": (
        lambda g: pycomm.all_reduce(torch.ones(3).to(torch.float8_e4m3fn), group=g),
        ValueError,
        "tensor of float8_e4m3fn can be moved but not reduced, got op sum",
    ),
    "meta": (
        lambda g: pycomm.all_reduce(torch.ones(6, device="meta"), group=g),
        ValueError,
        "tensor must lie on the CPU or a CUDA device, got meta",
    ),
    "meta out": (
        lambda g: pycomm.all_reduce(X, out=torch.ones(6, device="meta"), group=g),
        ValueError,
        "out must lie on the CPU or a CUDA device, got meta",
    ),
    "meta input": (
        lambda g: pycomm.all_gather(X, torch.ones(3, device="meta"), group=g),
        ValueError,
        "input must lie on the CPU or a CUDA device, got meta",
    ),
    "out of another dtype": (
        lambda g: pycomm.all_reduce(X, out=torch.ones(6).half(), group=g),
        ValueError,
        "out must have tensor's dtype torch.float32, got torch.float16",
    ),
    "out of another shape": (
        lambda g: pycomm.all_reduce(X, out=torch.ones(2, 3), group=g),
        ValueError,
        "out must have tensor's shape (6,), got (2, 3)",
    ),
    "overlapping out": (
        lambda g: pycomm.all_reduce(X[:5], out=X[1:], group=g),
        ValueError,
        "out must not overlap tensor in memory",
    ),
    "overlapping strided out": (
        lambda g: pycomm.all_reduce(X[::2], out=X[:3], group=g),
        ValueError,
        "out must not overlap tensor in memory",
    ),
    "blocks of reduce_scatter": (
        lambda g: pycomm.reduce_scatter(torch.ones(4), X[:5], group=g),
        ValueError,
        "input must have {size} (the group's size) times as many elements as out",
    ),
    "blocks of all_gather": (
        lambda g: pycomm.all_gather(X[:5], torch.ones(4), group=g),
        ValueError,
        "output must have {size} (the group's size) times as many elements as in",
    ),
    "dtypes of reduce_scatter": (
        lambda g: pycomm.reduce_scatter(torch.ones(3).double(), X, group=g),
        ValueError,
        "input must have output's dtype torch.float64, got torch.float32",
    ),
    "dtypes of all_gather": (
        lambda g: pycomm.all_gather(X, torch.ones(3).double(), group=g),
        ValueError,
        "output must have input's dtype torch.float64, got torch.float32",
    ),
    "negative src": (
        lambda g: pycomm.broadcast(X, -1, group=g),
        ValueError,
        "src must be a rank from 0 to",
    ),
    "src too large": (
        lambda g: pycomm.broadcast(X, 2, group=g),
        ValueError,
        "src must be a rank from 0 to",
    ),
    "overlap in itself": (
        lambda g: pycomm.all_reduce(torch.ones(1).expand(6), group=g),
        ValueError,
        "tensor must not overlap itself in memory",
    ),
    "out overlaps itself": (
        lambda g: pycomm.all_reduce(X, out=torch.ones(1).expand(6), group=g),
        ValueError,
        "out must not overlap itself in memory",
    ),
    "negated view": (
        lambda g: pycomm.all_reduce(torch._neg_view(torch.ones(6)), group=g),
        ValueError,
        "tensor must be materialised",
    ),
    "dtype of explain": (
        lambda g: g.explain(8, torch.qint8),
        ValueError,
        "dtype must have one of the dtypes",
    ),
    "bytes of explain": (
        lambda g: g.explain(7, torch.float32),
        ValueError,
        "nbytes must be a multiple of 4, the size of torch.float32, got 7",
    ),
    "negative bytes": (lambda g: g.explain(-4), ValueError, "nbytes must be a multiple of 4"),
    "algorithm of explain": (
        lambda g: g.explain(8, algorithm="magic"),
        ValueError,
        "algorithm must be one of auto",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_alone_and_in_company(group, pair, name):
    call, kind, message = BAD_CALLS[name]
    for g in (group, pair):
        with pytest.raises(kind, match=re.escape(message.format(size=g.size))):
            call(g)


def test_a_bad_call_leaves_the_group_usable(world):
    def body(g):
        for call, kind, _ in BAD_CALLS.values():
            if g.rank == 1:
                with pytest.raises(kind):
                    call(g)
        return pycomm.all_reduce(torch.ones(2), group=g).tolist()

    assert world(2, timeout=20).run(body) == [[2.0, 2.0]] * 2


def test_async_calls_raise_at_once_too(pair):
    with pytest.raises(ValueError, match="complex64, got prod"):
        pycomm.all_reduce(torch.ones(3, dtype=torch.complex64), "prod", group=pair, async_op=True)
    with pytest.raises(ValueError, match="src must be a rank"):
        pycomm.broadcast(X, 7, group=pair, async_op=True)


def test_what_is_allowed(group):
    """Values just inside the limits that the errors above name."""
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert pycomm.all_reduce(x, group=group) is x
    parameter = torch.nn.Parameter(torch.ones(3))
    pycomm.all_reduce(parameter.detach(), group=group)
    pycomm.all_reduce(X, out=X, group=group)
    pycomm.all_reduce(X[:3], out=X[3:], group=group)
    pycomm.all_reduce(torch.tensor(1.0), group=group)
    pycomm.all_reduce(torch.ones(0, 5), group=group)
    pycomm.all_reduce(X, "avg", algorithm="two_shot", deterministic=True, group=group)
    pycomm.reduce_scatter(torch.empty(2, 3), X, group=group)
    pycomm.all_gather(torch.empty(6, 1), X, group=group)


def test_ops_check_what_they_are_given(group):
    ops = torch.ops.pycomm
    with pytest.raises(ValueError, match="group must name an open pycomm group, got 'nobody'"):
        ops.all_reduce(X, "sum", "auto", "nobody")
    with pytest.raises(
        ValueError, match="op must be one of sum, avg, min, max, prod, band, bor, bxor, got 'mean'"
    ):
        ops.all_reduce(X, "mean", "auto", group.name)
    with pytest.raises(ValueError, match=r"algorithm must be one of auto, .*, got 'x'"):
        ops.all_reduce_(X, "sum", "x", group.name)
    with pytest.raises(ValueError, match="src must be a rank"):
        ops.broadcast_(X, 1, group.name)
    with pytest.raises(
        ValueError, match=r"input must have 1 \(the group's size\) times as many elements"
    ):
        ops.reduce_scatter_(X, X[:3], "sum", group.name)
    with pytest.raises(
        ValueError, match=r"output must have 1 \(the group's size\) times as many elements"
    ):
        ops.all_gather_(X, X[:3], group.name)
    with pytest.raises(ValueError, match="max, prod, band, bor, bxor for bool, got avg"):
        ops.all_reduce(torch.ones(3, dtype=torch.bool), "avg", "auto", group.name)
    with pytest.raises(ValueError, match="contiguous"):
        ops.all_reduce_(torch.ones(4, 4)[:, 1], "sum", "auto", group.name)
    with pytest.raises(ValueError, match="dtype"):
        ops.all_gather_(torch.ones(3, dtype=torch.float64), torch.ones(3), group.name)
    with pytest.raises(ValueError, match="dtype"):
        ops.reduce_scatter_(torch.ones(3, dtype=torch.float64), torch.ones(3), "sum", group.name)
