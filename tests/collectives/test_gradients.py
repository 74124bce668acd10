"""Operations without a gradient raise if autograd would compute a wrong one."""

import helpers
import pytest
import torch

import pycomm

OPS = torch.ops.pycomm
COUNT = 256

# Each gets a tensor that requires grad, and leads to a result.
OPERATORS = {
    "all_reduce_": lambda z, name: (OPS.all_reduce_(z, "sum", "auto", name), z)[1],
    "reduce_scatter_": lambda z, name: (OPS.reduce_scatter_(z, z.detach(), "sum", name), z)[1],
    "reduce_scatter_ of": lambda z, name: written(OPS.reduce_scatter_, z, "sum", name),
    "all_gather_": lambda z, name: (OPS.all_gather_(z, z.detach(), name), z)[1],
    "all_gather_ of": lambda z, name: written(OPS.all_gather_, z, name),
    "broadcast_": lambda z, name: (OPS.broadcast_(z, 0, name), z)[1],
    "compressed_all_reduce_": lambda z, name: compressed(z, None, name),
    "its residual": lambda z, name: compressed(torch.ones_like(z).detach(), z, name),
    "encode": lambda z, _: OPS.decode(OPS.encode(z, "bf16", 0, 0), "bf16", COUNT, torch.float32),
}


def written(operation, z, *rest):
    output = torch.zeros_like(z)
    operation(output, z, *rest)
    return output + 0 * z


def compressed(z, residual, name):
    OPS.compressed_all_reduce_(z, "int8", residual, None, "sum", "auto", 0, 0, False, name)
    return z


def gradient(operator, name, backend):
    """The gradient through an intermediate tensor, which may be changed in place."""

    def loss(x):
        return operator(x * 1, name).sum()

    torch._dynamo.reset()
    x = torch.ones(COUNT, requires_grad=True)
    (loss if backend is None else torch.compile(loss, backend=backend))(x).backward()
    return x.grad


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_raises_instead_of_a_wrong_gradient(world, operator, backend):
    with pytest.raises((ValueError, RuntimeError), match="must not require grad"):
        gradient(OPERATORS[operator], world(1).groups[0].name, backend)


def base_of(base, z):
    """Does not require grad itself until its view does."""
    base.view(-1).add_(z)
    return base


