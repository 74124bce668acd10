"""Properties of optimizer steps that hold for any numbers."""

import math

import golden
import numpy as np
import pytest
import torch
from golden_optim import BLOCK
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import pycomm.optim as optim
from pycomm.optim import _storage

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    values=arrays.arrays(np.float32, st.integers(1, 600), elements=FLOATS),
    squares=st.booleans(),
)
@settings(max_examples=150)
def test_error_of_codes(values, squares):
    """The bounds of docs/how-to/optimizers.md."""
    values = np.abs(values) if squares else values
    name = "exp_avg_sq" if squares else "exp_avg"
    state = _storage.from_fp32(torch.from_numpy(values), name, torch.uint8)
    got = _storage.to_fp32(state, name).numpy().astype(np.float64)
    for begin in range(0, len(values), BLOCK):
        x = values[begin : begin + BLOCK].astype(np.float64)
        decoded = got[begin : begin + BLOCK]
        most = np.abs(x).max()
        if most < np.finfo(np.float32).tiny:
            assert not decoded.any()
            continue
        slack = 1 + 1e-5
        if squares:
            y = (x / most) ** 0.25
            limit = np.where(y < 1 / 255, 1 / 255**2, y / 255 + 1 / 510**2) * slack
            assert (np.abs(np.sqrt(decoded) - np.sqrt(x)) <= limit * math.sqrt(most) + 1e-22).all()
            alive = x >= np.finfo(np.float32).tiny
            assert (state[f"{name}_code"].numpy()[begin : begin + BLOCK][alive] > 0).all()
        else:
            limit = np.sqrt(np.abs(x) / most) / 127 + 1 / 254**2
            assert (np.abs(decoded - x) <= limit * most * slack + 1e-44).all()
            assert (np.sign(decoded) * np.sign(x) >= 0).all()
    again = _storage.from_fp32(torch.from_numpy(got.astype(np.float32)), name, torch.uint8)
    for key in (f"{name}_code", _storage.scale_name(name)):
        assert golden.same_bits(again[key], state[key])


@given(values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32)))
@settings(max_examples=150)
def test_split_and_join(values):
    weights = torch.from_numpy(values)
    param, remainder = _storage.split(weights)
    joined = _storage.joined(param, {"remainder": remainder})
    nan = weights.isnan()
    assert golden.same_bits(joined[~nan], weights[~nan])
    assert joined[nan].isnan().all()
    assert param[nan].isnan().all()


@given(power=st.integers(-20, 20), max_norm=st.sampled_from([None, 0.5]))
@settings(max_examples=30)
def test_a_power_of_two_as_scale_changes_no_bit(power, max_norm):
    seen = []
    for scale in (1.0, 2.0**power):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 2000))
        optimizer = optim.FusedLAMB([param], max_norm=max_norm)
        optimizer.grad_scale = torch.tensor(scale)
        param.grad = torch.linspace(-3, 2, 2000) * scale
        optimizer.step()
        seen.append(param)
    assert golden.same_bits(*seen)


@given(count=st.integers(0, 5000), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_norm(count, seed):
    """To double's rounding, over any tensors; 1e-12 is far more than it needs."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (count, 7, 1024)]
    optimizer = optim.FusedSGD(params, max_norm=1.0)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e20
    optimizer.step()
    expected = math.sqrt(math.fsum(x * x for p in params for x in p.grad.tolist()))
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-12)
    moved = math.sqrt(math.fsum(x * x for p in params for x in p.detach().tolist()))
    assert moved == pytest.approx(1e-3, rel=1e-5)
