"""Gradients of torch.ops.pycomm equal those of one process that computes every rank's loss."""

import helpers
import pytest
import torch
from operators import (
    OPERATORS,
    close,
    data,
    derivatives,
    expected_gradients,
    gradients,
    loss_of,
    reference,
)
from torch.autograd import forward_ad

import pycomm

OPS = torch.ops.pycomm


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_equal_those_of_one_process(world, name, size):
    operator, function = OPERATORS[name]

    def body(group):
        x = data(group.rank, size).requires_grad_()
        return derivatives(loss_of(operator(x, group), group.rank), [x])

    first, second = reference(function, size)
    for rank, ((ours,), (again,)) in enumerate(world(size).run(body)):
        close(ours, first[rank])
        close(again, second[rank])


@pytest.mark.parametrize("name", ["all_reduce avg", "reduce", "all_gather", "broadcast"])
def test_across_nodes(world, name):
    operator, function = OPERATORS[name]

    def body(group):
        x = data(group.rank, 3).requires_grad_()
        return derivatives(loss_of(operator(x, group), group.rank), [x])[0][0]

    close(world(3, nodes=(2, 1)).run(body), reference(function, 3)[0])


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_mode(world, name):
    operator, function = OPERATORS[name]
    tangents = [data(7 + rank, 3) for rank in range(3)]

    def body(group):
        dual = forward_ad.make_dual(data(group.rank, 3), tangents[group.rank])
        return forward_ad.unpack_dual(operator(dual, group))

    values = function([data(rank, 3) for rank in range(3)])
    changes = function(tangents)  # the operators are linear
    with forward_ad.dual_level():  # of all threads
        results = world(3).run(body)
    for (y, tangent), value, change in zip(results, values, changes, strict=True):
        close(y, value)
        close(tangent, change)


@pytest.mark.parametrize("name", OPERATORS)
def test_any_layout_of_inputs_and_gradients(world, name):
    """A transposed input, and the gradient of a plain sum, an expanded tensor."""
    operator, function = OPERATORS[name]

    def body(group):
        x = data(group.rank, 2).t().contiguous().t().requires_grad_()
        y = operator(x, group)
        y.sum().backward()
        return y.detach(), x.grad

    xs = [data(rank, 2).requires_grad_() for rank in range(2)]
    ys = function(xs)
    grads = torch.autograd.grad(sum(y.sum() for y in ys), xs, materialize_grads=True)
    for (y, grad), value, expected in zip(world(2).run(body), ys, grads, strict=True):
        assert y.is_contiguous()
        close(y, value.detach())
        close(grad, expected)


def test_a_scalar(world):
    def body(group):
        x = torch.tensor(group.rank + 1.0, requires_grad=True)
        y = OPS.all_reduce(x, "sum", "auto", group.name) * OPS.broadcast(x, 0, group.name)
        y.backward()
        return y.item(), x.grad.item()

    # Both ranks' losses are (x0 + x1) x0.
    assert world(2).run(body) == [(3.0, 8.0), (3.0, 2.0)]