# Tensors through which an operation would change one that requires grad.
ALIASES = {
    "a part": lambda z: z[:2],
    "another shape": lambda z: z.view(2, -1),
    "one of several": lambda z: z.split(COUNT // 2)[1],
    "a view made without grad": torch.no_grad()(lambda z: z.view(-1)),
    "the base of a view": lambda z: base_of(torch.zeros_like(z), z),
}


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("alias", ALIASES)
def test_views_raise_too(world, alias, backend):
    def change(z, name):
        OPS.all_reduce_(ALIASES[alias](z), "sum", "auto", name)
        return z

    with pytest.raises((ValueError, RuntimeError), match="must not require grad"):
        gradient(change, world(1).groups[0].name, backend)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_leaves_raise_too(world, backend):
    name = world(1).groups[0].name
    torch._dynamo.reset()
    run = torch.compile(OPERATORS["all_reduce_"], backend=backend or "eager")
    x = torch.ones(COUNT, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match="must not require grad"):
        (OPERATORS["all_reduce_"] if backend is None else run)(x, name)
    with torch.no_grad():
        assert run(x, name) is x


def test_forward_mode_raises_too(world):
    from torch.autograd import forward_ad

    name = world(1).groups[0].name
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(ValueError, match="must not carry a tangent"):
            OPS.all_reduce_(dual, "sum", "auto", name)
        with pytest.raises(ValueError, match="must not carry a tangent"):
            pycomm.broadcast(dual, group=world(1).groups[0])


def without_grad(group, backend):
    """A step in which an in-place operation changes an intermediate tensor without grad."""

    def loss(x):
        z = x * (group.rank + 1)
        with torch.no_grad():
            OPS.all_reduce_(z, "sum", "auto", group.name)
        return (z * 2).sum()

    x = torch.ones(COUNT, requires_grad=True)
    value = (loss if backend is None else torch.compile(loss, backend=backend))(x)
    value.backward()
    return value.item(), x.grad.unique().tolist()


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_without_grad_an_operation_is_allowed_as_torch_allows_its_own(backend):
    """Autograd then takes the new value for the old one, as after ``z.mul_(2)`` without grad."""
    results = helpers.run_group(2, without_grad, backend)
    assert results == [(6.0 * COUNT, [2.0]), (6.0 * COUNT, [4.0])]


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradients_around_an_operator_are_right(world, backend):
    """Detached, or without grad, an operation is a constant."""
    name = world(1).groups[0].name

    def loss(x):
        with torch.no_grad():
            weight = OPS.all_reduce(x * 3, "sum", "auto", name)
        return (x * weight + OPS.all_reduce(x.detach(), "sum", "auto", name)).sum()

    torch._dynamo.reset()
    x = torch.ones(COUNT, requires_grad=True)
    (loss if backend is None else torch.compile(loss, backend=backend))(x).backward()
    assert x.grad.tolist() == [3.0] * COUNT


# Every operation that changes a tensor tells autograd, which may have saved it for backward.
CHANGES = {
    "all_reduce": lambda t, group: pycomm.all_reduce(t, group=group),
    "all_reduce later": lambda t, group: pycomm.all_reduce(t, group=group, async_op=True).wait(),
    "all_reduce into": lambda t, group: pycomm.all_reduce(torch.ones(COUNT), out=t, group=group),
    "reduce_scatter": lambda t, group: pycomm.reduce_scatter(t, torch.ones(COUNT), group=group),
    "all_gather": lambda t, group: pycomm.all_gather(t, torch.ones(COUNT), group=group),
    "all_gather in a list": lambda t, group: pycomm.all_gather([t], torch.ones(COUNT), group=group),
    "broadcast": lambda t, group: pycomm.broadcast(t, group=group),
    "reduce": lambda t, group: pycomm.reduce(t, group=group),
    "gather": lambda t, group: pycomm.gather(torch.ones(COUNT), t, group=group),
    "gather in a list": lambda t, group: pycomm.gather(torch.ones(COUNT), [t], group=group),
    "scatter": lambda t, group: pycomm.scatter(t, torch.ones(COUNT), group=group),
    "all_to_all": lambda t, group: pycomm.all_to_all(t, torch.ones(COUNT), group=group),
    "all_to_all in lists": lambda t, group: pycomm.all_to_all(
        [t], [torch.ones(COUNT)], group=group
    ),
    "compressed": lambda t, group: pycomm.compressed_all_reduce(t, pycomm.Int8(), group=group),
    "residual": lambda t, group: pycomm.compressed_all_reduce(
        torch.ones(COUNT), pycomm.Int8(), residual=t, group=group
    ),
    "decode": lambda t, _: pycomm.Int8().decode(pycomm.Int8().encode(torch.ones(COUNT)), COUNT, t),
    "all_reduce_": lambda t, group: OPS.all_reduce_(t, "sum", "auto", group.name),
    "reduce_scatter_": lambda t, group: OPS.reduce_scatter_(t, t.clone(), "sum", group.name),
    "all_gather_": lambda t, group: OPS.all_gather_(t, t.clone(), group.name),
    "broadcast_": lambda t, group: OPS.broadcast_(t, 0, group.name),
    "compressed_all_reduce_": lambda t, group: compressed(t, None, group.name),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("leaf", [False, True])
def test_a_tensor_saved_for_backward_is_not_changed_silently(world, change, leaf):
    x, saved = torch.ones(COUNT, requires_grad=True), torch.ones(COUNT, requires_grad=leaf)
    y = (x * saved).sum()
    with torch.no_grad():
        CHANGES[change](saved, world(1).groups[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_functions_refuse_what_requires_grad(world):
    group = world(1).groups[0]
    for name, change in CHANGES.items():
        z = torch.ones(COUNT, requires_grad=True) * 1
        with pytest.raises(ValueError, match="must not require grad"):
            change(z, group)
        assert z.requires_grad, name


def test_functions_refuse_an_input_that_requires_grad(world):
    group, output = world(1).groups[0], torch.ones(COUNT)
    z = torch.ones(COUNT, requires_grad=True) * 1
    for call in (
        lambda: pycomm.all_reduce(z, out=output, group=group),
        lambda: pycomm.reduce_scatter(output, z, group=group),
        lambda: pycomm.reduce_scatter(output, [z], group=group),
        lambda: pycomm.all_gather(output, z, group=group),
        lambda: pycomm.gather(z, output, group=group),
        lambda: pycomm.scatter(output, [z], group=group),
        lambda: pycomm.all_to_all(output, z, group=group),
        lambda: pycomm.all_to_all([output], [z], group=group),
    ):
        with pytest.raises(ValueError, match="must not require grad"):
            call()
    assert output.tolist() == [1.0] * COUNT


def in_processes(group):
    """The tensor of a rank that raises has not been touched, and the group goes on."""
    x = torch.ones(COUNT, requires_grad=True)
    z = x * 1
    for call in OPERATORS.values():
        try:
            call(z, group.name)
        except ValueError:
            continue
        return "no error"
    return z.tolist() == [1.0] * COUNT and pycomm.all_reduce(torch.ones(3), group=group).tolist()


def test_in_processes():
    assert helpers.run_group(2, in_processes) == [[2.0] * 3] * 2


def overwrite(group):
    """Each overwrites a tensor that autograd has saved."""
    x = torch.ones(4)
    other = 1 - group.rank
    received = pycomm.irecv(x, other, group=group)
    pycomm.send(torch.zeros(4), other, group=group)
    received.wait()
    parts = [torch.ones(2) for _ in range(2)]
    pycomm.all_gather(parts, torch.zeros(2), group=group)
    return x._version, [part._version for part in parts]


def test_autograd_learns_of_overwritten_tensors():
    with pycomm.LocalWorld(2) as world:
        for version, versions in world.run(overwrite):
            assert version > 0
            assert min(versions) > 0
