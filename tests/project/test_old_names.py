"""Arguments that have a new name: the old one still works, and warns its caller."""

import pytest
import torch

import pycomm


def local_sgd(**options):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    with pycomm.LocalWorld(1) as world:
        return pycomm.hooks.LocalSGDState(
            net.named_parameters(), optimizer, period=2, group=world.groups[0], **options
        )


def state(**options):
    with pycomm.LocalWorld(1) as world:
        return pycomm.hooks.CommState(group=world.groups[0], **options)


def compressed(**options):
    """The result for an element that 8 bits cannot represent."""
    with pycomm.LocalWorld(1) as world:
        x = torch.tensor([100.0, 0.1])
        options = options or {"compression": pycomm.Identity()}
        return pycomm.compressed_all_reduce(x, group=world.groups[0], **options)


def wrapper(**options):
    with pycomm.LocalWorld(1) as world:
        return pycomm.DataParallel(torch.nn.Linear(2, 2), group=world.groups[0], **options)


OLD_NAMES = [
    (lambda **options: pycomm.TopK(0.1, **options), "warmup_steps", "density_steps", 3),
    (lambda **options: pycomm.LocalWorld(2, **options), "hosts", "nodes", [1, 1]),
    (wrapper, "bucket_mb", "bucket_cap_mb", 3.0),
    (local_sgd, "warmup_steps", "gradient_steps", 3),
    (state, "compressor", "compression", pycomm.Int8()),
    (compressed, "compressor", "compression", pycomm.Int8()),
]


def seen(made):
    """The visible effect of the argument."""
    if isinstance(made, pycomm.TopK):
        return made
    if isinstance(made, pycomm.LocalWorld):
        return made.groups[0].nodes
    if isinstance(made, pycomm.hooks.CommState):
        return made.compression
    if isinstance(made, torch.Tensor):
        return made.tolist()
    return made._bucket_bytes if isinstance(made, pycomm.DataParallel) else made._gradient_steps


@pytest.mark.parametrize(("make", "old", "new", "value"), OLD_NAMES)
def test_old_name(make, old, new, value):
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        made = make(**{old: value})
    assert seen(made) == seen(make(**{new: value})) != seen(make())


@pytest.mark.parametrize(("make", "old", "new", "value"), OLD_NAMES)
def test_both_names(make, old, new, value):
    warned = pytest.warns(DeprecationWarning, match=old)
    with warned, pytest.raises(TypeError, match=f"{new} and {old}"):
        make(**{old: value, new: value})


def test_it_warns_who_calls():
    with pytest.warns(DeprecationWarning, match="warmup_steps") as top_k:
        pycomm.TopK(0.1, warmup_steps=3)
    with pytest.warns(DeprecationWarning, match="hosts") as world:
        pycomm.LocalWorld(2, hosts=[1, 1])
    with pytest.warns(DeprecationWarning, match="compressor") as made:
        state(compressor=pycomm.Int8())
    with pytest.warns(DeprecationWarning, match="compressor") as called:
        compressed(compressor=pycomm.Int8())
    warnings = (*top_k, *world, *made, *called)
    assert {warning.filename for warning in warnings} == {__file__}


def test_old_attribute():
    group = pycomm.LocalWorld(3, nodes=[2, 1]).groups[0]
    with pytest.warns(DeprecationWarning, match="hosts is called nodes now"):
        assert group.hosts == group.nodes == ((0, 1), (2,))
    made = state(compression=pycomm.Int8())
    with pytest.warns(DeprecationWarning, match="compressor is called compression now"):
        assert made.compressor is made.compression


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (pycomm, "Compressor", "Compression"),
        (pycomm, "parse_compressor", "parse_compression"),
        (pycomm.compression, "Compressor", "Compression"),
    ],
)
def test_old_name_in_a_module(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now") as warned:
        assert getattr(module, old) is getattr(module, new)
    assert warned[0].filename == __file__
    assert old not in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
