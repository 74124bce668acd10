"""Unsupported arguments raise clear errors; none is ignored."""

import pytest
import torch
from optimizing import OPTIMIZERS, Case, gradients, parameters, set_gradients

import pycomm.optim as optim

BF16, FP16 = torch.bfloat16, torch.float16


def one(dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]


REFUSED = [
    (optim.FusedAdam, torch.float32, {"lr": -1.0}, "lr must not be negative"),
    (optim.FusedAdam, torch.float32, {"lr": torch.ones(2)}, "lr must have one element"),
    (optim.FusedAdam, torch.float32, {"betas": (1.0, 0.9)}, "betas must be"),
    (optim.FusedAdam, torch.float32, {"eps": -1.0}, "eps must not be negative"),
    (optim.FusedAdamW, torch.float32, {"weight_decay": -0.1}, "weight_decay must not"),
    (optim.FusedAdamW, torch.float32, {"foreach": True}, "foreach=True is not supported"),
    (optim.FusedAdamW, torch.float32, {"fused": False}, "fused=False is not supported"),
    (optim.FusedAdamW, torch.float32, {"differentiable": True}, "differentiable=True"),
    (optim.FusedAdamW, torch.float32, {"max_norm": 0.0}, "max_norm must be above 0"),
    (optim.FusedAdamW, torch.float32, {"states": "int4"}, "one of fp32, fp16, bf16, 8bit"),
    (optim.FusedAdamW, BF16, {"master_weights": "bf16"}, "master_weights must be"),
    (optim.FusedAdamW, FP16, {"master_weights": "remainder"}, "use 'fp32'"),
    (optim.FusedLion, torch.float32, {"master_weights": "remainder"}, "leave it out"),
    (optim.FusedAdamW, FP16, {"stochastic_rounding": True}, "got float16"),
    (optim.FusedAdamW, torch.float32, {"stochastic_rounding": True}, "nothing to round"),
    (optim.FusedSGD, BF16, {"stochastic_rounding": True, "master_weights": "fp32",
                            "states": "bf16"}, "nothing to round"),
    (optim.FusedSGD, torch.float32, {"nesterov": True}, "needs momentum"),
    (optim.FusedSGD, torch.float32, {"momentum": -0.1}, "momentum must not be negative"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype", "options", "message"), REFUSED)
def test_refused(kind, dtype, options, message):
    with pytest.raises(ValueError, match=message):
        kind(one(dtype), **options)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_refused_parameters(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes float32, float16 and bfloat16"):
        kind(one(torch.float64))
    with pytest.raises(TypeError, match="complex64"):
        kind(one(torch.complex64))
    spread = torch.nn.Parameter(torch.ones(6, 2)[:, 0])
    with pytest.raises(ValueError, match="takes dense parameters"):
        kind([spread])
    with pytest.raises(ValueError, match="runs on the CPU"):
        kind([torch.nn.Parameter(torch.ones(3, device="meta"))])
    optimizer = kind(one())
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": one(torch.float64)})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = optim.FusedSGD(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="FusedSGD does not support sparse gradients"):
        optimizer.step()


class Wrapped(torch.Tensor):
    """Has no memory of its own, as distributed and quantized tensors."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        made = func(*inner, **(kwargs or {}))
        return cls(made) if func is torch.ops.aten.detach.default else made


def freed():
    made = torch.ones(3)
    made.untyped_storage().resize_(0)  # as FSDP does between passes
    return made


@pytest.mark.parametrize("make", [lambda: Wrapped(torch.ones(3)), freed], ids=["wrapped", "freed"])
@pytest.mark.parametrize("what", ["gradient", "swapped", "replaced"])
@pytest.mark.parametrize("started", [False, True])
def test_tensors_without_memory_are_refused_in_every_step(make, what, started):
    params = one()
    optimizer = optim.FusedAdamW(params, max_norm=1.0)
    if started:
        set_gradients(params, [torch.ones(3)])
        optimizer.step()
    param = params[0]
    if what == "gradient":
        param.grad = make()
    elif what == "swapped":
        param.grad = None
        torch.utils.swap_tensors(param, torch.nn.Parameter(make()))
        param.grad = make()
    else:
        optimizer.param_groups[0]["params"][0] = param = make().requires_grad_()
        param.grad = make()
    with pytest.raises((TypeError, ValueError), match=r"takes plain tensors|has no memory"):
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize("shape", [(10,), (1,), (1000, 1), (2, 500)])
def test_gradients_of_another_shape_are_refused(kind, shape):
    """A gradient stays behind when a parameter's data grows."""
    param = torch.nn.Parameter(torch.ones(shape))
    param.grad = torch.ones(shape)
    param.data = torch.ones(1000)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"a gradient of shape \(.*\) of a parameter of shape"):
        kind([param]).step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_parameters_that_are_no_longer_dense_are_refused(started, momentum):
    """Without states, too, there is nothing that a stride could be compared with."""
    params = one()
    optimizer = optim.FusedSGD(params, lr=1.0, momentum=momentum)
    if started:
        set_gradients(params, [torch.ones(3)])
        optimizer.step()
    whole = torch.ones(6, 2)
    params[0].grad = None
    params[0].data = whole[:3, 0]
    set_gradients(params, [torch.ones(3)])
    with pytest.raises(ValueError, match="takes dense parameters"):
        optimizer.step()
    assert torch.equal(whole, torch.ones(6, 2))


def test_parameters_that_have_been_moved_are_refused():
    model = torch.nn.Linear(2, 2)
    optimizer = optim.FusedAdamW(model.parameters())
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(2, 2, device="meta")))
    model.weight.grad = torch.zeros(2, 2, device="meta")
    with pytest.raises(ValueError, match="got a gradient on meta"):
        optimizer.step()


