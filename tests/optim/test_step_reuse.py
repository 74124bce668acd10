"""A step uses the tables of the one before; whatever has changed since makes it look again."""

import copy
import gc
import re
import weakref

import pytest
import torch
from optimizing import Case, run

from pycomm import _C
from pycomm._runtime.c10d import tensor_reader
from pycomm.optim import FusedAdamW

SHAPES = ((6, 4), (24,), (4, 6), (24,))
OPTIONS = {"lr": 0.1, "betas": (0.4, 0.8), "weight_decay": 0.1}


class OwnParameter(torch.nn.Parameter):
    """A program's own class."""


class Twins:
    """The same parameters in an optimizer of torch and in a fused one, after some steps."""

    def __init__(self, steps=4):
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        sides = [list(map(torch.nn.Parameter, map(torch.clone, values))) for _ in range(2)]
        kinds = torch.optim.AdamW, FusedAdamW
        self.sides = [
            (side, kind([{"params": side[:3]}, {"params": side[3:], "lr": 0.01}], **OPTIONS))
            for side, kind in zip(sides, kinds, strict=True)
        ]
        self.number = 0
        self.tables = 0  # how often they were made
        ours = self.sides[1][1]
        make = ours._tables
        ours._tables = lambda: (setattr(self, "tables", self.tables + 1), make())[1]
        for _ in range(steps):
            self.set_gradients()
            self.step()

    def set_gradients(self):
        """New ones, wherever they lie."""
        self.number += 1
        for params, _ in self.sides:
            generator = torch.Generator().manual_seed(self.number)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(param.grad_dtype)

    def step(self):
        for _, optimizer in self.sides:
            optimizer.step()

    def assert_same(self):
        (theirs, one), (ours, other) = self.sides
        for param, twin in zip(theirs, ours, strict=True):
            torch.testing.assert_close(twin, param)
            assert (param in one.state) == (twin in other.state)
            if param in one.state:
                assert one.state[param]["step"] == other.state[twin]["step"]


@pytest.fixture(params=["compiled", "any torch"])
def reader(request):
    """The reader of tensors for the installed torch, or the one for any."""
    if request.param == "any torch":
        monkey = pytest.MonkeyPatch()
        monkey.setattr("pycomm._runtime.c10d.tensor_reader", None)
        yield
        monkey.undo()
        _C.set_tensor_reader(tensor_reader)
    else:
        yield


@pytest.mark.usefixtures("reader")
def test_gradients_may_move():
    twins = Twins()
    assert twins.tables == 2
    kept = []
    for step in range(4):
        kept += [param.grad for params, _ in twins.sides for param in params]
        twins.set_gradients()
        if step == 3:
            for params, _ in twins.sides:
                params[0].grad = kept[0]  # memory that had been used before
        twins.step()
        twins.assert_same()
    assert twins.tables == 2


def other_data(params, optimizer):  # noqa: ARG001
    params[1].data = params[1].data + 1


def other_gradient_layout(params, optimizer):  # noqa: ARG001
    params[0].grad = params[0].grad.t().contiguous().t()


def layout_of_gradient_at_its_address(params, optimizer):  # noqa: ARG001
    grad = params[0].grad
    grad.as_strided_((6, 4), (1, 6))


def negated_gradient_at_its_address(params, optimizer):  # noqa: ARG001
    params[0].grad = torch._neg_view(params[0].grad)


def memory_format(params, optimizer):
    params[0].data = params[0].data.t().contiguous().t()
    params[0].grad = params[0].grad.t().contiguous().t()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[params[0]]
        state[name] = state[name].t().contiguous().t()


def format_at_the_same_addresses(params, optimizer):
    state = optimizer.state[params[0]]
    for tensor in (params[0].data, params[0].grad, state["exp_avg"], state["exp_avg_sq"]):
        values = tensor.clone()
        tensor.as_strided_((6, 4), (1, 6)).copy_(values)
    params[0].data = params[0].data.as_strided((6, 4), (1, 6))


def state_at_another_place(params, optimizer):
    state = optimizer.state[params[2]]
    state["exp_avg"] = state["exp_avg"].clone() + 1


