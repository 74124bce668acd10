"""The layout of DDP's buckets changes nothing, and residuals follow their parameters through it."""

import copy

import ddp
import golden
import helpers
import numpy as np
import pytest
import torch
from ddp import COMPRESSIONS, LAYOUTS, SHAPES, Reference, Watched

import pycomm

STEPS = 4


def train(group, name, layout, dtypes):
    watched = Watched(ddp.Given(dtypes), COMPRESSIONS[name], layout=LAYOUTS[layout])
    return watched.run(group.rank, range(STEPS))


def in_every_layout(group, name, dtypes):
    return {layout: train(group, name, layout, dtypes) for layout in LAYOUTS}


def names_in(buckets):
    return sorted(name for bucket in buckets for name in bucket)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_no_layout_changes_a_bit(name):
    """Golden models know nothing of buckets, so all layouts give the same."""
    runs = helpers.run_group(2, in_every_layout, name, {})
    for layout in LAYOUTS:
        Reference(2, COMPRESSIONS[name]).check([run[layout] for run in runs])
        for step in runs[0][layout]:
            assert names_in(step.buckets) == sorted(SHAPES)
    counts = {layout: [len(step.buckets) for step in runs[0][layout]] for layout in LAYOUTS}
    assert counts["one bucket"] == [1] * STEPS
    assert counts["tiny buckets"] == [1, 4, 4, 4]  # the smallest two share one
    assert counts["static"] == [1, 1, 4, 4]
    assert counts["unused"] == [5, 5, 5, 5]


MIXED = {"wide": torch.bfloat16, "small": torch.float16, "bias": torch.bfloat16}


@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_several_dtypes_in_one_model(name):
    """In a static graph's first iteration all buckets have index 0 and none is the last."""
    runs = helpers.run_group(2, in_every_layout, name, MIXED)
    for layout in LAYOUTS:
        Reference(2, COMPRESSIONS[name]).check([run[layout] for run in runs])
    assert len(runs[0]["static"][0].buckets) == 3


def with_unused(group, name, plan, options):
    """Each step with its own parameters left out, on each rank."""
    layout = {"find_unused_parameters": True, "bucket_cap_mb": 0.02, **options}
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=layout)
    seen = []
    for step, skip in enumerate(plan):
        seen += watched.run(group.rank, [step], skip[group.rank])
    return seen


HERE_AND_THERE = [
    ([], []),
    (["wide", "bias"], []),
    (["square"], ["square", "wide", "line"]),
    (["wide", "square", "small"], ["wide", "square", "small"]),
    ([], ["wide"]),
]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("name", ["dense", "int8", "topk", "momentum"])
def test_parameters_unused_on_one_rank_or_on_all(name, views):
    """Unused on one rank: like a gradient of zeros. On all ranks: no gradient, same residual."""
    arguments = (name, HERE_AND_THERE, {"gradient_as_bucket_view": views})
    runs = helpers.run_group(2, with_unused, *arguments)
    Reference(2, COMPRESSIONS[name]).check(runs)
    unused = runs[0][3].result
    assert [n for n, result in unused.items() if result is None] == ["wide", "square", "small"]


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_nothing_is_lost(name):
    """The sum of all gradients equals the applied ones plus those still waiting."""
    size = 3
    plan = [tuple(s[rank % 2] for rank in range(size)) for s in HERE_AND_THERE * 2]
    runs = helpers.run_group(size, with_unused, name, plan, {})
    for one in ("wide", "square"):
        given = sum(step.local[one].double() for run in runs for step in run)
        results = [step.result[one] for step in runs[0]]
        applied = sum(result.double() for result in results if result is not None)
        waiting = sum(run[-1].residuals[one].double() for run in runs)
        np.testing.assert_allclose(applied * size + waiting, given, rtol=0, atol=1e-3)


def kept_zeros(group, views):
    """Gradients that stay tensors of zeros if a parameter is not used."""
    layout = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    watched = Watched(ddp.Given(), pycomm.Int8(), layout=layout)
    seen = []
    for step, skip in enumerate([[], ["wide"], []]):
        watched.model.zero_grad(set_to_none=False)
        given = ddp.gradients(watched.model, group.rank, step, skip)
        seen.append(watched.backward(watched.model(given)))
    return seen


@pytest.mark.parametrize("views", [True, False])
def test_unused_with_gradients_kept_as_zeros(views):
    runs = helpers.run_group(2, kept_zeros, views)
    Reference(2, pycomm.Int8()).check(runs)
    assert not runs[0][1].result["wide"].any()


def accumulated(group, name, views):
    """Three backwards, of which the last one exchanges."""
    layout = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.02}
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=layout)
    model, seen = watched.model, []
    for step in range(3):
        model.zero_grad()
        parts = [ddp.gradients(model, group.rank, 3 * step + i) for i in range(3)]
        with model.no_sync():
            for part in parts[:-1]:
                model(part).backward()
        seen.append(watched.backward(model(parts[-1])))
        for one, local in seen[-1].local.items():
            assert golden.same_bits(local, parts[0][one] + parts[1][one] + parts[2][one])
        assert watched.state.step == step + 1
    return seen


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_accumulated_gradients_are_exchanged_once(name, views):
    runs = helpers.run_group(2, accumulated, name, views)
    Reference(2, COMPRESSIONS[name]).check(runs)


def channels_last(group, name):
    """Only a convolution, with a weight in another memory format."""
    torch.manual_seed(5)
    module = torch.nn.Conv2d(32, 40, 3).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(module)
    watched = Watched(module, COMPRESSIONS[name])
    generator = torch.Generator().manual_seed(group.rank)
    seen = []
    for _ in range(3):
        x = torch.randn(2, 32, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        for model in (watched.model, alone):
            model.zero_grad()
        alone(x).square().mean().backward()
        seen.append(watched.backward(watched.model(x).square().mean()))
        seen[-1].local["weight"] = alone.weight.grad.clone()
    return seen


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_residuals_belong_to_their_elements_in_every_memory_format(name):
    runs = helpers.run_group(2, channels_last, name)
    assert not runs[0][0].local["weight"].is_contiguous()
    given = sum(step.local["weight"].double() for run in runs for step in run)
    applied = 2 * sum(step.result["weight"].double() for step in runs[0])
    waiting = sum(run[-1].residuals["weight"].double() for run in runs)
    torch.testing.assert_close(applied + waiting, given, rtol=0, atol=1e-6)


def uneven(group, name, views):
    """Rank 1 has one batch more than rank 0, which then sends zeros along."""
    layout = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": views}
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=layout)
    with watched.model.join():
        seen = watched.run(group.rank, range(3 + group.rank))
        watched.begin()
    if group.rank == 0:
        watched.seen.residuals = watched.residuals()
        seen.append(watched.seen)
    return seen


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_uneven_inputs_with_join(name, views):
    mine, theirs = helpers.run_group(2, uneven, name, views)
    assert not any(x.any() for x in mine[3].local.values())
    mine[3].result = theirs[3].result
    Reference(2, COMPRESSIONS[name]).check([mine, theirs])
