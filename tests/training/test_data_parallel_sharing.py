"""Which parameters a pycomm.DataParallel averages: its own, as they were when it was made."""

import contextlib
import copy
import gc
import weakref

import ddp
import helpers
import pytest
import torch
import wrapped
from torch import nn
from torch.nn.utils import prune
from wrapped import TINY

import pycomm
import pycomm.optim as optim


def network():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh())


NETWORK = network()  # drawn by one thread, as the random numbers are everyone's


def wrap(module, group, **options):
    return pycomm.DataParallel(module, bucket_cap_mb=TINY, group=group, **options)


def check_steps(group, model, alone, steps=range(3), loss=wrapped.batch_loss):
    for step in steps:
        model.zero_grad()
        loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, loss)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def refused(name):
    return pytest.raises(ValueError, match=f"'{name}'.* made later")


def wrapped_anew(group, flat):
    """The old wrapper lives on, but does nothing any more, and says so."""
    module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
    old = wrap(module, group)
    if flat:
        optim.flatten(module.parameters())
    check_steps(group, old, alone, range(2))
    loss = wrapped.batch_loss(old, group.rank, 2)
    new = wrap(module, group)
    check_steps(group, new, alone)
    with refused("0.weight"):
        wrapped.batch_loss(old, group.rank, 0)
    with refused("0.weight"):
        loss.backward()
    with torch.no_grad():
        assert torch.equal(*(wrapped.batch_loss(m, group.rank, 0) for m in (old, new)))
    check_steps(group, new, alone)


def two_heads(group, flat):
    """A wrapper for each head over a common trunk; one for all of them works."""
    trunk, heads = copy.deepcopy(NETWORK), [nn.Linear(40, 5, bias=False) for _ in range(2)]
    if flat:
        optim.flatten(trunk.parameters())
    first, second = (wrap(nn.Sequential(trunk, head), group) for head in heads)
    with refused("0.0.weight"):
        wrapped.batch_loss(first, group.rank, 0)
    check_steps(group, second, copy.deepcopy(second.module))
    assert first.module[1].weight.grad is None
    both = wrap(Heads(trunk, heads), group)
    check_steps(group, both, copy.deepcopy(both.module))


class Heads(nn.Module):
    def __init__(self, trunk, heads):
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x):
        x = self.trunk(x)
        return torch.cat([head(x) for head in self.heads], 1)


def nested(group, flat):
    inner = wrap(copy.deepcopy(NETWORK), group)
    outer = wrap(nn.Sequential(nn.Linear(40, 40), inner), group)
    if flat:
        optim.flatten(outer.parameters())
    with refused("0.weight"):
        wrapped.batch_loss(outer, group.rank, 0)
    outer.module[1] = inner.module
    check_steps(group, outer, copy.deepcopy(outer.module))


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("body", [wrapped_anew, two_heads, nested])
def test_the_last_wrapper_averages_and_the_others_refuse(world, body, flat):
    world(2).run(body, flat)
    helpers.run_group(2, body, flat)


def dropped(group):
    """A dropped wrapper is freed at once, without garbage collection, and blocks no other."""
    gc.disable()
    module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
    model = wrap(module, group)
    check_steps(group, model, alone)
    loss = wrapped.batch_loss(model, group.rank, 0)
    model = wrap(model.module, group)
    del loss
    check_steps(group, model, alone)
    for stage in ("optimizer", "gradients"):
        sharded = wrap(copy.deepcopy(NETWORK), group, shard=stage)
        wrapped.batch_loss(sharded, group.rank, 0).backward()
        memory = weakref.ref(sharded._own_exchange.strategy.shards.arena.untyped_storage())
        del sharded
        assert memory() is None, stage
    gc.enable()
    assert [len(p._post_accumulate_grad_hooks) for p in module.parameters()] == [1] * 4


def test_a_wrapper_that_is_gone_owns_nothing():
    helpers.run_group(2, dropped)


def test_a_wrapper_that_could_not_be_made_takes_nothing(world, monkeypatch):
    (group,) = world(1)
    model = wrap(copy.deepcopy(NETWORK), group)
    with monkeypatch.context() as patch:
        patch.setattr(pycomm.Group, "empty", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrap(model.module, group)
    check_steps(group, model, copy.deepcopy(NETWORK))


def replaced(module):
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def deleted_and_made(module):
    """At the same address, perhaps."""
    del module[0].weight
    module[0].weight = nn.Parameter(torch.ones(60, 40))


def assigned(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def normalised(module):
    nn.utils.parametrizations.weight_norm(module[0])


def new_head(module):
    del module[3]
    module.append(nn.Linear(40, 40, bias=False))


def thawed(module):
    module[1].scale.requires_grad_()


def trained(group):
    """A module with a frozen parameter, and its wrapper, which has made two steps."""
    module = copy.deepcopy(NETWORK)
    module[1].scale = nn.Parameter(torch.ones(3), requires_grad=False)
    model = wrap(module, group)
    check_steps(group, model, copy.deepcopy(module), range(2))
    return module, model


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replaced, "0.weight"),
        (deleted_and_made, "0.weight"),
        (assigned, "0.weight"),
        (normalised, "0.parametrizations.weight.original0"),
        (new_head, "3.weight"),
        (thawed, "1.scale"),
    ],
)
def test_parameters_that_came_later_are_refused(world, change, name):
    """Raises before anything is exchanged, on every rank; wrapped again, gradients are averaged."""

    def body(group):
        module, model = trained(group)
        change(module)
        for syncing in (contextlib.nullcontext(), model.no_sync()):
            with syncing, pytest.raises(ValueError, match=f"{name!r} is new.*wrap it anew"):
                wrapped.batch_loss(model, group.rank, 0)
        with torch.no_grad():
            wrapped.batch_loss(model, group.rank, 0)
        check_steps(group, wrap(module, group), copy.deepcopy(module))

    world(2).run(body)


