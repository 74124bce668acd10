"""What a hostile reader tried: changed parameters, hooks, stale flags, wrong arguments."""

import copy
import subprocess
import sys

import pytest
import torch
from optimizing import Case, gradients, parameters, set_gradients

import pycomm.optim as optim

BF16 = torch.bfloat16


def ones(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(*shape, dtype=dtype))


def step(optimizer, *grads):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    set_gradients(params, list(grads))
    optimizer.step()


@pytest.mark.parametrize("order", [("calm", "wild"), ("wild", "calm")])
def test_a_scale_by_hand_is_checked_in_every_step(order):
    param = ones(3)
    optimizer = optim.FusedSGD([param], lr=1.0)
    optimizer.grad_scale = torch.ones(())
    for what in order:
        step(optimizer, torch.full((3,), torch.inf if what == "wild" else 1.0))
    assert param.tolist() == [0.0] * 3


def test_momentum_may_begin_later():
    """As torch.optim.SGD's may."""
    seen = []
    for optimizer_class in (torch.optim.SGD, optim.FusedSGD):
        param = ones(3)
        optimizer = optimizer_class([param], lr=0.1)
        for momentum in (0.0, 0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            step(optimizer, torch.ones(3))
        seen.append(param.detach())
    assert torch.equal(*seen)


def test_memory_format_may_change():
    """model.to(memory_format=torch.channels_last) after some steps; torch goes on as before."""
    seen = []
    for optimizer_class in (torch.optim.AdamW, optim.FusedAdamW):
        param = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
        optimizer = optimizer_class([param], lr=0.1)
        for number in range(4):
            if number == 2:
                param.data = param.data.to(memory_format=torch.channels_last)
            step(optimizer, gradients([param], number)[0])
        seen.append(param.detach())
    torch.testing.assert_close(*seen, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("master", ["fp32", "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_types_that_change_are_converted_or_refused(master, dtype):
    """model.float() after some steps."""
    param = ones(3, dtype=BF16)
    optimizer = optim.FusedSGD([param], lr=0.25, momentum=0.9, master_weights=master)
    step(optimizer, torch.ones(3, dtype=BF16))
    param.grad = None
    param.data = param.data.to(dtype)
    before = param.detach().clone()
    try:
        step(optimizer, torch.ones(3, dtype=dtype))
    except (ValueError, TypeError):
        return
    torch.testing.assert_close(param.detach(), before - 0.25 * 1.9)


@pytest.mark.parametrize("what", ["torch.ones(100000)", "torch.ones(3, 2)[:, 0]"])
def test_parameters_of_another_shape_are_refused(what):
    """In a process of its own: it corrupts the heap."""
    program = f"""
import torch, pycomm.optim as optim
param = torch.nn.Parameter(torch.ones(3))
optimizer = optim.FusedAdamW([param])
param.grad = torch.ones(3)
optimizer.step()
param.grad = None
param.data = {what}
param.grad = torch.ones_like(param)
try:
    optimizer.step()
except (RuntimeError, ValueError):
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "refused\n"


def test_distributed_tensors_are_refused():
    """Or stepped; in a process of its own."""
    program = """
import torch, torch.distributed as dist
import pycomm.optim as optim
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
make = lambda: distribute_tensor(torch.ones(8), mesh, [Shard(0)])
param = torch.nn.Parameter(make())
try:
    optimizer = optim.FusedSGD([param], lr=1.0)
    param.grad = make()
    optimizer.step()
    print("right" if not param.to_local().any() else "wrong")
except (TypeError, ValueError):
    print("right")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "right\n"


def test_hooks_before_loading_may_change_states():
    params = parameters()
    optimizer = Case("adamw").make(params)
    set_gradients(params, gradients(params, 0))
    optimizer.step()

    def zero(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["state"][1]["exp_avg"].zero_()
        return changed

    optimizer.register_load_state_dict_pre_hook(zero)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state[params[1]]["exp_avg"].any()


def test_a_checkpoint_that_is_refused_changes_nothing():
    param = ones(3)
    optimizer = optim.FusedAdamW([param])
    step(optimizer, torch.ones(3))
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.ones(4)
    with pytest.raises(ValueError, match="exp_avg has shape"):
        optimizer.load_state_dict(wrong)
    step(optimizer, torch.ones(3))
    assert optimizer.state[param]["step"] == 2


def test_backward_after_a_step_is_refused():
    """As after torch's, instead of a wrong gradient."""
    param = ones(3)
    optimizer = optim.FusedSGD([param], lr=1.0)
    loss = (param * param).sum()
    step(optimizer, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scaler_takes_torchs_positional_arguments():
    assert optim.GradScaler("cpu", 2.0**10, 2.0, 0.5, 100).get_scale() == 2.0**10


@pytest.mark.parametrize("option", [{"differentiable": True}, {"foreach": True}, {"fused": False}])
def test_torchs_flags_of_a_group_are_refused(option):
    with pytest.raises(ValueError, match="not supported"):
        optim.FusedAdamW([{"params": [ones(3)], **option}])


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5])
def test_seeds_are_checked(seed):
    with pytest.raises((ValueError, TypeError), match="seed"):
        optim.FusedSGD([ones(3, dtype=BF16)], stochastic_rounding=True, seed=seed)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_duplicates_are_refused():
    param = ones(3)
    with pytest.raises(ValueError, match=r"duplicate|more than once"):
        optim.FusedSGD([param, param])
