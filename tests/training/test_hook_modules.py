"""Hooks under modules that change how backward runs: checkpointed ones and compiled ones."""

import ddp
import golden
import helpers
import pytest
import sweep
import torch
from ddp import COMPRESSIONS, Reference, Watched
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pycomm import hooks


class Checkpointed(nn.Module):
    """Segments that run again in backward; reentrant ones have a backward of their own."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(80, 80) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self.reentrant)
        return x


def train(group, module, name, layout, wrap=None):
    """The steps, the parameters in the end, and how often buckets came."""
    watched = Watched(module, COMPRESSIONS[name], layout=layout)
    run = wrap(watched.model) if wrap else watched.model
    optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)
    width, seen = next(module.parameters()).shape[1], []
    for step in range(4):
        optimizer.zero_grad()
        x = ddp.batch(group.rank, step).repeat(1, width // 40).requires_grad_()
        seen.append(watched.backward(run(x).square().mean()))
        optimizer.step()
        assert watched.state.step == step + 1
    return seen, [p.detach() for p in watched.model.parameters()]


def checkpointed(group, name, reentrant, static):
    layout = {"bucket_cap_mb": 0.02, "static_graph": static}
    return train(group, Checkpointed(reentrant), name, layout)


def check(runs, name):
    Reference(2, COMPRESSIONS[name]).check([seen for seen, _ in runs])
    (_, mine), (_, others) = runs
    assert all(golden.same_bits(a, b) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_checkpointed(name, reentrant, static):
    runs = helpers.run_group(2, checkpointed, name, reentrant, static)
    check(runs, name)
    assert len(runs[0][0][-1].buckets) == 4


def compiled_inside(group, name):
    module = torch.compile(ddp.network(), backend="aot_eager")
    return train(group, module, name, {})


def compiled_outside(group, name):
    def wrap(model):
        return torch.compile(model, backend="aot_eager")

    return train(group, ddp.network(), name, {}, wrap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "body"), sweep.half_of(["int8", "topk"], [compiled_inside, compiled_outside])
)
def test_compiled(name, body):
    runs = helpers.run_group(2, body, name)
    check(runs, name)
    assert sorted(runs[0][0][0].local) == sorted(ddp.unprefixed(ddp.network()))


def test_names_are_the_users_own(world):
    """Whatever is wrapped around a module or around a part of it."""
    module = ddp.network()
    module[3] = torch.compile(module[3], backend="aot_eager")
    assert "3._orig_mod.weight" in dict(module.named_parameters())
    for prefix in ("", "module.", "_orig_mod.module.", "module._orig_mod."):
        named = [(prefix + name, p) for name, p in module.named_parameters()]
        state = hooks.Int8State(named, group=world(1).groups[0])
        assert state.residual("0.weight").shape == (200, 40)
        assert state.residual("3.weight").shape == (30, 200)


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.line = nn.Parameter(torch.ones(5))

    def forward(self, scale):
        return (self.wave * scale).abs().sum() + self.line.sum()


def with_complex_parameters(group):
    model = DistributedDataParallel(Complex())
    state = hooks.AllReduceState()
    state.register(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1.0, 2.0, 3.0]) * (group.rank + 1)).backward()
        expected = torch.tensor([1.5, 3.0, 4.5], dtype=torch.complex64)
        torch.testing.assert_close(model.module.wave.grad, expected)
    with pytest.raises(ValueError, match=r"real floats, got torch\.complex64 for wave"):
        hooks.Int8State(model.named_parameters())


def test_complex_parameters():
    """Uncompressed, as pairs of real numbers; compressions refuse them by name."""
    helpers.run_group(2, with_complex_parameters)
