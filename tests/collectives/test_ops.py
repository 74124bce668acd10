"""torch.ops.pycomm: opcheck's requirements, and the same results in torch.compile."""

import gc
import threading

import compiled_step
import helpers
import pytest
import sweep
import torch

import pycomm

OPS = torch.ops.pycomm


@pytest.fixture
def alone(world):
    return world(1).groups[0].name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_opcheck(alone, dtype):
    def fresh(count):
        return sweep.Case("", "sum", dtype, count).input(0).nan_to_num()

    calls = [
        (OPS.all_reduce, (fresh(12), "sum", "auto", alone)),
        (OPS.all_reduce, (fresh(12).view(3, 4), "avg", "ring", alone)),
        (OPS.reduce, (fresh(12).view(4, 3).t(), 0, alone)),
        (OPS.reduce_scatter, (fresh(12).view(3, 4), "avg", 1, alone)),
        (OPS.all_gather, (fresh(12).view(4, 3).t(), 1, alone)),
        (OPS.all_to_all, (fresh(12).view(4, 3).t(), alone)),
        (OPS.broadcast, (fresh(12).view(3, 4), 0, alone)),
        (OPS.all_reduce_, (fresh(12), "max", "two_shot", alone)),
        (OPS.reduce_scatter_, (fresh(12), fresh(12), "min", alone)),
        (OPS.all_gather_, (fresh(12), fresh(12), alone)),
        (OPS.broadcast_, (fresh(12), 0, alone)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)
        if dtype.is_floating_point and not op.__name__.endswith("_"):
            tensor, *rest = arguments
            torch.library.opcheck(op, (tensor.requires_grad_(), *rest))


@pytest.mark.parametrize("compression", ["int8:512:rounding=stochastic", "bf16", "topk:0.1"])
def test_opcheck_of_compressed(alone, compression):
    x, residual = torch.randn(700, generator=torch.Generator().manual_seed(0)), torch.zeros(700)
    wire = OPS.encode(x, compression, 3, 0)
    rest = ("two_shot", 3, 0, False, alone)
    calls = [
        (OPS.compressed_all_reduce_, (x, compression, residual, None, "avg", *rest)),
        (OPS.compressed_all_reduce_, (x, compression, None, None, "sum", *rest)),
        (OPS.compressed_all_reduce, (x.view(35, 20).t(), compression, "avg", *rest)),
        (OPS.encode, (x, compression, 3, 0)),
        (OPS.decode, (wire, compression, 700, torch.float32)),
    ]
    if not compression.startswith("topk"):
        rest = (3, 0, False)
        whole = x.view(7, 100)
        calls += [
            (OPS.compressed_reduce_scatter, (whole, compression, "avg", *rest, 1, alone)),
            (
                OPS.compressed_reduce_scatter_,
                (whole.clone(), whole, compression, residual.view(7, 100), "sum", *rest, alone),
            ),
        ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)


def test_compressed_results(world):
    """The functional operations have the bits of the functions, and change no input."""

    def body(group):
        x = torch.randn(12, 200, generator=torch.Generator().manual_seed(group.rank)).t()
        before, rest = x.clone(), (3, 256, False)
        wanted, part = x.contiguous(), torch.empty(50, 12)
        pycomm.compressed_reduce_scatter(
            part, wanted, pycomm.Int8(), step=3, offset=256, group=group
        )
        pycomm.compressed_all_reduce(
            wanted, pycomm.Int8(), op="sum", algorithm="ring", step=3, offset=256, group=group
        )
        mean = torch.full_like(part, torch.nan)
        whole = OPS.compressed_all_reduce(x, "int8", "sum", "ring", *rest, group.name)
        mine = OPS.compressed_reduce_scatter(x, "int8", "avg", *rest, group.size, group.name)
        OPS.compressed_reduce_scatter_(mean, x.contiguous(), "int8", None, "avg", *rest, group.name)
        assert torch.equal(x, before)
        return [torch.equal(*pair) for pair in ((whole, wanted), (mine, part), (mean, part))]

    assert world(4).run(body) == [[True] * 3] * 4


def test_every_operation_is_checked_above():
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ours = {name.removeprefix("pycomm::") for name in names if name.startswith("pycomm::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cpu, cuda = (
        {name for name in ours if has_kernel(f"pycomm::{name}", device)}
        for device in ("CPU", "CUDA")
    )
    assert cpu == cuda
    functional = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    in_place = {f"{name}_" for name in functional}
    assert cpu == functional | in_place | {"reduce", "all_to_all"} | {
        "compressed_all_reduce",
        "compressed_all_reduce_",
        "compressed_reduce_scatter",
        "compressed_reduce_scatter_",
        "encode",
        "decode",
    }


def step(x, rank, size, name):
    """Uses all operations, and ordinary ones in between."""
    total = OPS.all_reduce(x * 2, "sum", "two_shot", name)
    y = total + rank
    OPS.all_reduce_(y, "avg", "ring", name)
    blocks = y.repeat(size)
    mine = torch.empty_like(y)
    OPS.reduce_scatter_(mine, blocks, "max", name)
    everyone = torch.empty_like(blocks)
    OPS.all_gather_(everyone, mine * (rank + 1), name)
    z = everyone.sum(0, keepdim=True) + y
    OPS.compressed_all_reduce_(z, "int8", None, None, "avg", "ring", 0, 0, False, name)
    z = OPS.decode(OPS.encode(z, "bf16", 0, 0), "bf16", z.numel(), torch.float32).view_as(z)
    OPS.broadcast_(z, size - 1, name)
    return z.sin(), y, everyone


def eager_and_compiled(group):
    arguments = (group.rank, group.size, group.name)
    x = torch.arange(100.0) + group.rank
    eager = step(x, *arguments)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    twice = [compiled(x, *arguments) for _ in range(2)]
    same = all(torch.equal(a, b) for result in twice for a, b in zip(eager, result, strict=True))
    return same and torch.equal(x, torch.arange(100.0) + group.rank), eager[2].tolist()


def test_compiled_alone(world):
    same, _ = eager_and_compiled(world(1).groups[0])
    assert same


def test_compiled_in_processes():
    (first, everyone), (second, again) = helpers.run_group(2, eager_and_compiled)
    assert first
    assert second
    assert everyone == again
    # x * 2 sums to 4i + 2; adding the rank averages to 4i + 2.5; gathered times rank + 1.
    expected = 4 * torch.arange(100.0) + 2.5
    assert everyone == torch.cat([expected, 2 * expected]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "compression"), [("aot_eager", ""), ("inductor", ""), ("inductor", "int8:128")]
)
def test_a_compiled_training_step(backend, compression):
    for found in helpers.run_group(2, compiled_step.train, "cpu", backend, compression):
        compiled_step.check(found, 2, compression)


def test_same_results_as_the_functions(world):
    def body(group):
        case = sweep.Case("tree", "prod", torch.float32, 3000)
        a, b = case.input(group.rank), case.input(group.rank)
        pycomm.all_reduce(a, "prod", algorithm="tree", group=group)
        c = OPS.all_reduce(b, "prod", "tree", group.name)
        OPS.all_reduce_(b, "prod", "tree", group.name)
        return torch.equal(a.view(torch.int32), b.view(torch.int32)) and torch.equal(
            a.view(torch.int32), c.view(torch.int32)
        )

    assert world(3).run(body) == [True] * 3


def test_errors_are_those_of_other_calls(world):
    """Also in a compiled program, and where autograd is off."""

    def body(group):
        summed = torch.compile(
            lambda x: OPS.all_reduce(x, "sum", "auto", group.name) + 1, backend="aot_eager"
        )
        with pytest.raises(pycomm.Mismatch) as caught, torch.inference_mode(group.rank == 0):
            summed(torch.ones(3 + group.rank))
        return caught.value.operation, caught.value.sequence

    assert world(2).run(body) == [("all_reduce", 1)] * 2


def test_a_missing_rank(world):
    late = threading.Event()

    def body(group):
        if group.rank == 1:
            late.wait(30)
            return None
        with pytest.raises(pycomm.Timeout) as caught:
            OPS.broadcast_(torch.ones(3), 1, group.name)
        late.set()
        return caught.value.rank

    assert world(2, timeout=0.2).run(body) == [1, None]


def test_the_name_of_a_group_that_is_gone(world):
    group = world(1).groups[0]
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        OPS.all_reduce(torch.ones(3), "sum", "auto", group.name)
    with pycomm.LocalWorld(1) as other:
        name = other.groups[0].name
    del other
    gc.collect()
    with pytest.raises(ValueError, match=f"group must name an open pycomm group, got '{name}'"):
        OPS.all_reduce(torch.ones(3), "sum", "auto", name)