def test_decoupled_is_not_an_option_of_adamw():
    with pytest.raises(TypeError, match="use FusedAdam"):
        optim.FusedAdamW(one(), decoupled_weight_decay=False)


def test_parameters_without_gradients_and_without_elements():
    params = [*one(), torch.nn.Parameter(torch.ones(0, 4)), *one()]
    optimizer = optim.FusedAdamW(params, states="8bit", max_norm=1.0)
    optimizer.step()
    assert not optimizer.state
    params[1].grad = torch.zeros_like(params[1])
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1
    assert optimizer.grad_norm == 0
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    assert torch.equal(params[0], torch.ones(3))
    assert (params[2] < 1).all()


def test_small_tensors_keep_fp32_where_8_bits_are_asked_for():
    params = parameters(shapes=((4095,), (4096,), (64, 65)))
    optimizer = Case("adamw", states="8bit").make(params)
    set_gradients(params, gradients(params, 0))
    optimizer.step()
    names = ["exp_avg", "exp_avg_code", "exp_avg_code"]
    kinds = [optimizer.state[p][name].dtype for p, name in zip(params, names, strict=True)]
    assert kinds == [torch.float32, torch.uint8, torch.uint8]
    assert optimizer.state[params[2]]["exp_avg_sq_absmax"].numel() == 17


def test_random_bits_belong_to_parameter_and_element():
    """Not to the order of groups' calls, threads, or which other parameters have gradients."""
    case = Case("sgd", {"momentum": 0.0, "lr": 1e-3}, BF16, stochastic=True, seed=1)
    alone, together = (parameters(BF16) for _ in range(2))
    grads = gradients(alone, 0)
    alone[2].grad = grads[2]
    case.make(alone).step()
    set_gradients(together, grads)
    case.make(together).step()
    assert torch.equal(alone[2], together[2])
    other = parameters(BF16)
    set_gradients(other, grads)
    Case("sgd", case.options, BF16, stochastic=True, seed=2).make(other).step()
    assert not torch.equal(other[2], together[2])


def test_stochastic_rounding_is_fair():
    """The mean of many parameters moves by far less than a unit of bf16."""
    param = torch.nn.Parameter(torch.ones(1 << 16, dtype=BF16))
    optimizer = optim.FusedSGD([param], lr=1e-4, stochastic_rounding=True)
    for _ in range(10):
        param.grad = -torch.ones_like(param)
        optimizer.step()
    # Standard deviation of the mean: less than 2^-8 * sqrt(10) / 2^8.
    assert param.float().mean().item() == pytest.approx(1.001, abs=2e-4)
