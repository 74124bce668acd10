"""Unusual uses: changed parameters, hooks, stale flags, wrong arguments."""

import copy
import inspect

import helpers
import pytest
import torch
from optimizing import Case, gradients, parameters, set_gradients
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

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


def test_a_scale_that_is_gone_skips_no_more_steps():
    """The finding of an earlier step with a scale does not skip later steps without one."""
    param = ones(3)
    optimizer = optim.FusedSGD([param], lr=1.0)
    optimizer.grad_scale = torch.ones(())
    step(optimizer, torch.full((3,), torch.inf))
    assert optimizer.found_inf == 1
    optimizer.grad_scale = None
    step(optimizer, torch.ones(3))
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
def test_weights_of_higher_precision_survive_a_wider_model(master):
    """model.float() after some steps; later writes to the parameter take effect."""
    param = ones(3000, dtype=BF16)
    optimizer = optim.FusedSGD([param], lr=1e-3, master_weights=master)
    step(optimizer, gradients([param], 0)[0])
    before = optimizer.full_weights(param).clone()
    assert not torch.equal(before, param.float())
    param.grad = None
    param.data = param.data.float()
    param.data[:5] = 7.1
    before[:5] = 7.1
    assert torch.equal(optimizer.full_weights(param), before)
    step(optimizer, torch.zeros(3000))
    assert torch.equal(param, before)
    assert list(optimizer.state[param]) == ["step"]


