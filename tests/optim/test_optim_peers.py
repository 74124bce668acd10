"""Defects of other optimizers, each with a test that it does not happen here.

Others have their tests elsewhere: rounded moments, found_inf summed over devices, NaN in remainders
in test_optim_storms.py; counters in the group and momenta of None in test_optim_checkpoints.py;
8-bit states through distributed checkpoints in test_optim_dropin.py.
"""

import copy

import golden
import pytest
import torch
from optimizing import OPTIMIZERS, Case, gradients, parameters, set_gradients

import pycomm.optim as optim

BF16 = torch.bfloat16
INF = float("inf")


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, optim.GradScaler])
@pytest.mark.parametrize("pattern", ["x.", ".x.", "xx..x.", ".x.x.x", "..."])
def test_counters_know_this_overflow_and_not_the_one_before(scaler_class, pattern):
    """apex and TransformerEngine advance `step` by the flag of the previous iteration."""
    params = parameters(shapes=((5,), (70, 60)))
    optimizer = optim.FusedAdamW(params, master_weights="fp32", states="8bit")
    scaler = scaler_class("cpu", init_scale=8.0)
    done = 0
    for step, what in enumerate(pattern):
        scale = scaler.scale(torch.ones(())).item()
        scaled = [grad * scale for grad in gradients(params, step)]
        if what == "x":
            scaled[1][0, 0] = INF
        set_gradients(params, scaled)
        scaler.step(optimizer)
        scaler.update()
        done += what == "."
        assert [optimizer.state[p]["step"].item() for p in params] == [done] * 2, step


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, optim.GradScaler])
def test_one_overflow_skips_one_optimizer(scaler_class):
    """pytorch#95847 and others: each optimizer has its own finding; the scale belongs to all."""
    calm, wild = (parameters(seed=seed, shapes=((9,),)) for seed in (0, 1))
    optimizers = [optim.FusedAdamW(calm), optim.FusedSGD(wild)]
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = [p.detach().clone() for p in (*calm, *wild)]
    set_gradients(calm, [torch.ones(9)])
    set_gradients(wild, [torch.full((9,), INF)])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not torch.equal(calm[0], before[0])
    assert torch.equal(wild[0], before[1])


@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1.0, 1e18])
def test_scales_of_8_bit_states_have_the_range_of_fp32(scale):
    """FlashOptim's, in fp16, underflow and overflow."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = optim.FusedSGD([param], lr=1.0, momentum=0.9, states="8bit")
    param.grad = torch.full_like(param, scale)
    optimizer.step()
    first = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(
        param - first, torch.full_like(param, -0.9 * scale), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("wrong", [True, False, "bf16", torch.float32])
def test_master_weights_are_never_ignored(wrong):
    """apex#1728: master_weights=True did nothing for bf16."""
    params = parameters(BF16)
    with pytest.raises(ValueError, match="master_weights must be None, 'fp32' or 'remainder'"):
        optim.FusedAdamW(params, master_weights=wrong)
    for right, name in (("fp32", "master_param"), ("remainder", "remainder")):
        optimizer = optim.FusedAdamW(params, lr=1e-5, master_weights=right)
        set_gradients(params, gradients(params, 0))
        optimizer.step()
        assert all(name in optimizer.state[param] for param in params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_neighbours_of_empty_parameters_are_stepped(name):
    """TransformerEngine#3207: an empty shard made the others be skipped."""
    shapes = ((0,), (1030,), (0, 5), (3,), (0,))
    params, alone = parameters(shapes=shapes), parameters(shapes=shapes)
    whole = Case(name).make(params, max_norm=0.5)
    parts = Case(name).make([alone[1], alone[3]], max_norm=0.5)
    for step in range(3):
        grads = gradients(params, step)
        set_gradients(params, grads)
        set_gradients([alone[1], alone[3]], [grads[1], grads[3]])
        whole.step()
        parts.step()
    for place in (1, 3):
        assert golden.same_bits(params[place].detach(), alone[place].detach())
    assert all(whole.state[param]["step"] == 3 for param in params)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_parameters_take_bf16_gradients(name, scaled):
    """TransformerEngine#3358; the same bits as their values in fp32 give."""
    seen = []
    for dtype in (BF16, torch.float32):
        params = parameters()
        optimizer = Case(name).make(params)
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        for step in range(3):
            grads = [grad.bfloat16().to(dtype) for grad in gradients(params, step)]
            set_gradients(params, grads)
            optimizer.step()
        seen.append([param.detach() for param in params])
    assert all(map(golden.same_bits, *seen))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_rates_may_become_floats_and_tensors(name):
    """torchao raises where ReduceLROnPlateau has made a float of a tensor (pytorch#163093)."""
    seen = []
    for kinds in ((float,) * 4, (torch.tensor, float, torch.tensor, float)):
        params = parameters()
        optimizer = Case(name, {"lr": kinds[0](0.25)}).make(params)
        for step, kind in enumerate(kinds):
            optimizer.param_groups[0]["lr"] = kind(0.25 / (step + 1))
            set_gradients(params, gradients(params, step))
            optimizer.step()
        seen.append([param.detach() for param in params])
    rates = 0.25, torch.tensor(0.25).item()
    assert rates[0] == rates[1]
    for one, other in zip(*seen, strict=True):  # 0.25 / 3 is rounded to fp32 in a tensor
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_overflows_without_a_scaler_are_skipped_where_asked_for(dtype):
    """DeepSpeed#8035: one overflow in bf16 makes states NaN for good."""
    params = parameters(dtype)
    optimizer = Case("adamw", dtype=dtype, master="fp32", states="8bit").make(params)
    for step in range(4):
        grads = gradients(params, step)
        if step == 2:
            grads[2][-1, -1] = -INF
            before = copy.deepcopy([optimizer.state[param] for param in params])
        set_gradients(params, grads)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), None
        optimizer.step()
        if step == 2:
            for param, state in zip(params, before, strict=True):
                now = optimizer.state[param]
                assert all(golden.same_bits(now[key], state[key]) for key in state)
    assert all(optimizer.state[param]["step"] == 3 for param in params)
    assert all(param.isfinite().all() for param in params)


def test_resuming_changes_no_loss():
    """flashoptim#3: from 2.4 to 1,785. Here not by a bit, 8-bit states and remainders included."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 80), torch.randint(0, 9, (64,))

    def train(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = model(inputs.bfloat16()).float()
            loss = torch.nn.functional.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def make():
        network = torch.nn.Sequential(
            torch.nn.Linear(80, 90), torch.nn.Tanh(), torch.nn.Linear(90, 9)
        )
        model = network.bfloat16()
        options = {"master_weights": "remainder", "states": "8bit"}
        return model, optim.FusedAdamW(model.parameters(), lr=1e-2, **options)

    model, optimizer = make()
    train(model, optimizer, 5)
    again, resumed = make()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(again, resumed, 5) == train(model, optimizer, 5)
