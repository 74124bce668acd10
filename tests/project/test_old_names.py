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


def wrapper(**options):
    with pycomm.LocalWorld(1) as world:
        return pycomm.DataParallel(torch.nn.Linear(2, 2), group=world.groups[0], **options)


OLD_NAMES = [
    (lambda **options: pycomm.TopK(0.1, **options), "warmup_steps", "density_steps", 3),
    (lambda **options: pycomm.LocalWorld(2, **options), "hosts", "nodes", [1, 1]),
    (wrapper, "bucket_mb", "bucket_cap_mb", 3.0),
    (local_sgd, "warmup_steps", "gradient_steps", 3),
]


def seen(made):
    """What the argument has done."""
    if isinstance(made, pycomm.TopK):
        return made
    if isinstance(made, pycomm.LocalWorld):
        return made.groups[0].nodes
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
    with pytest.warns(DeprecationWarning, match="warmup_steps") as compressor:
        pycomm.TopK(0.1, warmup_steps=3)
    with pytest.warns(DeprecationWarning, match="hosts") as world:
        pycomm.LocalWorld(2, hosts=[1, 1])
    assert {warning.filename for warning in (*compressor, *world)} == {__file__}


def test_old_attribute():
    group = pycomm.LocalWorld(3, nodes=[2, 1]).groups[0]
    with pytest.warns(DeprecationWarning, match="hosts is called nodes now"):
        assert group.hosts == group.nodes == ((0, 1), (2,))
