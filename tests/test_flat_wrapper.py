"""Flat buffers under the wrapper: gradients stay in the window, and no bit changes."""

import copy
import functools

import ddp
import golden
import helpers
import optimizing
import pytest
import torch
import wrapped
from torch import nn
from wrapped import TINY

import pycomm
import pycomm.optim as optim
from pycomm._flat import ALIGN, home_of


class Varied(nn.Module):
    """Two types, channels last, tied, frozen, never used, empty and scalar parameters.

    Backward meets the layers in an order that is not the one of their definition.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.late = nn.Linear(8, 5)
        self.convolution = nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.narrow = nn.Linear(8, 70, bias=False).bfloat16()
        self.wide = nn.Linear(70, 80).bfloat16()

    def forward(self, x):
        x = x.view(-1, 2, 4, 5).to(memory_format=torch.channels_last)
        x = self.convolution(x).mean((2, 3))
        x = self.frozen(self.tied(self.inner(x).relu())) * self.scalar + self.empty.sum()
        x = x + self.wide(self.narrow(x.bfloat16())).float()[:, :8]
        return self.late(x)


MODEL = Varied()  # drawn by one thread, as the random numbers are everyone's


def wrap(model, group, **options):
    return pycomm.DataParallel(model, group=group, **{"bucket_mb": TINY, **options})


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    wrapped.batch_loss(model, rank, step).backward()
    optimizer.step()


def not_flat(group, optimizer):
    model = wrap(copy.deepcopy(MODEL), group)
    return model, optimizer(model.parameters())


def wrap_and_flatten(group, optimizer, **options):
    model = wrap(copy.deepcopy(MODEL), group, **options)
    optim.flatten(model.parameters())
    return model, optimizer(model.parameters())


def flatten_and_wrap(group, optimizer):
    module = copy.deepcopy(MODEL)
    optim.flatten(module.parameters())
    model = wrap(module, group)
    return model, optimizer(model.parameters())


def flatten_later(group, optimizer):
    """After the first backward, which has laid the buckets out anew."""
    model = wrap(copy.deepcopy(MODEL), group)
    wrapped.batch_loss(model, group.rank, 0).backward()
    optim.flatten(model.parameters())
    return model, optimizer(model.parameters())


def flatten_in_parts(group, optimizer):
    model = wrap(copy.deepcopy(MODEL), group)
    for part in model.module.children():
        optim.flatten(p for p in part.parameters() if home_of(p) is None)
    optim.flatten([model.module.empty, model.module.scalar])
    return model, optimizer(model.parameters())


WAYS = {
    "wrap, flatten": wrap_and_flatten,
    "wrap, flatten, one bucket": functools.partial(wrap_and_flatten, bucket_mb=25),
    "flatten, wrap": flatten_and_wrap,
    "wrap, backward, flatten": flatten_later,
    "wrap, flatten in parts": flatten_in_parts,
}


def trained(group, make, optimizer, steps=3):
    """Parameters, gradients and states in the end."""
    model, optimizer = make(group, optimizer)
    places = []
    for step in range(steps):
        step_of(model, optimizer, group.rank, step)
        if make is not not_flat:
            places.append([check_place(p, group, optimizer) for p in model.parameters()])
    assert all(place == places[0] for place in places)
    states = {
        f"{name}.{key}": optimizer.state[p][key]
        for name, p in ddp.unprefixed(model).items()
        for key in optimizer.state.get(p, ())
    }
    return {**wrapped.parameters_of(model), **states}, wrapped.gradients_of(model)


def is_fused(optimizer):
    return not type(optimizer).__module__.startswith("torch.")


def check_place(parameter, group, optimizer):
    """Parameter, gradient and states at the same offset; returns where the gradient lies."""
    home = home_of(parameter)
    if home is None:
        assert not parameter.requires_grad
        return None
    assert home.offset % ALIGN == 0
    if parameter.grad is None or not parameter.numel():
        return None
    for key, state in optimizer.state[parameter].items():
        if state.shape == parameter.shape and key != "step" and is_fused(optimizer):
            assert state.storage_offset() == home.offset
    address = parameter.grad.data_ptr()
    assert address == home.piece.gradients.data_ptr() + home.offset * parameter.itemsize
    place = group._core.offset_of(address)
    assert place >= 0
    return place


CASES = [
    *[functools.partial(make, lr=0.01) for make in optimizing.OPTIMIZERS.values()],
    functools.partial(optim.FusedSGD, lr=0.01, momentum=0.9),
    functools.partial(optim.FusedAdamW, master_weights="remainder", states="8bit", max_norm=0.5),
    functools.partial(optim.FusedAdamW, states="bf16", stochastic_rounding=True, amsgrad=True),
    functools.partial(optim.FusedLAMB, master_weights="fp32"),
    functools.partial(torch.optim.AdamW, lr=0.01),
]


def every_way(group):
    """Each optimizer in each way, beside the one that is not flat."""
    ends = []
    for optimizer in CASES:
        expected = trained(group, not_flat, optimizer)
        for make in WAYS.values():
            for got, wanted in zip(trained(group, make, optimizer), expected, strict=True):
                assert wrapped.same(got, wanted)
        ends.append(expected[0])
    return ends


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_optimizer_steps_to_the_same_bits(world, size):
    """Flat or not, in every order of wrapping and flattening, in processes and threads."""
    runs = helpers.run_group(size, every_way) + world(size).run(every_way)
    for run in runs[1:]:
        assert all(
            golden.same_bits(a[name], b[name])
            for a, b in zip(run, runs[0], strict=True)
            for name in a
        )
