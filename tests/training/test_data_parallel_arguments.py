"""Bad arguments of pycomm.DataParallel."""

import pytest
import torch
from torch import nn
from wrapping import data_parallel

import pycomm


def make(options):
    with pycomm.LocalWorld(1) as world:
        options = {"module": nn.Linear(3, 3), "group": world.groups[0], **options}
        return data_parallel(options.pop("module"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive, got 0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be positive, got nan"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"module": nn.ReLU()}, "must hold a parameter that requires grad"),
        ({"module": nn.Linear(2, 2).requires_grad_(False)}, "must hold a parameter that requires"),
        ({"compression": pycomm.TopK(0.1, momentum=0.5), "feedback": False}, "momentum"),
        (
            {"module": nn.Linear(2, 2, dtype=torch.complex64)},
            "params must be real floats",
        ),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        make(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": "linear"}, "module must be a torch.nn.Module, got str"),
        ({"compression": "int8"}, "compression must be"),
        ({"group": "world"}, "group must be a pycomm.Group or None, got 'world'"),
        ({"exclude": "bias"}, "exclude must be a function"),
        ({"grad_scaler": 2.0}, "grad_scaler must be a torch.amp.GradScaler, got 2.0"),
    ],
)
def test_bad_types(options, message):
    with pytest.raises(TypeError, match=message):
        make(options)
