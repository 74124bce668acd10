"""Second moments in narrow storage follow those in fp32, over thousands of steps."""

import pytest
import torch

import pycomm.optim as optim
from pycomm.optim import _storage

CHECKS = (1_000, 2_500, 5_000, 10_000)
SIZES = 4  # of gradients, a decade from the first to the last
COUNT = 8192


@pytest.mark.parametrize("steps", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spike", [1.0, 1000.0], ids=["steady", "spike"])
@pytest.mark.parametrize("states", ["bf16", "fp16", "8bit"])
def test_second_moments_do_not_stall(states, spike, steps):
    """Rounded to nearest, they lose changes below half a unit; a step changes them by 1/1000."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(101, COUNT, generator=generator)
    gradients *= torch.logspace(-1, 0, SIZES).repeat(COUNT // SIZES)
    params = [torch.nn.Parameter(torch.zeros(COUNT)) for _ in range(2)]
    kinds = zip(params, ("fp32", states), strict=True)
    groups = [{"params": param, "states": kind} for param, kind in kinds]
    optimizer = optim.FusedAdamW(groups, lr=0.0)
    for step in range(1, steps + 1):
        scale = spike if step == 10 else 1.0
        for param in params:
            param.grad = gradients[step % 101] * scale
        optimizer.step()
        if step in CHECKS:
            want, got = (_storage.to_fp32(optimizer.state[param], "exp_avg_sq") for param in params)
            ratio = got.view(-1, SIZES).mean(0) / want.view(-1, SIZES).mean(0)
            assert torch.allclose(ratio, torch.ones(SIZES), atol=0.05, rtol=0), f"step {step}"
