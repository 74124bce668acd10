"""Writes to a parameter between steps take effect, with every kind of master weights."""

import copy

import golden
import pytest
import torch
from optimizing import Case, gradients, run, set_gradients

import pycomm.optim as optim

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    Case("adamw", dtype=BF16, master="remainder"),
    Case("adamw", dtype=BF16, master="fp32"),
    Case("sgd", dtype=FP16, master="fp32"),
]
EDITS = {
    "zero": lambda param: param.zero_(),
    "fill": lambda param: param.fill_(1.0),
    "clamp": lambda param: param.clamp_(-0.5, 0.5),
    "mask": lambda param: param.view(-1)[::3].zero_(),
    "copy": lambda param: param.copy_(torch.full_like(param, 0.75)),
    "detach": lambda param: param.detach().mul_(2.0),
}


def step(params, optimizer, number):
    set_gradients(params, gradients(params, number))
    optimizer.step()


@torch.no_grad()
def edit(params, how):
    for param in params:
        EDITS[how](param)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("how", EDITS)
def test_an_edit_counts(case, how):
    """The weights are those of an optimizer that has always had the edited values."""
    params, optimizer = run(case)
    before = [optimizer.full_weights(param).clone() for param in params]
    edit(params, how)
    expected = [param.detach().float() for param in params]
    if case.master == "fp32":  # elements that stayed what they were keep all their bits
        for param, old, new in zip(params, before, expected, strict=True):
            same = new == old.to(param.dtype)
            new[same] = old[same]
    assert all(map(torch.equal, map(optimizer.full_weights, params), expected))
    twins = [torch.nn.Parameter(weights.clone()) for weights in expected]
    plain = Case(case.name).make(twins)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("remainder", None), state.pop("master_param", None)
    plain.load_state_dict(saved)
    set_gradients(params, gradients(params, 9))
    set_gradients(twins, [param.grad.float() for param in params])
    optimizer.step()
    plain.step()
    for param, twin in zip(params, twins, strict=True):
        assert golden.same_bits(optimizer.full_weights(param), twin.detach())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("fresh", [False, True])
def test_restoring_in_either_order_keeps_every_bit(case, first, fresh):
    """Back to a checkpoint, or into a new model and optimizer; biases begin with zeros."""
    params, optimizer = run(case)
    saved = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
    step(params, optimizer, 3)
    expected = [optimizer.full_weights(param).clone() for param in params]
    if fresh:
        params = [torch.nn.Parameter(torch.zeros_like(param)) for param in params]
        optimizer = case.make(params)
    else:
        step(params, optimizer, 4)

    def restore(what):
        if what == "optimizer":
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        else:
            with torch.no_grad():
                for param, kept in zip(params, saved[0], strict=True):
                    param.copy_(kept)

    for what in sorted(("model", "optimizer"), key=lambda what: what != first):
        restore(what)
    step(params, optimizer, 3)
    for param, weights in zip(params, expected, strict=True):
        assert golden.same_bits(optimizer.full_weights(param), weights)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edits_outlive_checkpoints_and_copies(case):
    params, optimizer = run(case)
    edit(params, "fill")
    saved, (copies, copied) = optimizer.state_dict(), copy.deepcopy((params, optimizer))
    again = [torch.nn.Parameter(param.detach().clone()) for param in params]
    loaded = case.make(again)
    loaded.load_state_dict(copy.deepcopy(saved))
    for ours, made in ((copies, copied), (again, loaded)):
        for param, old in zip(ours, params, strict=True):
            assert torch.equal(made.full_weights(param), optimizer.full_weights(old))
            assert torch.equal(param, torch.ones_like(param))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_and_weights_that_are_set_are_no_edits(case):
    """Nor are steps that are skipped, or gradients that are missing."""
    params, optimizer = run(case)
    weights = [torch.linspace(-3, 3, param.numel()).view(param.shape) for param in params]
    for param, values in zip(params, weights, strict=True):
        optimizer.set_full_weights(param, values)
    optimizer.found_inf = torch.ones(())
    step(params, optimizer, 3)
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, map(optimizer.full_weights, params), weights))


def test_an_edit_through_data_is_within_half_a_unit():
    """pycomm cannot notice such an edit: the remainders still belong to the old weights."""
    params, optimizer = run(CASES[0])
    for param in params:
        param.data.fill_(3.0)
        assert ((optimizer.full_weights(param) - 3.0).abs() <= 2**-7).all()


def test_flat_parameters_and_new_memory_are_no_edits():
    weights = []
    for flat in (False, True):
        params, optimizer = run(CASES[0])
        if flat:
            optim.flatten(params)
        step(params, optimizer, 3)
        weights.append([optimizer.full_weights(param) for param in params])
    assert all(map(golden.same_bits, *weights))