@pytest.mark.parametrize(("change", "name"), [(replaced, "0.weight"), (thawed, "1.scale")])
def test_they_are_refused_in_another_group_too(world, change, name):
    """Not silently left out of the averages."""

    def body(group):
        module, model = trained(group)
        change(module)
        group.should_commit()  # nobody shrinks the group while the other is in its last step
        model.regroup(group.shrink())
        with pytest.raises(ValueError, match=f"{name!r} is new.*wrap it anew"):
            wrapped.batch_loss(model, group.rank, 0)

    world(2).run(body)


def pruned(module):
    prune.random_unstructured(module[0], "weight", 0.0)


def another_activation(module):
    module[1] = nn.ReLU()


def another_frozen_parameter(module):
    module[1].scale = nn.Parameter(torch.ones(5), requires_grad=False)


def without_a_layer(module):
    del module[2:]


@pytest.mark.parametrize(
    "change", [pruned, another_activation, another_frozen_parameter, without_a_layer]
)
def test_a_module_may_change_around_its_parameters(world, change):
    def body(group):
        module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
        model = wrap(module, group)
        check_steps(group, model, alone, range(2))
        change(module)
        change(alone)
        check_steps(group, model, alone)
        module.register_parameter("late", nn.Parameter(torch.ones(2)))
        with pytest.raises(ValueError, match="'late' is new"):
            wrapped.batch_loss(model, group.rank, 0)

    world(2).run(body)


def test_another_module_in_the_wrapper(world):
    (group,) = world(1)
    model = wrap(copy.deepcopy(NETWORK), group)
    model.module = copy.deepcopy(NETWORK)
    with pytest.raises(ValueError, match=r"'0\.weight' is new"):
        wrapped.batch_loss(model, 0, 0)


def taken_gradients(module):
    """Gradients that a user keeps, with copies of their values."""
    return [(p.grad, p.grad.clone()) for p in module.parameters() if p.grad is not None]


def kept_gradients(group, flat):
    """In other memory when the next ones come, whether these are used, unused or accumulated."""
    module, alone = copy.deepcopy(NETWORK), copy.deepcopy(NETWORK)
    model = wrap(module, group)
    if flat:
        optim.flatten(module.parameters())
    taken = []
    check_steps(group, model, alone, range(1))
    for step in range(2):
        taken += taken_gradients(module)
        check_steps(group, model, alone, range(step + 1))
    taken += taken_gradients(module)
    model.zero_grad()
    module[0](model(ddp.batch(group.rank, 0))).sum().backward()
    taken += taken_gradients(module)
    model.zero_grad()
    model(ddp.batch(group.rank, 0))
    module[0](ddp.batch(group.rank, 0)).sum().backward()  # the second layer's become zeros
    taken += taken_gradients(module)
    model.zero_grad()
    with model.no_sync():
        wrapped.batch_loss(model, group.rank, 0).backward()
    taken += taken_gradients(module)
    check_steps(group, model, alone)
    assert all(torch.equal(kept, copied) for kept, copied in taken)
    places = {p.grad.data_ptr() for p in module.parameters()}
    assert all(kept.data_ptr() not in places for kept, _ in taken)
    assert all(group._core.offset_of(place) >= 0 for place in places)


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
def test_gradients_that_the_user_keeps_are_not_overwritten(world, flat):
    world(2).run(kept_gradients, flat)
    helpers.run_group(2, kept_gradients, flat)


def test_gradients_of_flattened_parameters_that_the_user_keeps():
    module = copy.deepcopy(NETWORK)
    optim.flatten(module.parameters())
    taken = []
    for step in range(3):
        module.zero_grad()
        wrapped.batch_loss(module, 0, step).backward()
        taken += taken_gradients(module)
    assert all(torch.equal(kept, copied) for kept, copied in taken)


class Two(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, both):
        x = torch.ones(1, 3)
        return self.first(x) + self.second(x) if both else self.first(x)


def used_in_no_sync_only(local):
    """A parameter that rank 0 has used under no_sync() only, and no rank in the exchange."""
    module = Two()
    model = pycomm.DataParallel(module, group=local)
    with model.no_sync():
        model(both=local.rank == 0).sum().backward()
    model(both=False).sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_a_gradient_of_no_sync_is_averaged_for_all_ranks():
    """Otherwise only some ranks would step the parameter."""
    with pycomm.LocalWorld(2) as world:
        for gradients in world.run(used_in_no_sync_only):
            assert [float(g.unique()) for g in gradients] == [2.0, 2.0, 0.5, 0.5]
