"""Backwards whose gradients are dropped without a step leave nothing in residuals."""

import copy
import functools

import ddp
import pytest
import torch
import wrapped
from torch import nn

import pycomm

COMPRESSIONS = {
    "topk": pycomm.TopK(0.05),
    "momentum": pycomm.TopK(0.05, momentum=0.5),
    "int8": pycomm.Int8(block=128),
}
RANKS = 2
NETWORK = ddp.network()


def on_ranks(body, nodes=None):
    with pycomm.LocalWorld(RANKS, nodes=nodes) as ranks:
        return ranks.run(body)


def set_to_zero(model):
    model.zero_grad(set_to_none=False)


def set_to_none(model):
    model.zero_grad()


def keep_and_drop(model):
    """Forgets gradients by hand."""
    for parameter in model.parameters():
        parameter.grad = None


def train(group, compression, discards=(), drop=set_to_none, steps=8, by_data=False, undo=True):
    """Trains; before the steps in `discards`, another batch's gradients are dropped.

    The gradients of step 0 are zero, so that residuals are zero in step 1.
    """
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=compression, group=group)
    model.comm_state.undo_dropped = undo
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        if step in discards:
            (100 * wrapped.batch_loss(model, group.rank, 1000 + step)).backward()
            drop(model)
        (min(step, 1) * wrapped.batch_loss(model, group.rank, step)).backward()
        if by_data:
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
        else:
            optimizer.step()
        drop(model)
    return wrapped.parameters_of(model), model.comm_state.state_dict()["kept"][str(group.rank)]


def same_training(one, other):
    parameters, residuals = zip(one, other, strict=True)
    return wrapped.same(*parameters) and all(
        wrapped.same(residuals[0][kind], residuals[1][kind]) for kind in residuals[0]
    )


@pytest.mark.parametrize("nodes", [None, (1, 1)], ids=["node", "nodes"])
@pytest.mark.parametrize("drop", [set_to_none, set_to_zero, keep_and_drop])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_training_goes_on_as_without_them(name, drop, nodes):
    """Residuals are zero when the first one comes, so that it is restored exactly, too."""
    trained = functools.partial(train, compression=COMPRESSIONS[name], drop=drop)
    plain = on_ranks(trained, nodes)
    discarded = on_ranks(functools.partial(trained, discards=(1, 3, 4, 7)), nodes)
    for rank in range(RANKS):
        assert same_training(discarded[rank], plain[rank])
        assert any(bool(r.any()) for r in plain[rank][1]["residual"].values())


def first_residual(group, discards):
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=pycomm.TopK(0.05), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        wrapped.batch_loss(model, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    if discards:
        wrapped.batch_loss(model, group.rank, 9).backward()
        optimizer.zero_grad()
    inputs = model(ddp.batch(group.rank, 5))  # finds it
    norm = model.comm_state.stats()["residual_norm"]
    inputs.square().mean().backward()
    return norm


def test_the_first_one_in_the_middle_makes_residuals_zero():
    assert all(norm == 0.0 for norm in on_ranks(functools.partial(first_residual, discards=True)))
    assert all(norm > 0.0 for norm in on_ranks(functools.partial(first_residual, discards=False)))


def accumulate(group, first):
    """Two exchanges before a step; the averages of the first count."""
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=pycomm.TopK(0.05), group=group)
    for step in range(6):
        wrapped.batch_loss(model, group.rank, step).backward()
        if step % 2 == first:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
    return model.comm_state.stats()["residual_norm"]


def test_gradients_that_are_added_to_are_not_dropped(monkeypatch):
    undone = []
    undo = pycomm._training.residuals.Residuals.undo_exchange
    monkeypatch.setattr(
        pycomm._training.residuals.Residuals,
        "undo_exchange",
        lambda self: undone.append(self) or undo(self),
    )
    on_ranks(functools.partial(accumulate, first=1))
    on_ranks(functools.partial(train, compression=pycomm.TopK(0.05), by_data=True, undo=None))
    assert not undone
    on_ranks(functools.partial(train, compression=pycomm.TopK(0.05), discards=(2,)))
    assert len(undone) == RANKS


LAYERS = nn.Linear(64, 64), nn.Linear(64, 64)


def sums_of_its_own(group, undo, steps=True):
    """Averages are added up elsewhere; returns all that was used and waits, and all there was."""
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), compression=pycomm.TopK(0.05), group=group)
    model.comm_state.undo_dropped = undo
    weight = model.module[0].weight
    mine, used = torch.zeros_like(weight), torch.zeros_like(weight)

    def note(gradient):
        mine.add_(gradient)

    weight.register_hook(note)
    for step in range(6):
        wrapped.batch_loss(model, group.rank, step).backward()
        used += weight.grad
        model.zero_grad()
        if steps and step == 1:
            torch._foreach_add_([p.detach() for p in model.parameters()], 0.01)
    waits = model.comm_state.residual("0.weight").clone()
    for tensor in (mine, waits):
        pycomm.all_reduce(tensor, "avg", group=group)
    return used + waits, mine


def test_a_program_that_uses_averages_elsewhere_keeps_residuals():
    for used, there_was in on_ranks(functools.partial(sums_of_its_own, undo=False)):
        assert torch.allclose(used, there_was, rtol=1e-5, atol=1e-5)
    for used, there_was in on_ranks(functools.partial(sums_of_its_own, undo=True)):
        assert not torch.allclose(used, there_was, rtol=0, atol=1e-3)


def test_a_program_without_steps_keeps_residuals():
    body = functools.partial(sums_of_its_own, undo=None, steps=False)
    for used, there_was in on_ranks(body):
        assert torch.allclose(used, there_was, rtol=1e-5, atol=1e-5)


def test_the_first_one_warns():
    with pytest.warns(UserWarning, match="undo_dropped"):
        on_ranks(
            functools.partial(train, compression=pycomm.TopK(0.05), discards=(2, 4), undo=None)
        )


def adversarial(group, compression):
    """A generator and a discriminator; the generator's backward leaves gradients in both."""
    wrap = functools.partial(pycomm.DataParallel, group=group, compression=compression)
    generator, discriminator = (wrap(copy.deepcopy(layer)) for layer in LAYERS)
    discriminator.comm_state.undo_dropped = True
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
    seen = []
    for step in range(6):
        noise = ddp.batch(group.rank, step)[:, :1] * torch.ones(64)
        optimizers[0].zero_grad()
        discriminator(generator(noise)).mean().backward()
        optimizers[0].step()
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
