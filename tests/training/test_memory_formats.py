"""A memory format that changes after wrapping: residuals stay with their elements."""

import copy

import golden
import helpers
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.optim as optim

FORMATS = [torch.contiguous_format, torch.channels_last]
CONVOLUTION = nn.Conv2d(16, 32, 3)
FACTOR = torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(1))


def wrap(module):
    model = pycomm.DataParallel(module, compression=pycomm.TopK(0.1, momentum=0.5))
    return model, model.comm_state


def wrap_and_flatten(module):
    model, state = wrap(module)
    optim.flatten(model.parameters())
    return model, state


def wrap_in_ddp(module, **options):
    model = DistributedDataParallel(module, **options)
    state = pycomm.hooks.TopKState(model.named_parameters(), density=0.1, momentum=0.5)
    model.register_comm_hook(state, pycomm.hooks.topk_hook)
    return model, state


def never_rebuilt(module):
    return wrap_in_ddp(module, find_unused_parameters=True)


def with_views(module):
    return wrap_in_ddp(module, gradient_as_bucket_view=True)


def step_of(group, model, step):
    """One exchange."""
    model.zero_grad()
    x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(step))
    factors, weight = [x[0].mean(), x[1].mean()], model.module.weight
    loss = (FACTOR.to(weight.dtype) * weight).sum() * factors[group.rank].to(weight.dtype)
    (loss + 0 * model(x.to(loss.dtype)).sum()).backward()


def converted(group, make, formats, when, load=False):
    """Every rank's residuals and velocities, and the applied gradients, after each step."""
    torch.manual_seed(2)
    model, state = make(nn.Conv2d(16, 32, 3).to(memory_format=formats[0]))
    seen = []
    for step in range(5):
        if step == when:
            model.to(memory_format=formats[1])
            saved = state.state_dict()
            if load:
                state.load_state_dict(saved)
        step_of(group, model, step)
        kept = state.state_dict()["kept"][str(group.rank)]
        seen.append([model.module.weight.grad.clone(), *(kept[kind]["weight"] for kind in kept)])
    return seen


def as_if_never_converted(group, make, when):
    """Selections differ only in ties, and there are none."""
    for formats in (FORMATS, FORMATS[::-1]):
        expected = converted(group, make, formats, None)
        for load in (False, True):
            got = converted(group, make, formats, when, load)
            for step, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert all(map(torch.equal, a, b)), (formats, when, step)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [wrap, wrap_and_flatten])
@pytest.mark.parametrize("when", [0, 1, 3])
def test_what_is_left_over_follows_its_element(make, when):
    helpers.run_group(2, as_if_never_converted, make, when)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [wrap_in_ddp, with_views])
def test_what_is_left_over_follows_its_element_into_new_buckets(make):
    """DistributedDataParallel makes them when its second forward begins."""
    helpers.run_group(2, as_if_never_converted, make, 1)


@pytest.mark.parametrize("formats", [FORMATS, FORMATS[::-1]])
def test_a_state_that_was_made_before_follows_the_format_that_is_wrapped(world, formats):
    def body(group, made):
        convolution = copy.deepcopy(CONVOLUTION).to(memory_format=made)
        named = convolution.named_parameters()
        state = pycomm.hooks.TopKState(named, density=0.1, momentum=0.5, group=group)
        model = pycomm.DataParallel(convolution.to(memory_format=formats[1]), state=state)
        step_of(group, model, 0)
        return state.state_dict()["kept"][str(group.rank)]

    before, after = (world(2).run(body, made) for made in formats)
    assert golden.same_tensors(before, after)


def refused(group, make, when):
    for formats in (FORMATS, FORMATS[::-1]):
        with pytest.raises(ValueError, match="'weight' has another one since"):
            converted(group, make, formats, when)


def check_parts(optimizer, model, whole):
    """Compares the state that a rank would save with the whole one."""
    if model._sharding is None:
        return
    part = optimizer.sharded_state_dict(model)["state"]["weight"]["exp_avg"]
    for chunk in part.__create_chunk_list__():
        index = MetadataIndex("exp_avg", chunk.offsets)
        ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
        box = tuple(map(slice, chunk.offsets, ends))
        assert torch.equal(part.__get_tensor_shard__(index), whole[box])


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_sharded_states_follow_their_elements_into_another_wrapper(world, shard):
    """Also states and weights that are read, written and assigned before it is made."""

    def trained(group, shard):
        module, model, seen = copy.deepcopy(CONVOLUTION).bfloat16(), None, []
        optimizer = optim.FusedAdamW(module.parameters(), master_weights="fp32")
        for step, memory_format in enumerate((*FORMATS, *FORMATS)):
            optimizer.zero_grad()
            module.to(memory_format=memory_format)
            if model is not None:
                seen.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())
                check_parts(optimizer, model, seen[-1])
                seen.append(optimizer.full_weights(module.weight) / 2)
                optimizer.set_full_weights(module.weight, seen[-1])
                optimizer.state[module.weight]["exp_avg_sq"] = FACTOR.square()
            model = pycomm.DataParallel(module, group=group, shard=shard)
            step_of(group, model, step)
            optimizer.step()
            seen.append(module.weight.detach().clone())
        return seen

    for plain, divided in zip(
        *(world(2).run(trained, each) for each in (None, shard)), strict=True
    ):
        assert all(map(torch.equal, plain, divided))


def test_parts_of_another_memory_format_are_refused(world):
    """Before a step, parts still have the old one."""

    def body(group):
        module = copy.deepcopy(CONVOLUTION)
        optimizer = optim.FusedAdamW(module.parameters())
        model = pycomm.DataParallel(module, group=group, shard="optimizer")
        step_of(group, model, 0)
        optimizer.step()
        optimizer.zero_grad()
        module.to(memory_format=FORMATS[1])
        model = pycomm.DataParallel(module, group=group, shard="optimizer")
        parts = optimizer.sharded_state_dict(model)
        with pytest.raises(ValueError, match="in the order"):
            set_optimizer_state_dict(model, optimizer, parts)

    world(2).run(body)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "when"),
    [(wrap_in_ddp, 0), (wrap_in_ddp, 2), (never_rebuilt, 0), (never_rebuilt, 1), (with_views, 2)],
)
def test_what_torch_would_read_in_another_order_is_refused(make, when):
    """DistributedDataParallel reads a hook's result in the format of now, whatever it wrote."""
    helpers.run_group(2, refused, make, when)


def test_a_format_that_moves_no_element_may_change(world):
    convolution = nn.Conv2d(64, 64, 1, bias=False)
    state = pycomm.hooks.Int8State(convolution.named_parameters(), group=world(1).groups[0])
    bucket, parameters = torch.ones(64 * 64), list(convolution.parameters())
    for memory_format in FORMATS:
        convolution.to(memory_format=memory_format)
        state.start_in_backward(bucket, parameters).wait()