def data_of_a_state(params, optimizer):
    state = optimizer.state[params[2]]
    state["exp_avg"].data = state["exp_avg"].clone() + 1


def step_of_a_state(params, optimizer):
    optimizer.state[params[2]]["step"] = torch.tensor(1.0)


def states_of_each_other(params, optimizer):
    state = optimizer.state
    state[params[1]], state[params[3]] = state[params[3]], state[params[1]]


def memory_of_each_other(params, optimizer):
    one, other = optimizer.state[params[1]], optimizer.state[params[3]]
    one["exp_avg"].data, other["exp_avg"].data = other["exp_avg"].data, one["exp_avg"].data


def a_state_is_gone(params, optimizer):
    del optimizer.state[params[0]]


def a_state_under_another_name(params, optimizer):
    optimizer.state["kept"] = optimizer.state.pop(params[3])


def states_in_another_order(params, optimizer):
    optimizer.state[params[0]] = optimizer.state.pop(params[0])


def all_states_are_gone(params, optimizer):  # noqa: ARG001
    optimizer.state.clear()


def no_gradient(params, optimizer):  # noqa: ARG001
    params[1].grad = None


def frozen(params, optimizer):  # noqa: ARG001
    params[3].requires_grad_(False)
    params[3].grad = None


def parameters_in_another_order(params, optimizer):  # noqa: ARG001
    optimizer.param_groups[0]["params"].reverse()


def one_parameter_less(params, optimizer):  # noqa: ARG001
    optimizer.param_groups[0]["params"].pop()


def a_parameter_replaced(params, optimizer):
    new = torch.nn.Parameter(params[0].detach().clone())
    new.grad = params[0].grad
    optimizer.param_groups[0]["params"][0] = new
    params[0] = new


def a_group_more(params, optimizer):
    new = torch.nn.Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    optimizer.add_param_group({"params": [new], "lr": 1.0})
    params.append(new)


def a_group_split(params, optimizer):  # noqa: ARG001
    groups = optimizer.param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5})


def a_parameter_in_the_next_group(params, optimizer):  # noqa: ARG001
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def another_group_object(params, optimizer):  # noqa: ARG001
    groups = optimizer.param_groups
    groups[0] = {**groups[0], "lr": 0.5}


def another_rate(params, optimizer):  # noqa: ARG001
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def a_checkpoint(params, optimizer):  # noqa: ARG001
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] += 1
    optimizer.load_state_dict(saved)


CHANGES = [
    other_data,
    other_gradient_layout,
    layout_of_gradient_at_its_address,
    negated_gradient_at_its_address,
    memory_format,
    format_at_the_same_addresses,
    state_at_another_place,
    data_of_a_state,
    step_of_a_state,
    states_of_each_other,
    memory_of_each_other,
    a_state_is_gone,
    a_state_under_another_name,
    states_in_another_order,
    all_states_are_gone,
    no_gradient,
    frozen,
    parameters_in_another_order,
    one_parameter_less,
    a_parameter_replaced,
    a_group_more,
    a_group_split,
    a_parameter_in_the_next_group,
    another_group_object,
    another_rate,
    a_checkpoint,
]


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_counts(change):
    twins = Twins()
    twins.set_gradients()
    for params, optimizer in twins.sides:
        change(params, optimizer)
    for _ in range(4):  # until tables are used again
        twins.step()
        twins.assert_same()


@pytest.mark.usefixtures("reader")
def test_a_gradient_after_steps_without_it_counts():
    twins = Twins()
    for params, _ in twins.sides:
        params[1].grad = None
    for _ in range(3):
        twins.step()
    twins.set_gradients()
    for _ in range(3):
        twins.step()
        twins.assert_same()


