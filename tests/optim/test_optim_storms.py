"""Overflows of any kind change nothing, and defects of other libraries do not occur."""

import copy

import golden
import pytest
import torch
from optimizing import Case, gradients, parameters, run, set_gradients

import pycomm.optim as optim

BF16 = torch.bfloat16
CASES = [
    Case("adamw", dtype=BF16, master="remainder", states="8bit"),
    Case("adam", {"amsgrad": True}, states="bf16"),
    Case("sgd", {"dampening": 0.5}),
    Case("lion", dtype=BF16, stochastic=True),
    Case("lamb", dtype=torch.float16, master="fp32"),
]
STORMS = {
    "ten steps": lambda step, grads: [g.fill_(torch.inf) for g in grads] if step < 10 else None,
    "alternating": lambda step, grads: [g.fill_(torch.nan) for g in grads] if step % 2 else None,
    "one element": lambda step, grads: grads[1].view(-1)[-1:].fill_(-torch.inf) if step < 5 else 0,
}


def snapshot(params, optimizer):
    states = [t for p in params for t in optimizer.state.get(p, {}).values()]
    return [t.detach().clone() for t in (*params, *states)]


def same(before, after):
    return len(before) == len(after) and all(map(golden.same_bits, before, after))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("storm", STORMS)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_storms(case, storm, max_norm):
    """Skipped steps have no effect: the trajectory is the same as without them."""
    params, calm = parameters(case.dtype), parameters(case.dtype)
    optimizer, other = (case.make(p, max_norm=max_norm) for p in (params, calm))
    scaler = optim.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))
    for step in range(14):
        grads = gradients(params, step)
        scale = scaler.get_scale()
        scaled = [g * scale for g in grads]
        skipped = STORMS[storm](step, scaled)
        set_gradients(params, scaled)
        before = snapshot(params, optimizer)
        scaler.step(optimizer)
        scaler.update()
        if skipped:
            # States may have been made, but hold nothing.
            after = snapshot(params, optimizer)
            assert same(before, after) or (
                len(before) == len(params) and same(before, after[: len(before)])
            )
            assert scaler.get_scale() == scale / 2
        else:
            other.grad_scale, other.found_inf = torch.tensor(scale), torch.zeros(())
            set_gradients(calm, scaled)
            other.step()
    assert same(snapshot(params, optimizer), snapshot(calm, other))


@pytest.mark.parametrize("found", [1.0, 2.0, torch.inf])
def test_found_inf_of_several_devices_is_summed(found):
    """torch's kernels skip only at exactly 1."""
    params = parameters()
    optimizer = optim.FusedAdamW(params)
    set_gradients(params, gradients(params, 0))
    before = [p.detach().clone() for p in params]
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()
    assert same(before, [p.detach() for p in params])
    assert all(optimizer.state[p]["step"] == 0 for p in params)


def test_squares_that_overflow_are_no_overflow():
    """Finite gradients with a squared norm that exceeds fp32."""
    param = torch.nn.Parameter(torch.zeros(3000))
    optimizer = optim.FusedSGD([param], lr=1.0, max_norm=1.0)
    optimizer.grad_scale = torch.tensor(1.0)
    param.grad = torch.full_like(param, 3e38)
    optimizer.step()
    assert optimizer.found_inf == 0
    expected = torch.full_like(param, -(3000**-0.5))
    torch.testing.assert_close(param.detach(), expected)


def test_moments_keep_fp32_beside_16_bit_parameters():
    """apex and FlashOptim rounded them to the parameter's type."""
    params, optimizer = run(Case("adamw", dtype=BF16))
    moment = optimizer.state[params[1]]["exp_avg_sq"]
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())
    copied = Case("adamw", dtype=BF16).make(params)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert golden.same_bits(copied.state[params[1]]["exp_avg_sq"], moment)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0x7FC00000])
def test_nan_stays_nan_in_remainders(pattern):
    """apex' split turns the first of these into minus zero."""
    param = torch.nn.Parameter(torch.ones(7, dtype=BF16))
    optimizer = optim.FusedSGD([param], lr=1.0, master_weights="remainder")
    grad = torch.zeros(7, dtype=torch.int64)
    grad[3] = pattern
    param.grad_dtype = torch.float32
    param.grad = grad.to(torch.uint32).view(torch.float32)
    optimizer.step()
    assert param.isnan().tolist() == [i == 3 for i in range(7)]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5])
def test_remainders_never_make_nan_of_an_edited_parameter(value):
    """Half of the low halves are below zero, which zero cannot borrow from."""
    params, optimizer = run(Case("adamw", dtype=BF16, master="remainder"))
    for param in params:
        param.data.fill_(value)
        weights = optimizer.full_weights(param)
        assert ((weights - value).abs() <= abs(value) / 256 + 1e-40).all()
    set_gradients(params, gradients(params, 9))
    optimizer.step()
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 3.4e38, -3.4e38])
def test_large_weights_stay_themselves(value):
    weights = torch.tensor([value, 1.0])
    param = torch.nn.Parameter(weights.bfloat16())
    optimizer = optim.FusedLion([param], lr=0.0, master_weights="remainder")
    saved = {"state": {0: {"exp_avg": torch.zeros(2), "master_param": weights}}}
    optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(optimizer.state_dict(format="torch")["state"][0]["master_param"], weights)
