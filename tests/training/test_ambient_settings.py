"""Defaults of torch that the user sets around a program do not change any bit."""

import contextlib

import golden
import pytest
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import hooks, optim

STEPS = 3


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    """Also fills memory that is not initialised with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENT = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
}
OPTIMIZERS = {
    "adamw": lambda params: optim.FusedAdamW(params, lr=1e-2, states="8bit"),
    "amsgrad": lambda params: optim.FusedAdam(params, lr=1e-2, amsgrad=True),
    "lion": lambda params: optim.FusedLion(params, lr=1e-2, states="8bit"),
    "lamb": lambda params: optim.FusedLAMB(params, lr=1e-2, states="8bit"),
    "half": lambda params: optim.FusedAdamW(params, lr=1e-2, states="bf16"),
    "sgd": lambda params: optim.FusedSGD(params, lr=1e-2, momentum=0.9),
}


def make_model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(dtype)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / 8
        parameter.data.copy_(values)
    return model


def make_inputs(rank=0):
    generator = torch.Generator().manual_seed(rank + 1)
    shape = (STEPS, 16, 80)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def values_of(model, *others):
    """Everything that lasts: parameters, buffers and what checkpoints hold."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in others:
        tensors += [x for x in torch.utils._pytree.tree_leaves(state) if torch.is_tensor(x)]
    return [x.detach().clone() for x in tensors]


def check_same(make):
    """Compares the tensors that `make(ambient)` returns with those of each ambient setting."""
    expected = make(contextlib.nullcontext)
    for name, ambient in AMBIENT.items():
        got = make(ambient)
        assert len(got) == len(expected)
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert one.dtype == other.dtype, (name, index)
            assert golden.same_bits(one, other), (name, index)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_checkpoints_of_optimizers(name, flat):
    def make(ambient):
        model, inputs = make_model(torch.bfloat16), make_inputs().bfloat16()
        if flat:
            optim.flatten(model.parameters())
        with ambient():
            optimizer = OPTIMIZERS[name](model.parameters())
            for batch in inputs:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                again = OPTIMIZERS[name](model.parameters())
                again.load_state_dict(optimizer.state_dict())
                optimizer = again
            return values_of(model, optimizer.state_dict()["state"])

    check_same(make)


WRAPPERS = {
    "plain": dict,
    "int8": lambda: {"compression": pycomm.Int8(128)},
    "topk": lambda: {"compression": pycomm.TopK(0.1, values=torch.int8)},
    "scaler": lambda: {
        "compression": pycomm.TopK(0.1),
        "grad_scaler": pycomm.optim.GradScaler("cpu", init_scale=4.0),
    },
    "optimizer": lambda: {"shard": "optimizer", "compression": pycomm.Int8(128)},
    "gradients": lambda: {"shard": "gradients"},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(world, name):
    def train(group, ambient):
        model, inputs = make_model(), make_inputs(group.rank)
        with ambient():
            wrapper = data_parallel(model, group=group, **WRAPPERS[name]())
            optimizer = optim.FusedAdamW(wrapper.parameters(), lr=1e-2, states="8bit")
            for batch in inputs:
                wrapper(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            residuals = wrapper.comm_state.state_dict()
            return values_of(model, optimizer.state_dict()["state"], residuals)

    def make(ambient):
        # The default dtype is the process's, so that it is set around the ranks, too.
        with ambient():
            return [x for rank in world(2).run(train, ambient) for x in rank]

    check_same(make)


OUTER = {
    "mean": {},
    "momentum": {"outer_lr": 0.7, "outer_momentum": 0.9, "compression": pycomm.Int8(128)},
    "local residuals": {"compression": pycomm.TopK(0.1), "local_residuals": True},
}


@pytest.mark.parametrize("options", OUTER.values(), ids=OUTER)
def test_local_sgd(world, options):
    def train(group, ambient):
        model, inputs = make_model(), make_inputs(group.rank)
        with ambient():
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            state = hooks.LocalSGDState(
                model.named_parameters(), optimizer, period=2, group=group, **options
            )
            wrapper = pycomm.DataParallel(model, state=state)
            for batch in inputs:
                wrapper(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step()
            return values_of(model, state.state_dict())

    def make(ambient):
        with ambient():
            return [x for rank in world(2).run(train, ambient) for x in rank]

    check_same(make)
