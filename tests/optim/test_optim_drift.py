"""Moments and steps in narrow storage follow those in fp32, over thousands of steps."""

import pytest
import torch

import pycomm.optim as optim
from pycomm.optim import _storage

CHECKS = (1_000, 2_500, 5_000, 10_000)
SIZES = 4  # of gradients, a decade from the first to the last
COUNT = 8192
NARROW = ["bf16", "fp16", "8bit"]


@pytest.mark.parametrize("steps", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spike", [1.0, 1000.0], ids=["steady", "spike"])
@pytest.mark.parametrize("states", NARROW)
def test_second_moments_do_not_stall(states, spike, steps):
    """Rounded to nearest, they lose changes below half a unit; a step changes them by 1/1000."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(101, COUNT, generator=generator)
    gradients *= torch.logspace(-1, 0, SIZES).repeat(COUNT // SIZES)
    optimizer, params = beside_fp32(states, COUNT)
    for step in range(1, steps + 1):
        scale = spike if step == 10 else 1.0
        for param in params:
            param.grad = gradients[step % 101] * scale
        optimizer.step()
        if step in CHECKS:
            want, got = (_storage.to_fp32(optimizer.state[param], "exp_avg_sq") for param in params)
            ratio = got.view(-1, SIZES).mean(0) / want.view(-1, SIZES).mean(0)
            assert torch.allclose(ratio, torch.ones(SIZES), atol=0.05, rtol=0), f"step {step}"


DECADES = 6
ELEMENTS = 16_384  # of each decade


@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["constant", "random"])
@pytest.mark.parametrize("spike", [1.0, 100.0, 1000.0], ids=["steady", "100", "1000"])
@pytest.mark.parametrize("states", NARROW)
def test_steps_do_not_stall(states, spike, noise):
    """A spike's trace in m / sqrt(v) fades as in fp32, in blocks over five decades.

    Rounded to nearest, first moments stop where a step changes them by less than half a unit, and
    small ones stay zero. The mean over many elements shows the expectation.
    """
    generator = torch.Generator().manual_seed(0)
    count = DECADES * ELEMENTS
    sizes = torch.logspace(1 - DECADES, 0, DECADES).repeat(ELEMENTS)
    optimizer, params = beside_fp32(states, count)
    steps = []
    for step in range(1, 401):
        gradient = sizes * (1.0 + noise * torch.randn(count, generator=generator))
        for param in params:
            param.grad = gradient * (spike if step == 10 else 1.0)
        optimizer.step()
        if step > 300:
            steps.append([step_of(optimizer.state[param]) for param in params])
    want, got = (torch.stack(each).mean(0) for each in zip(*steps, strict=True))
    assert torch.allclose(got[0], want[0], rtol=0.03, atol=0), "first moments"
    # In 8 bits, small second moments are so coarse that the mean of 1 / sqrt(v) differs.
    precise = slice(4 if states == "8bit" else 0, None)
    assert torch.allclose(got[2, precise], want[2, precise], rtol=0.05, atol=0), "steps"
    # As roundings of m and v are independent, steps have the product of the expectations.
    together = [each[2] / (each[0] * each[1]) for each in (got, want)]
    assert torch.allclose(*together, rtol=0.02, atol=0), "independence"


def beside_fp32(states, count):
    """An optimizer of two parameters, with states in fp32 and with narrow ones."""
    params = [torch.nn.Parameter(torch.zeros(count)) for _ in range(2)]
    kinds = zip(params, ("fp32", states), strict=True)
    groups = [{"params": param, "states": kind} for param, kind in kinds]
    return optim.FusedAdamW(groups, lr=0.0), params


def step_of(state):
    """The means of m, 1 / sqrt(v) and m / sqrt(v) of each decade; shape [3, DECADES]."""
    first, second = (_storage.to_fp32(state, name) for name in ("exp_avg", "exp_avg_sq"))
    inverse = second.rsqrt()
    return torch.stack([x.view(-1, DECADES).mean(0) for x in (first, inverse, first * inverse)])
