"""Hooks under automatic mixed precision."""

import itertools

import ddp
import golden
import helpers
import pytest
import torch
from ddp import COMPRESSIONS, Reference, Watched

TINY = {"bucket_cap_mb": 0.001}  # one parameter each
HELD = [name for name in COMPRESSIONS if name != "dense"]


def scaled(group, name, spoiled, interval):
    """Trains with a changing scale; `spoiled`: for each step, the rank, position and bad value."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=TINY, grad_scaler=scaler)
    optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.01)
    seen, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        given = ddp.gradients(watched.model, group.rank, step)
        one, rank, value = spoiled.get(step, ("", -1, 0.0))
        if rank == group.rank:
            given[one].view(-1)[5] = value
        scales.append(scaler.get_scale())
        loss = scaler.scale(watched.model(given))
        seen.append(watched.backward(loss, scales[-1]))
        scaler.step(optimizer)
        scaler.update()
        seen[-1].residuals = watched.residuals()
    return seen, scales, [p.detach() for p in watched.model.parameters()]


@pytest.mark.parametrize("name", HELD)
def test_residuals_are_unscaled(name):
    """The scale grows on the way; scaling by a power of two must not change a bit."""
    runs = helpers.run_group(2, scaled, name, {}, 2)
    assert runs[0][1] == [2.0**e for e in (10, 10, 11, 11, 12, 12)]
    Reference(2, COMPRESSIONS[name]).check([seen for seen, *_ in runs])
    plain = helpers.run_group(2, unscaled, name)
    for (seen, scales, _), expected in zip(runs, plain, strict=True):
        for step, scale, other in zip(seen, scales, expected, strict=True):
            for one, residual in step.residuals.items():
                assert golden.same_bits(residual, other.residuals[one])
                assert golden.same_bits(step.result[one] / scale, other.result[one])


def unscaled(group, name):
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=TINY)
    return watched.run(group.rank, range(6))


OVERFLOWS = {
    "in a compressed one": {2: ("wide", 0, float("inf"))},
    "in the other rank's": {2: ("square", 1, float("nan"))},
    "in a dense one": {2: ("bias", 1, float("inf")), 4: ("small", 0, float("-inf"))},
    "at first": {0: ("bias", 0, float("nan")), 1: ("wide", 1, float("-inf"))},
}


def overflowing(group, name):
    return {where: scaled(group, name, spoiled, 100) for where, spoiled in OVERFLOWS.items()}


@pytest.mark.parametrize("name", HELD)
def test_residuals_are_untouched_by_an_overflow(name):
    """In whichever bucket it was: the whole step is skipped, on all ranks."""
    seen = helpers.run_group(2, overflowing, name)
    for where, spoiled in OVERFLOWS.items():
        runs = [one[where] for one in seen]
        Reference(2, COMPRESSIONS[name]).check([steps for steps, *_ in runs])
        halvings = itertools.accumulate((step in spoiled for step in range(6)), initial=0)
        expected = [2.0 ** (10 - n) for n in halvings][:6]
        for _, scales, parameters in runs:
            assert scales == expected
            assert all(golden.same_bits(a, b) for a, b in zip(parameters, runs[0][2], strict=True))
            assert all(p.isfinite().all() for p in parameters)


def scaled_halves(group, name):
    """fp16 gradients, with a scaler that leaves unscaling to its user."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module = ddp.Given(dict.fromkeys(ddp.SHAPES, torch.float16))
    watched = Watched(module, COMPRESSIONS[name], layout=TINY, grad_scaler=scaler)
    seen = []
    for step in range(4):
        watched.model.zero_grad()
        given = ddp.gradients(watched.model, group.rank, step)
        if step == 2:
            given["wide"].view(-1)[group.rank] = 6e4  # beyond fp16 when scaled
        scale = scaler.get_scale()
        seen.append(watched.backward(scaler.scale(watched.model(given)), scale))
        scaler.update(scale * 2 if step != 2 else scale / 2)
        seen[-1].residuals = watched.residuals()
    return seen


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_scaled_fp16_gradients(name):
    runs = helpers.run_group(2, scaled_halves, name)
    assert not runs[0][2].local["wide"].isfinite().all()
    Reference(2, COMPRESSIONS[name]).check(runs)


def scaled_down(group, name):
    """A step with a scale that has an infinite inverse, and one after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-129)
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=TINY, grad_scaler=scaler)
    for one in watched.residuals():
        watched.state.residual(one).fill_(0.5)
    seen = []
    for step, scale in enumerate([2.0**-129, 1.0]):
        watched.model.zero_grad()
        loss = scaler.scale(watched.model(ddp.gradients(watched.model, group.rank, step)))
        seen.append(watched.backward(loss, scale))
        scaler.update(1.0)
    return seen


@pytest.mark.parametrize("name", HELD)
def test_residuals_are_untouched_under_a_scale_without_an_inverse(name):
    """It counts as an overflow: results are NaN, so the optimizer skips the step."""
    for first, second in helpers.run_group(2, scaled_down, name):
        for one, residual in first.residuals.items():
            assert (residual == 0.5).all()
            assert not first.result[one].isfinite().all()
            assert not (second.residuals[one] == 0.5).all()
            assert second.residuals[one].isfinite().all()


def without_a_scaler(group, name):
    """Two good steps, one with an infinity, two good ones."""
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=TINY)
    seen = []
    for step in range(5):
        watched.model.zero_grad()
        given = ddp.gradients(watched.model, group.rank, step)
        if step == 2 and group.rank == 0:
            given["square"][3, 3] = float("inf")
        seen.append(watched.backward(watched.model(given)))
    return seen


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_an_infinity_without_a_scaler_does_not_stay(name):
    """Without a scaler, no step counts as skipped, so other parameters go on."""
    for seen in helpers.run_group(2, without_a_scaler, name):
        assert golden.same_bits(seen[2].residuals["square"], seen[1].residuals["square"])
        assert not golden.same_bits(seen[2].residuals["wide"], seen[1].residuals["wide"])
        for number, step in enumerate(seen):
            assert all(residual.isfinite().all() for residual in step.residuals.values())
            spoiled = [one for one, result in step.result.items() if not result.isfinite().all()]
            assert spoiled == (["square"] if number == 2 else [])


def autocast(group, name, kind):
    """A network in bf16, its parameters in fp32."""
    watched = Watched(ddp.network(), COMPRESSIONS[name], layout={"bucket_cap_mb": 0.02})
    optimizer = torch.optim.AdamW(watched.model.parameters(), lr=1e-3)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", kind):
            loss = watched.model(ddp.batch(group.rank, step)).float().square().mean()
        seen.append(watched.backward(loss))
        optimizer.step()
    return seen, [p.detach() for p in watched.model.parameters()]


@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_bf16_autocast(name):
    runs = helpers.run_group(2, autocast, name, torch.bfloat16)
    Reference(2, COMPRESSIONS[name]).check([seen for seen, _ in runs])
    (_, mine), (_, others) = runs
    assert all(golden.same_bits(a, b) for a, b in zip(mine, others, strict=True))
