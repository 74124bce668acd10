"""Dropped gradients: `undo_exchange()` takes back what their exchange has left to send."""

import copy
import functools

import ddp
import helpers
import pytest
import torch
import wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

COMPRESSIONS = {
    "topk": pycomm.TopK(0.05),
    "momentum": pycomm.TopK(0.05, momentum=0.5),
    "int8": pycomm.Int8(block=128),
}
RANKS = 2
NETWORK = ddp.network()
LAYERS = nn.Linear(64, 64), nn.Linear(64, 64)


def on_ranks(body, nodes=None):
    with pycomm.LocalWorld(RANKS, nodes=nodes) as ranks:
        return ranks.run(body)


def train(group, compression, discards=(), wrap=None, first_call=0, steps=8):
    """Trains; before the steps in `discards`, another batch's gradients are dropped."""
    if wrap is None:
        model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=compression, group=group)
        state = model.comm_state
    else:
        model, state = wrap(group, compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        if step == first_call:
            state.undo_exchange()
        if step in discards:
            (100 * wrapped.batch_loss(model, group.rank, 1000 + step)).backward()
            state.undo_exchange()
            state.undo_exchange()  # changes nothing
            optimizer.zero_grad()
        wrapped.batch_loss(model, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.parameters_of(model), state.state_dict()["kept"][str(group.rank)]


def same_training(one, other):
    parameters, residuals = zip(one, other, strict=True)
    return wrapped.same(*parameters) and all(
        wrapped.same(residuals[0][kind], residuals[1][kind]) for kind in residuals[0]
    )


@pytest.mark.parametrize("nodes", [None, (1, 1)], ids=["node", "nodes"])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_training_goes_on_as_without_them(name, nodes):
    trained = functools.partial(train, compression=COMPRESSIONS[name])
    plain = on_ranks(trained, nodes)
    discarded = on_ranks(functools.partial(trained, discards=(0, 3, 4, 7)), nodes)
    for rank in range(RANKS):
        assert same_training(discarded[rank], plain[rank])
        assert any(bool(r.any()) for r in plain[rank][1]["residual"].values())


@pytest.mark.parametrize("first", ["before wrapping", "before training"])
def test_compressed_shards_between_nodes(first):
    def body(group):
        net = copy.deepcopy(NETWORK)
        state = hooks.Int8State(net.named_parameters(), group=group)
        if first == "before wrapping":
            state.undo_exchange()
        shard = pycomm.Sharding("optimizer", publish=pycomm.Int8())
        model = pycomm.DataParallel(net, state=state, shard=shard)
        if first == "before training":
            state.undo_exchange()
        seen = []
        for step in range(2):
            wrapped.batch_loss(model, group.rank, step).backward()
            seen.append(state.state_dict()["kept"][str(group.rank)]["residual"])
            model.zero_grad()
        state.undo_exchange()
        return *seen, state.state_dict()["kept"][str(group.rank)]["residual"]

    for before, exchanged, undone in on_ranks(body, (1, 1)):
        assert wrapped.same(undone, before)
        assert not all(torch.equal(exchanged[name], before[name]) for name in before)


def with_hook(_group, compression):
    model = DistributedDataParallel(copy.deepcopy(NETWORK))
    state = hooks.CommState(compression, model.named_parameters())
    state.register(model)
    return model, state


def compare_hooks(group):
    trained = functools.partial(train, group, COMPRESSIONS["topk"], wrap=with_hook)
    assert same_training(trained(discards=(0, 3, 4, 7)), trained())


def test_hooks_of_ddp():
    helpers.run_group(RANKS, compare_hooks)


def norms(group, first_call):
    """Residuals' norms before and after a first call after some steps."""
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=pycomm.TopK(0.05), group=group)
    for step in range(3):
        if step == first_call:
            model.comm_state.undo_exchange()
        wrapped.batch_loss(model, group.rank, step).backward()
    before = model.comm_state.stats()["residual_norm"]
    model.comm_state.undo_exchange()
    return before, model.comm_state.stats()["residual_norm"]


def test_without_copies_residuals_become_zero():
    assert all(before > 0 == after for before, after in on_ranks(lambda g: norms(g, None)))
    assert all(before > after > 0 for before, after in on_ranks(lambda g: norms(g, 1)))


def loaded(group):
    """A first call after loading, and before an exchange, changes nothing."""
    make = functools.partial(pycomm.DataParallel, compression=pycomm.TopK(0.05), group=group)
    model, other = make(copy.deepcopy(NETWORK)), make(copy.deepcopy(NETWORK))
    wrapped.batch_loss(model, group.rank, 0).backward()
    other.comm_state.load_state_dict(model.comm_state.state_dict())
    other.comm_state.undo_exchange()
    norms = [each.comm_state.stats()["residual_norm"] for each in (model, other)]
    assert norms[0] == norms[1] > 0


def test_residuals_from_a_checkpoint_stay():
    on_ranks(loaded)


def adversarial(group, compression):
    """A generator and a discriminator; the generator's backward leaves gradients in both."""
    wrap = functools.partial(pycomm.DataParallel, group=group, compression=compression)
    generator, discriminator = (wrap(copy.deepcopy(layer)) for layer in LAYERS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
    seen = []
    for step in range(6):
        noise = ddp.batch(group.rank, step)[:, :1] * torch.ones(64)
        optimizers[0].zero_grad()
        discriminator.comm_state.undo_exchange() if step == 0 else None
        discriminator(generator(noise)).mean().backward()
        optimizers[0].step()
        discriminator.comm_state.undo_exchange()
        optimizers[1].zero_grad()
        discriminator(noise).square().mean().backward()
        optimizers[1].step()
        seen.append((noise, wrapped.parameters_of(discriminator)))
    return seen


def alone(group, compression, seen):
    """The discriminator without a generator."""
    model = pycomm.DataParallel(copy.deepcopy(LAYERS[1]), group=group, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for noise, parameters in seen[group.rank]:
        optimizer.zero_grad()
        model(noise).square().mean().backward()
        optimizer.step()
        assert wrapped.same(wrapped.parameters_of(model), parameters)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_discriminator_does_not_learn_from_the_generators_loss(name):
    compression = COMPRESSIONS[name]
    seen = on_ranks(functools.partial(adversarial, compression=compression))
    on_ranks(functools.partial(alone, compression=compression, seen=seen))
