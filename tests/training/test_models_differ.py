"""Ranks with other models or options: all raise ValueError with the first difference."""

import pytest
import torch
from torch import nn
from wrapping import data_parallel

import pycomm
from pycomm import hooks


class Layers(nn.Module):
    """Linear layers with names."""

    def __init__(self, *names, width=4):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(width, width))


def other_format():
    return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


def other_buffer():
    model = nn.BatchNorm2d(4)
    model.running_mean = model.running_mean.double()
    return model


def frozen():
    model = Layers("a", "b")
    model.b.weight.requires_grad_(False)
    return model


def tied():
    model = Layers("a", "b")
    model.b.weight = model.a.weight
    return model


MODELS = {
    "format": (lambda: nn.Conv2d(3, 8, 3), other_format, "weight: .*(27, 1, 9, 3).*(27, 9, 3, 1)"),
    "order": (lambda: Layers("a", "b"), lambda: Layers("b", "a"), "b.weight: .* a.weight: "),
    "name": (lambda: Layers("a"), lambda: Layers("b"), "b.weight: .* a.weight: "),
    "dtype": (lambda: Layers("a"), lambda: Layers("a").bfloat16(), "bfloat16.*float32"),
    "shape": (lambda: Layers("a", width=4), lambda: Layers("a", width=2), r"\(2, 2\).*\(4, 4\)"),
    "buffer": (lambda: nn.BatchNorm2d(4), other_buffer, "running_mean: float64.*float32"),
    "frozen": (lambda: Layers("a", "b"), frozen, "b.weight: .*, frozen, but"),
    "tied": (lambda: Layers("a", "b"), tied, "has b.bias: .* b.weight: "),
    "more": (
        lambda: Layers("a"),
        lambda: Layers("a", "b"),
        "has b.weight: .*, but rank 0 has nothing",
    ),
    "less": (
        lambda: Layers("a", "b"),
        lambda: Layers("a"),
        "has nothing, but rank 0 has b.weight: ",
    ),
}
WRAPPERS = {
    "plain": lambda model, group: pycomm.DataParallel(model, group=group),
    "int8": lambda model, group: pycomm.DataParallel(model, group=group, compression=pycomm.Int8()),
    "optimizer": lambda model, group: pycomm.DataParallel(model, group=group, shard="optimizer"),
    "gradients": lambda model, group: pycomm.DataParallel(model, group=group, shard="gradients"),
    "local SGD": lambda model, group: pycomm.DataParallel(
        model,
        state=hooks.LocalSGDState(
            model.named_parameters(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            period=2,
            group=group,
        ),
    ),
}
OPTIONS = {
    "bucket_cap_mb": ({"shard": "optimizer", "bucket_cap_mb": 1}, {"shard": "optimizer"}),
    "compression": ({"compression": pycomm.Int8()}, {"compression": pycomm.Int8(block=512)}),
    "feedback": (
        {"compression": pycomm.Int8(), "feedback": False},
        {"compression": pycomm.Int8()},
    ),
    "broadcast_buffers": ({"broadcast_buffers": False}, {}),
    "warmup_steps": (
        {"compression": pycomm.Int8(), "warmup_steps": 3},
        {"compression": pycomm.Int8()},
    ),
    "replicas": ({"shard": "optimizer", "replicas": 2}, {"shard": "optimizer"}),
    "a.weight: .*, compressed": (
        {"compression": pycomm.Int8(), "exclude": lambda name, _: name != "a.weight"},
        {"compression": pycomm.Int8()},
    ),
}


def check_refused(world, make, message):
    """Rank 1 differs: each rank's error names the difference, and the group still works."""

    def body(group):
        with pytest.raises(ValueError, match=message) as raised:
            make(group)
        pycomm.all_reduce(torch.ones(1), group=group)
        return str(raised.value)

    said = world(3).run(body)
    assert said[0].startswith("module and options must be the same on all ranks: rank 1 has ")
    assert len(set(said)) == 1


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_models(world, wrap, name):
    usual, other, message = MODELS[name]
    wrap = WRAPPERS[wrap]
    check_refused(
        world, lambda group: wrap(other() if group.rank == 1 else usual(), group), message
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_options(world, name):
    other, usual = OPTIONS[name]

    def make(group):
        options = other if group.rank == 1 else usual
        data_parallel(Layers("a"), group=group, **options)

    check_refused(world, make, f"rank 1 has {name}")


def test_what_does_not_matter(world):
    """Wrappers of torch around the module, and strides of dimensions with one element."""

    def body(group):
        model = nn.Conv2d(3, 8, 1)
        if group.rank == 1:
            model = model.to(memory_format=torch.channels_last)
            model.weight.data = model.weight.data.as_strided((8, 3, 1, 1), (3, 1, 5, 7))
        if group.rank == 2:
            model = torch.compile(model)
        pycomm.DataParallel(model, group=group)

    world(3).run(body)