def test_remainders_are_refused_beside_fp16():
    param = ones(3, dtype=BF16)
    optimizer = optim.FusedSGD([param], lr=0.25, master_weights="remainder")
    step(optimizer, torch.ones(3, dtype=BF16))
    param.grad = None
    param.data = param.data.half()
    with pytest.raises(ValueError, match="use 'fp32'"):
        step(optimizer, torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_options_apply_to_a_model_that_has_become_bf16(master):
    """It trains as a model that has been bf16 from the beginning."""
    names = {"fp32": "master_param", "remainder": "remainder"}
    param = ones(5000, dtype=BF16)
    optimizer = optim.FusedAdamW([param], lr=1e-4, master_weights=master)
    param.data = param.data.float()
    step(optimizer, gradients([param], 0)[0])
    param.grad = None
    param.data = param.data.bfloat16()
    expected = param.detach().float().clone()
    twin = torch.nn.Parameter(expected.clone())
    other = optim.FusedAdamW([twin], lr=1e-4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (1, 2, 3):
        grad = gradients([param], number)[0]
        step(optimizer, grad)
        step(other, grad.float())
    assert names[master] in optimizer.state[param]
    assert torch.equal(optimizer.full_weights(param), twin.detach())


def test_options_of_the_group_that_a_parameter_has_moved_to():
    first, second = ones(5000, dtype=BF16), ones(5000, dtype=BF16)
    optimizer = optim.FusedAdamW(
        [
            {"params": [first]},
            {"params": [second], "states": "8bit", "master_weights": "remainder"},
        ]
    )
    step(optimizer, *gradients([first, second], 0))
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())
    step(optimizer, *gradients([first, second], 1))
    ours, theirs = optimizer.state[first], optimizer.state[second]
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert ours["step"] == 2
    assert ours["exp_avg_code"].dtype == torch.uint8
    groups[1]["states"] = "fp32"  # or the options change
    step(optimizer, *gradients([first, second], 2))
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32


def test_max_norm_of_a_group_is_refused():
    groups = [{"params": [ones(3)], "max_norm": 1.0}]
    with pytest.raises(ValueError, match="max_norm is for all groups together"):
        optim.FusedAdamW(groups)


def step_another_shape(_rank, _size, _store, data):
    param = ones(3)
    optimizer = optim.FusedAdamW([param])
    step(optimizer, torch.ones(3))
    param.grad = None
    param.data = data
    with pytest.raises((RuntimeError, ValueError)):
        step(optimizer, torch.ones_like(param))


@pytest.mark.parametrize("shape", [(100_000,), (3, 2)], ids=str)
def test_parameters_of_another_shape_are_refused(shape):
    """In a process of its own: it corrupts the heap."""
    data = torch.ones(shape)
    helpers.run_ranks(1, step_another_shape, data if data.dim() == 1 else data[:, 0])


def step_distributed(rank, size, store):
    helpers.join_world(rank, size, store)
    mesh = init_device_mesh("cpu", (1,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    try:
        optimizer = optim.FusedSGD([param], lr=1.0)
        param.grad = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
        optimizer.step()
    except (TypeError, ValueError):
        return True
    return not param.to_local().any().item()


def test_distributed_tensors_are_refused():
    """Or stepped; in a process of its own."""
    assert helpers.run_ranks(1, step_distributed) == [True]


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


WRONG = {
    "shape": ({"exp_avg_code": torch.ones(4)}, "exp_avg_code has shape"),
    "scales": ({"exp_avg_absmax": torch.ones(1)}, r"exp_avg_absmax must have shape .* got \(1,\)"),
    "no scales": (
        {"exp_avg_sq_absmax": None},
        "8-bit state of the checkpoint has no exp_avg_sq_absmax",
    ),
    "broadcast": ({"remainder": torch.zeros(1, dtype=torch.int16)}, r"remainder has shape \(1,\)"),
    "master": ({"master_param": torch.ones(1)}, r"master_param has shape \(1,\)"),
    "type": ({"remainder": torch.ones(5000)}, "remainders are of type int16"),
    "counter": ({"step": torch.ones(2)}, "step must be one number"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_that_is_refused_changes_nothing(what, flat):
    """The second parameter's is wrong; the first one's is not loaded either."""
    params = [ones(5000, dtype=BF16), ones(5000, dtype=BF16)]
    if flat:
        optim.flatten(params)
    optimizer = optim.FusedAdamW(params, states="8bit", master_weights="remainder")
    step(optimizer, *gradients(params, 0))
    wrong = copy.deepcopy(optimizer.state_dict())
    step(optimizer, *gradients(params, 1))
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    change, message = WRONG[what]
    wrong["state"][1].update(change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        optimizer.load_state_dict(wrong)
    assert all(map(torch.equal, params, before[0]))
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], before[1][number][name]) for name in state)
    step(optimizer, *gradients(params, 2))
    assert optimizer.state[params[0]]["step"] == 3


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


@pytest.mark.parametrize(
    "setting", [{"lr": "fast"}, {"betas": (0.9,)}, {"weight_decay": None}, {"seed": -1}], ids=str
)
def test_a_bad_setting_in_any_group_stops_the_step_before_it_begins(setting):
    params = [ones(3), ones(3)]
    optimizer = optim.FusedAdamW([{"params": param} for param in params], max_norm=1.0)
    step(optimizer, torch.ones(3), torch.ones(3))
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[1].update(setting)
    with pytest.raises((TypeError, ValueError)):
        step(optimizer, torch.ones(3), torch.ones(3))
    assert all(map(torch.equal, params, before))
    assert [optimizer.state[param]["step"] for param in params] == [1, 1]


@pytest.mark.parametrize("bound", [-1.0, 0.0, float("nan")])
def test_a_bound_that_turns_gradients_around_is_refused_also_later(bound):
    param = ones(3)
    optimizer = optim.FusedSGD([param], lr=1.0)
    optimizer.max_norm = bound
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        step(optimizer, torch.ones(3))
    assert torch.equal(param, torch.ones(3))


def test_a_scaler_without_gradients_raises_as_torchs():
    for kind in (torch.amp.GradScaler, optim.GradScaler):
        optimizer = optim.FusedAdamW([ones(3)])
        scaler = kind("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.update()


def test_a_hook_may_remove_options_from_a_checkpoint():
    param = ones(3)
    optimizer = optim.FusedAdamW([param])
    step(optimizer, torch.ones(3))

    def without_seed(_, state_dict):
        del state_dict["param_groups"][0]["seed"]

    optimizer.register_state_dict_post_hook(without_seed)
    torch.optim.AdamW([param]).load_state_dict(optimizer.state_dict(format="torch"))


def test_a_round_trip_of_a_checkpoint_adds_nothing():
    param = ones(3)
    optimizer = optim.FusedAdamW([param])
    step(optimizer, torch.ones(3))
    before = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["param_groups"] == before
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == before


@pytest.mark.parametrize("form", ["pycomm", "torch"])
def test_capturable_on_the_cpu_stays_out_of_checkpoints(form):
    """torch.optim asserts that it has a device which can capture."""
    param = ones(3)
    optimizer = optim.FusedAdamW([param], capturable=True)
    step(optimizer, torch.ones(3))
    theirs = torch.optim.AdamW([param])
    theirs.load_state_dict(optimizer.state_dict(format=form))
    step(theirs, torch.ones(3))
    assert optimizer.param_groups[0]["capturable"]


def test_betas_of_two_kinds_are_refused():
    for kind in (optim.FusedAdam, optim.FusedLAMB, optim.FusedLion, torch.optim.Adam):
        with pytest.raises(ValueError, match="betas must be"):
            kind([ones(3)], betas=(torch.tensor(0.9), 0.99))
    betas = torch.tensor(0.5), torch.tensor(0.25)
    assert optim.FusedAdam([ones(3)], betas=betas).defaults["betas"] == (0.5, 0.25)


def test_the_scaler_has_torchs_defaults():
    ours, theirs = (inspect.signature(s) for s in (optim.GradScaler, torch.amp.GradScaler))
    assert ours == theirs