def test_writes_are_counted_in_the_parameter_that_is_there():
    """It may have the memory and the state of another one, at the same places."""
    params, optimizer = Twins().sides[1]
    new = torch.nn.Parameter(params[3].data)
    new.grad = params[3].grad
    optimizer.state[new] = optimizer.state.pop(params[3])
    optimizer.param_groups[1]["params"][0] = new
    before = new._version
    optimizer.step()
    assert new._version == before + 1


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_another_type_counts(name):
    """Types of states that are assigned, and of the option."""
    twins = Twins()
    (params, optimizer) = twins.sides[1]
    state = optimizer.state[params[0]]
    state[name] = state[name].double()
    twins.step()
    twins.assert_same()
    assert optimizer.state[params[0]][name].dtype == torch.float32
    optimizer.param_groups[0]["states"] = "bf16"
    optimizer.step()
    assert optimizer.state[params[0]][name].dtype == torch.bfloat16


@pytest.mark.usefixtures("reader")
def test_gradients_of_another_type_count():
    twins = Twins()
    for dtype in (torch.bfloat16, torch.float32):
        twins.set_gradients()
        (theirs, _), (ours, _) = twins.sides
        for param, twin in zip(theirs, ours, strict=True):
            param.grad = param.grad.to(dtype).float()
            twin.grad = None
            twin.grad_dtype = dtype
            twin.grad = param.grad.to(dtype)
        for _ in range(3):
            twins.step()
            twins.assert_same()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("number", "shape"), [(0, (4, 6)), (0, (3, 4)), (1, (12,))])
def test_gradients_at_the_same_address_may_not_have_another_shape(number, shape):
    """Also one with the same strides."""
    twins = Twins()
    params, optimizer = twins.sides[1]
    grad = params[number].grad
    grad.data = grad.data.view(-1)[: torch.Size(shape).numel()].view(shape)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=f"a gradient of shape {re.escape(str(shape))}"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", ["gradient", "step", "exp_avg", "exp_avg_sq"])
def test_tensors_that_lose_their_memory_are_refused(name):
    params, optimizer = Twins().sides[1]
    tensors = optimizer.state[params[0]] | {"gradient": params[0].grad}
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name} of shape .* has no memory"):
        optimizer.step()


@pytest.mark.usefixtures("reader")
def test_no_gradient_is_kept():
    twins = Twins()
    params, optimizer = twins.sides[1]
    twins.set_gradients()
    freed = weakref.ref(params[0].grad.untyped_storage()), weakref.ref(params[0].grad)
    optimizer.step()
    optimizer.zero_grad()
    assert [one() for one in freed] == [None, None]


def test_a_parameter_may_lead_to_its_optimizer():
    params, optimizer = Twins().sides[1]
    assert optimizer._last is not None
    params[0].optimizer = optimizer
    freed = weakref.ref(params[0])
    del params, optimizer
    gc.collect()
    assert freed() is None


@pytest.mark.skipif(tensor_reader is None, reason="pycomm was installed for another torch")
def test_parameters_of_other_classes():
    _C.set_tensor_reader(None)  # as before the first step of a process
    params = [OwnParameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = FusedAdamW(params)
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer._last is not None
    assert torch.equal(*params)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_a_write_to_a_parameter_with_master_weights_counts(master):
    params, optimizer = run(Case("adamw", dtype=torch.bfloat16, master=master), steps=4)
    assert optimizer._last is not None
    with torch.no_grad():
        params[0].zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.full_weights(params[1]).clone()
    for _ in range(3):
        optimizer.step()
        assert not params[0].any()
        assert torch.equal(optimizer.full_weights(params[1]), before)


def test_copies_and_writes_are_counted():
    twins = Twins()
    params, optimizer = twins.sides[1]
    twin = copy.deepcopy(optimizer)
    for _ in range(3):
        before = [param._version for param in params]
        optimizer.step()
        assert [param._version for param in params] == [count + 1 for count in before]
    assert twin._last is None
    copied = [param for group in twin.param_groups for param in group["params"]]
    for param, grad in zip(copied, [param.grad for param in params], strict=True):
        param.grad = grad
    for _ in range(3):
        twin.step()
    assert all(map(torch.equal, copied, params))


def test_tables_must_fit():
    param = torch.zeros(3)
    row = _C.RowDescription(param, param, {})
    with pytest.raises(ValueError, match="tables must have a segment for each row"):
        _C.StepDescription([param], [row], [False], [], {})
