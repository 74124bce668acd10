"""Norms from the sums of the exchange: the bits of the optimizer's own pass."""

import contextlib
import ctypes
import math

import pytest
import torch
from torch import nn

import pycomm
from pycomm._training.square_sums import known_sums
from pycomm.optim import FusedAdamW

SIZES = ((1,), (3, 1024), (64, 65), (70_001,), (8, 3, 5, 7), (1023,), (0,), (41, 1000), (2049,))
HALF = (6, 8)  # the indices of those in bf16


class Ragged(nn.Module):
    """Parameters of odd sizes, one of them in channels last, whose gradients are given."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        tensors = [torch.randn(size, generator=generator) for size in SIZES]
        tensors[4] = tensors[4].contiguous(memory_format=torch.channels_last)
        for index in HALF:
            tensors[index] = tensors[index].bfloat16()
        self.tensors = nn.ParameterList(tensors)

    def forward(self, gradients):
        return sum((p.float() * g).sum() for p, g in zip(self.tensors, gradients, strict=True))


def draw(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def check_sums(gradient, address):
    """Compares sums with those of every 1,024 elements, in the order in which they lie."""
    units = gradient.as_strided((gradient.numel(),), (1,)).split(1024)
    squares = [float(unit.double().square().sum()) for unit in units if len(unit)]
    sums = [*(ctypes.c_double * len(squares)).from_address(address)]
    assert sums == pytest.approx(squares, rel=1e-12, nan_ok=True)


class Pair:
    """A wrapped model, and tensors that no wrapper knows, which take the same steps."""

    def __init__(self, group):
        self.rank = group.rank
        self.model = pycomm.DataParallel(Ragged(), group=group, bucket_cap_mb=0.25)
        self.parameters = list(self.model.parameters())
        self.alone = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.optimizers = [
            FusedAdamW(params, max_norm=0.5, lr=0.01) for params in (self.parameters, self.alone)
        ]
        self.norms = []

    def backward(self, step, change=None, sync=True):
        gradients = draw(self.rank, step)
        if change is not None:
            change(gradients)
        with contextlib.nullcontext() if sync else self.model.no_sync():
            self.model(gradients).backward()

    def step(self, unknown=(), stale=()):
        """Takes a step.

        The sums of `unknown` gradients (None: of all) must be missing, those of `stale` ones may be
        wrong, and all others right.
        """
        with_gradient = [p for p in self.parameters if p.grad is not None]
        known, _ = known_sums(with_gradient, [p.grad for p in with_gradient])
        missing = [i for i, address in enumerate(known) if not address]
        assert missing == ([*range(len(known))] if unknown is None else list(unknown))
        for index, address in enumerate(known):
            if address and index not in stale:
                check_sums(with_gradient[index].grad, address)
        for parameter, twin in zip(self.parameters, self.alone, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        own, other = (optimizer.grad_norm for optimizer in self.optimizers)
        assert own.view(torch.int64) == other.view(torch.int64)
        for parameter, twin in zip(self.parameters, self.alone, strict=True):
            assert torch.equal(parameter, twin)
        self.norms.append(float(own))
        self.model.zero_grad()

    def settle(self):
        """Takes the steps before exchanges make sums, which an optimizer must have wanted."""
        for step in range(2):
            self.backward(step)
            self.step(unknown=None)


def run(group, program):
    pair = Pair(group)
    pair.settle()
    program(pair)
    return pair.norms


def plain(pair):
    for step in range(2, 5):
        pair.backward(step)
        pair.step()


def changed(pair):
    def scale(p):
        p.grad.mul_(2)

    def replace(p):
        p.grad = p.grad * 2

    for index, change in ((3, scale), (1, replace), (7, lambda p: p.grad.zero_())):
        pair.backward(index)
        change(pair.parameters[index])
        pair.step(unknown=[index])
    pair.backward(10)
    pair.parameters[3].grad.data.mul_(2)  # which torch does not count
    pair.step(stale=[3])
    pair.backward(11)
    pair.parameters[2].grad = None
    pair.step()


def accumulated(pair):
    for step in range(2, 8, 2):
        pair.backward(step, sync=False)
        pair.backward(step + 1)
        pair.step()
    pair.backward(8)
    pair.backward(9, sync=False)  # adds to what the exchange has left
    pair.step(unknown=None)
    pair.norms.pop()  # each rank's own
    for step in (12, 14):  # the last exchange before the step makes sums
        pair.backward(step)
        pair.backward(step + 1)
        pair.step()


def nonfinite(pair):
    for step, value in ((2, math.inf), (3, math.nan)):

        def change(gradients, value=value):
            gradients[3][60_000] = value if pair.rank == 0 else 1.0

        before = [p.detach().clone() for p in pair.parameters]
        for optimizer in pair.optimizers:
            optimizer.grad_scale = torch.tensor(8.0)
        pair.backward(step, change)
        pair.step()
        assert all(map(torch.equal, before, pair.parameters))
        assert not math.isfinite(pair.norms.pop())
    pair.backward(5)
    pair.step()
    assert math.isfinite(pair.norms[-1])


@pytest.mark.parametrize("program", [plain, changed, accumulated, nonfinite])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_norms_have_the_bits_of_the_optimizers_own_pass(ranks, program):
    norms = pycomm.LocalWorld(ranks).run(lambda group: run(group, program))
    assert all(of_rank == norms[0] for of_rank in norms)


def test_the_sums_are_those_of_the_mean():
    """Against float64, without any code of the optimizer."""
    norms = pycomm.LocalWorld(2).run(lambda group: run(group, plain))
    for step, norm in enumerate(norms[0]):
        squares = 0.0
        for index, (a, b) in enumerate(zip(draw(0, step), draw(1, step), strict=True)):
            a, b = (x.bfloat16() if index in HALF else x for x in (a, b))
            mean = ((a.float() + b.float()) / 2).to(a.dtype)
            squares += mean.double().square().sum().item()
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_one_rank_alone_makes_no_sums():
    def alone(group):
        pair = Pair(group)
        for step in range(4):
            pair.backward(step)
            pair.step(unknown=None)

    pycomm.LocalWorld(1).run(alone)


def test_ranks_make_sums_if_any_optimizer_wants_them():
    def disagree(group):
        model = pycomm.DataParallel(Ragged(), group=group)
        bound = 0.5 if group.rank == 0 else None
        optimizer = FusedAdamW(model.parameters(), max_norm=bound, lr=0.0)
        made = []
        for step in range(6):
            optimizer.max_norm = bound if step < 3 else None
            model.zero_grad()
            model(draw(group.rank, step)).backward()
            made.append(bool(model._exchange._sums._measured))
            optimizer.step()
        return made

    # A step asks; the next exchange tells all ranks, and the one after it makes sums.
    assert pycomm.LocalWorld(2).run(disagree) == [[False, False, True, True, True, False]] * 2