@pytest.mark.parametrize("name", OPERATORS)
def test_complex_numbers(world, name):
    """Also lazily conjugated ones, of which torch makes many in a backward."""
    operator, function = OPERATORS[name]

    def inputs(rank):
        return torch.complex(data(rank, 2), data(rank + 5, 2)).requires_grad_()

    def loss(y, rank):
        return loss_of(torch.view_as_real(y * y.conj() * (1 + 2j)), rank)

    def body(group):
        x = inputs(group.rank)
        loss(operator(x.conj(), group), group.rank).backward()
        return x.grad.resolve_conj()

    xs = [inputs(rank) for rank in range(2)]
    total = sum(loss(y, rank) for rank, y in enumerate(function([x.conj() for x in xs])))
    close(world(2).run(body), list(torch.autograd.grad(total, xs, materialize_grads=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_keep_the_dtype(world, dtype):
    def body(group):
        x = torch.ones(4, dtype=dtype, requires_grad=True)
        for operator, _ in OPERATORS.values():
            operator(x, group).sum().backward()
        return x.grad.dtype

    assert world(2).run(body) == [dtype] * 2


def test_a_rank_that_does_not_use_the_result(world):
    """It does not run the operation of the backward; the others raise instead of waiting."""

    def body(group):
        x = torch.ones(4, requires_grad=True)
        y = OPS.all_reduce(x, "sum", "auto", group.name)
        (y if group.rank == 0 else x).sum().backward()

    with pytest.raises(RuntimeError, match=r"rank 1 .* takes no further part during all_reduce"):
        world(2).run(body)


def test_a_layer_in_threads(world):
    close(world(3).run(gradients, None), expected_gradients(3))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer(backend):
    close(helpers.run_group(2, gradients, backend), expected_gradients(2))


def graphs(group):
    """The code of the compiled forward and backward."""
    from torch._dynamo.backends.common import aot_autograd

    code = []

    def keep(graph, _):
        code.append(graph.code)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep)
    gradients(group, backend)
    return code


def test_ranks_compile_the_same_graphs():
    """Then ranks can share a compiler's cache, such as torch's on disk."""
    first, second = helpers.run_group(2, graphs)
    assert len(first) == 2
    assert first == second
    assert "pycomm.reduce.default" in first[1]


def test_transforms_of_functions_raise(world):
    """All of torch.func's raise instead of giving a wrong result."""
    group, x = world(1).groups[0], torch.ones(4)

    def loss(x):
        return OPS.all_reduce(x, "sum", "auto", group.name).sum()

    for transform in (
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vjp(loss, x),
        lambda: torch.func.jvp(loss, (x,), (x,)),
        lambda: torch.func.jacrev(loss)(x),
        lambda: torch.func.jacfwd(loss)(x),
    ):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            transform()


def test_codecs_ignore_gradients():
    x = torch.ones(4, requires_grad=True)
    assert not pycomm.Int8().encode(x).requires_grad
    assert not pycomm.TopK(0.5).select(x)[1].requires_grad
    with pytest.raises(ValueError, match="x must not require grad"):
        OPS.encode(x, "int8", 0, 0)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_reductions_without_a_gradient(world, op, backend):
    group = world(1).groups[0]
    x = torch.ones(4, requires_grad=True)
    for call in (
        lambda x: OPS.all_reduce(x * 1, op, "auto", group.name),
        lambda x: OPS.reduce_scatter(x * 1, op, 1, group.name),
    ):
        torch._dynamo.reset()
        run = call if backend is None else torch.compile(call, backend=backend)
        with pytest.raises((ValueError, RuntimeError), match=f"has no gradient for {op}"):
            run(x)
        assert run(x.detach()).tolist() == [1.0] * 4
        with torch.no_grad():
            assert run(x).tolist() == [1.0] * 4


def test_wrong_shapes_and_sizes(world):
    group = world(2).groups[0]
    name = group.name
    with pytest.raises(ValueError, match="group_size must be the group's size, 2, got 3"):
        OPS.all_gather(torch.ones(6), 3, name)
    with pytest.raises(ValueError, match="group_size must be the group's size, 2, got 0"):
        OPS.reduce_scatter(torch.ones(6), "sum", 0, name)
    with pytest.raises(ValueError, match="input must have at least one dimension"):
        OPS.all_gather(torch.tensor(1.0), 2, name)
    with pytest.raises(ValueError, match="first dimension must be a multiple of 2"):
        OPS.reduce_scatter(torch.ones(3, 2), "sum", 2, name)
    with pytest.raises(ValueError, match="first dimension must be a multiple of 2"):
        OPS.all_to_all(torch.ones(3, 2), name)
    with pytest.raises(ValueError, match="dst must be a rank"):
        OPS.reduce(torch.ones(3), 2, name)
    with pytest.raises(ValueError, match="src must be a rank"):
        OPS.broadcast(torch.ones(3), -1, name)
