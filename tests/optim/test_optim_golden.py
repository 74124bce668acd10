"""Every optimizer, type, master and state has the bits that numpy computes."""

import golden
import golden_optim as reference
import numpy as np
import pytest
import torch
from optimizing import Case, gradients, parameters, run, set_gradients

from pycomm.optim import _storage

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("adam", "adamw", "sgd", "lion", "lamb")
OPTIONS = [
    Case("adam", {"amsgrad": True, "weight_decay": 0.1}),
    Case("adamw", {"amsgrad": True, "maximize": True}),
    Case("sgd", {"momentum": 0.0, "weight_decay": 0.1}),
    Case("sgd", {"dampening": 0.3, "maximize": True}),
    Case("sgd", {"nesterov": True, "weight_decay": 0.01}),
    Case("lamb", {"weight_decay": 0.0}),
    Case("lion", {"maximize": True}),
]
KINDS = [
    *((torch.float32, None), (BF16, None), (BF16, "fp32"), (BF16, "remainder")),
    *((FP16, None), (FP16, "fp32")),
]
MIXED = [
    Case(name, dtype=dtype, master=master, states=states)
    for name in NAMES
    for dtype, master in KINDS
    for states in ("fp32", "bf16", "fp16", "8bit")
]
MORE = [
    Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "8bit"),
    Case("adamw", dtype=BF16, stochastic=True, seed=7),
    Case("adamw", dtype=BF16, stochastic=True, states="bf16", seed=2**63),
    Case("adamw", dtype=BF16, stochastic=True, states="bf16", master="remainder"),
    Case("lion", dtype=BF16, stochastic=True),
    Case("adamw", {"amsgrad": True}, states="fp16"),
    Case("adamw", dtype=BF16, grad_dtype=torch.float32, master="remainder"),
    Case("adamw", dtype=torch.float32, grad_dtype=BF16),
    Case("adamw", dtype=BF16, grad_dtype=FP16, states="bf16"),
]


@pytest.mark.parametrize("case", OPTIONS + MIXED + MORE, ids=str)
def test_steps(case):
    check(case)


@pytest.mark.parametrize("case", MIXED + MORE, ids=str)
def test_steps_with_what_is_not_finite(case):
    """Without a check, infinities and NaN propagate by IEEE arithmetic; every NaN is canonical."""
    check(case, spoil=True)


def check(case, spoil=False):
    params = parameters(case.dtype)
    models = case.model(params)
    optimizer = case.make(params)
    for step in range(3):
        grads = gradients(params, step, case.grad_dtype)
        if spoil:
            for place, value in enumerate((torch.inf, -torch.inf, torch.nan, -torch.nan)):
                grads[1][700 * place + step] = value
        set_gradients(params, grads)
        optimizer.step()
        for place, (param, model, grad) in enumerate(zip(params, models, grads, strict=True)):
            model.update(grad.float().numpy().ravel())
            where = f"parameter {place}, step {step}"
            compare(where, param, model.seen)
            state = optimizer.state[param]
            whole = (
                param if param.dtype == FP16 and not case.master else _storage.joined(param, state)
            )
            compare(f"weights of {where}", whole, model.weights)
            for name, expected in zip(
                optimizer._state_names(optimizer.param_groups[0]), model.states, strict=False
            ):
                compare(f"{name} of {where}", state_in_fp32(state, name), expected)


def state_in_fp32(state, name):
    place = _storage.place_in(state, name)
    if state[place].dtype != FP16:
        return _storage.to_fp32(state, name)
    values = golden.in_fp32(state[place])
    return values if place == name else values.square()


def compare(where, got, expected):
    got = golden.in_fp32(got).numpy().ravel().view(np.uint32)
    wrong = np.flatnonzero(got != expected.view(np.uint32))
    assert not len(wrong), (
        f"{len(wrong)} of {len(got)} elements are wrong, the first at {wrong[0]}: "
        f"{got.view(np.float32)[wrong[0]]!r} instead of {expected[wrong[0]]!r}: {where}"
    )


@pytest.mark.parametrize("squares", [False, True])
def test_codes(squares):
    """The bytes themselves, with zeros, subnormals, the largest numbers, infinities and NaN."""
    name = "exp_avg_sq" if squares else "exp_avg"
    generator = torch.Generator().manual_seed(0)
    sizes = torch.arange(-150.0, 128.0).exp2().repeat_interleave(256)
    values = torch.randn(len(sizes), generator=generator).clamp(-1.9, 1.9) * sizes
    values[::17] = 0
    values[256 * 5 + 3], values[256 * 6] = torch.inf, torch.nan
    values[256 * 7 : 256 * 8] = 0
    values = torch.cat([values, values[-40:]])
    values = values.abs() if squares else values
    state = _storage.from_fp32(values, name, torch.uint8)
    codes, largest = reference.encode8(values.numpy(), squares)
    assert np.array_equal(state[f"{name}_code"].numpy(), codes)
    scales = state[_storage.scale_name(name)]
    assert torch.equal(golden.bits(scales), golden.bits(torch.from_numpy(largest)))
    compare(name, _storage.to_fp32(state, name), reference.decode8(codes, largest, squares))


@pytest.mark.parametrize("count", [0, 1, 31, 1000, 1024, 1025, 5000, 2**20 + 4097])
def test_norm(count):
    """To the last bit, so that no processor may add in another order."""
    generator = torch.Generator().manual_seed(count)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (count, 3, 2000)]
    optimizer = Case("sgd").make(params, max_norm=1.0)
    grads = [torch.randn(p.shape, generator=generator) for p in params]
    for grad in grads:  # so far apart that sums round
        grad *= torch.randint(-9, 9, grad.shape, generator=generator).exp2()
    set_gradients(params, grads)
    optimizer.step()
    sums = np.array([reference.square_sum(grad.numpy()) for grad in grads])
    assert optimizer.grad_norm.item() == np.sqrt(reference.tree_sum(sums))


def test_threads_change_nothing():
    case = Case("lamb", dtype=BF16, master="remainder", states="8bit")
    seen = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            params, optimizer = run(case, max_norm=0.5)
        finally:
            torch.set_num_threads(1)
        states = [t for p in params for t in optimizer.state[p].values()]
        seen.append([*params, *states, optimizer.grad_norm])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)
