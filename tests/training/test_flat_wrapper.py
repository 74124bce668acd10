"""Flat buffers under the wrapper: gradients stay in the window, and no bit changes."""

import copy
import functools

import ddp
import helpers
import optimizing
import pytest
import torch
import wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapped import TINY
from wrapping import data_parallel

import pycomm
import pycomm.optim as optim
from pycomm._training.flat import ALIGN, home_of


class Varied(nn.Module):
    """Two types, channels last, tied, frozen, never used, empty and scalar parameters.

    Backward meets the layers in an order that is not the one of their definition.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.late = nn.Linear(8, 5)
        self.convolution = nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.narrow = nn.Linear(8, 70, bias=False).bfloat16()
        self.wide = nn.Linear(70, 80).bfloat16()

    def forward(self, x):
        x = x.view(-1, 2, 4, 5).to(memory_format=torch.channels_last)
        x = self.convolution(x).mean((2, 3))
        x = self.frozen(self.tied(self.inner(x).relu())) * self.scalar + self.empty.sum()
        x = x + self.wide(self.narrow(x.bfloat16())).float()[:, :8]
        return self.late(x)


MODEL = Varied()  # drawn by one thread, as the random numbers are everyone's


def wrap(model, group, **options):
    return data_parallel(model, group=group, **{"bucket_cap_mb": TINY, **options})


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    wrapped.batch_loss(model, rank, step).backward()
    optimizer.step()


def not_flat(group, optimizer):
    model = wrap(copy.deepcopy(MODEL), group)
    return model, optimizer(model.parameters())


def wrap_and_flatten(group, optimizer, **options):
    model = wrap(copy.deepcopy(MODEL), group, **options)
    optim.flatten(model.parameters())
    return model, optimizer(model.parameters())


def flatten_and_wrap(group, optimizer):
    module = copy.deepcopy(MODEL)
    optim.flatten(module.parameters())
    model = wrap(module, group)
    return model, optimizer(model.parameters())


def flatten_later(group, optimizer):
    """After the first backward, which has made new buckets."""
    model = wrap(copy.deepcopy(MODEL), group)
    wrapped.batch_loss(model, group.rank, 0).backward()
    optim.flatten(model.parameters())
    return model, optimizer(model.parameters())


def flatten_in_parts(group, optimizer):
    model = wrap(copy.deepcopy(MODEL), group)
    for part in model.module.children():
        optim.flatten(p for p in part.parameters() if home_of(p) is None)
    optim.flatten([model.module.empty, model.module.scalar])
    return model, optimizer(model.parameters())


WAYS = {
    "wrap, flatten": wrap_and_flatten,
    "wrap, flatten, one bucket": functools.partial(wrap_and_flatten, bucket_cap_mb=25),
    "flatten, wrap": flatten_and_wrap,
    "wrap, backward, flatten": flatten_later,
    "wrap, flatten in parts": flatten_in_parts,
}


def trained(group, make, optimizer, steps=3):
    """Parameters, gradients and states in the end."""
    model, optimizer = make(group, optimizer)
    places = []
    for step in range(steps):
        step_of(model, optimizer, group.rank, step)
        if make is not not_flat:
            places.append([check_place(p, group, optimizer) for p in model.parameters()])
    assert all(place == places[0] for place in places)
    states = {
        f"{name}.{key}": optimizer.state[p][key]
        for name, p in ddp.unprefixed(model).items()
        for key in optimizer.state.get(p, ())
    }
    return {**wrapped.parameters_of(model), **states}, wrapped.gradients_of(model)


def is_fused(optimizer):
    return not type(optimizer).__module__.startswith("torch.")


def check_place(parameter, group, optimizer):
    """Parameter, gradient and states at the same offset; returns where the gradient lies.

    Small states that 8 bits leave in fp32 have no place.
    """
    home = home_of(parameter)
    if home is None:
        assert not parameter.requires_grad
        return None
    assert home.offset % ALIGN == 0
    if parameter.grad is None or not parameter.numel():
        return None
    for key, state in optimizer.state[parameter].items() if is_fused(optimizer) else ():
        placed = optimizer.defaults["states"] != "8bit" or state.dtype in (torch.uint8, torch.int16)
        if state.shape == parameter.shape and key != "step" and placed:
            assert state.storage_offset() == home.offset
    address = parameter.grad.data_ptr()
    assert address == home.piece.gradients.data_ptr() + home.offset * parameter.itemsize
    place = group._core.offset_of(address)
    assert place >= 0
    return place


ADAMW = functools.partial(optim.FusedAdamW, master_weights="remainder", states="8bit", max_norm=0.5)
CASES = [
    *[functools.partial(make, lr=0.01) for make in optimizing.OPTIMIZERS.values()],
    functools.partial(optim.FusedSGD, lr=0.01, momentum=0.9),
    functools.partial(optim.FusedAdamW, states="bf16", stochastic_rounding=True, amsgrad=True),
    functools.partial(optim.FusedLAMB, master_weights="fp32"),
    functools.partial(torch.optim.AdamW, lr=0.01),
]


def flat_and_not(group, optimizer, ways):
    """All ways end as the one that is not flat."""
    expected = trained(group, not_flat, optimizer)
    for way in ways:
        for got, wanted in zip(trained(group, WAYS[way], optimizer), expected, strict=True):
            assert wrapped.same(got, wanted)
    return expected[0]


def every_optimizer(group):
    for optimizer in CASES:
        flat_and_not(group, optimizer, ["wrap, flatten", "flatten, wrap"])


def test_every_optimizer_steps_to_the_same_bits():
    helpers.run_group(2, every_optimizer)


def every_way(group):
    return flat_and_not(group, ADAMW, WAYS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_order_of_wrapping_and_flattening_gives_the_same_bits(world, size):
    """In processes and threads."""
    runs = helpers.run_group(size, every_way) + world(size).run(every_way)
    assert all(wrapped.same(run, runs[0]) for run in runs)


def accumulating(group):
    """Gradients that were added up outside of an exchange come to their places as well."""
    for set_to_none in (True, False):
        ends = []
        for make in (not_flat, wrap_and_flatten, flatten_and_wrap):
            model, optimizer = make(group, ADAMW)
            for step in range(3):
                optimizer.zero_grad(set_to_none=set_to_none)
                with model.no_sync():
                    wrapped.batch_loss(model, group.rank, step).backward()
                    for p in model.parameters() if make is not not_flat else ():
                        check_place(p, group, optimizer) if step else None
                wrapped.batch_loss(model, group.rank, step + 9).backward()
                optimizer.step()
            [check_place(p, group, optimizer) for p in model.parameters() if make is not not_flat]
            ends.append(wrapped.parameters_of(model))
        assert wrapped.same(ends[1], ends[0])
        assert wrapped.same(ends[2], ends[0])


def resuming(group):
    """Checkpoints of model and optimizer, from flat to not flat and back, also into themselves."""
    ends, saved = [], {}
    for make in (not_flat, wrap_and_flatten):
        model, optimizer = make(group, ADAMW)
        for step in range(2):
            step_of(model, optimizer, group.rank, step)
        saved[make] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step_of(model, optimizer, group.rank, 2)
        ends.append(wrapped.parameters_of(model))
        for source in (make, not_flat):
            model.load_state_dict(saved[source][0])
            optimizer.load_state_dict(saved[source][1])
            step_of(model, optimizer, group.rank, 2)
            ends.append(wrapped.parameters_of(model))
    [check_place(p, group, optimizer) for p in model.parameters()]
    model, optimizer = not_flat(group, ADAMW)
    model.load_state_dict(saved[wrap_and_flatten][0])
    optimizer.load_state_dict(saved[wrap_and_flatten][1])
    step_of(model, optimizer, group.rank, 2)
    ends.append(wrapped.parameters_of(model))
    assert all(wrapped.same(end, ends[0]) for end in ends)


def compiled(group):
    ends = []
    for flat in (False, True):
        torch._dynamo.reset()
        model = wrap(ddp.network(), group)
        if flat:
            optim.flatten(model.parameters())
        optimizer = optim.FusedAdamW(model.parameters(), states="8bit", max_norm=0.5)
        run = torch.compile(model, backend="aot_eager")
        for step in range(3):
            step_of(run, optimizer, group.rank, step)
        ends.append(wrapped.parameters_of(model))
    assert wrapped.same(*ends)
    assert all(check_place(p, group, optimizer) for p in model.parameters())


def is_small(_name, parameter):
    return parameter.numel() < 50


def compressed(group):
    """Blocks and residuals follow parameters, wherever they lie."""
    ends = []
    for make in (not_flat, wrap_and_flatten):
        for compression in (pycomm.Int8(), pycomm.TopK(0.05)):
            options = {"compression": compression, "exclude": is_small}
            model = wrap(copy.deepcopy(MODEL), group, bucket_cap_mb=25, **options)
            if make is wrap_and_flatten:
                optim.flatten(model.parameters())
            optimizer = optim.FusedAdamW(model.parameters())
            for step in range(3):
                step_of(model, optimizer, group.rank, step)
            kept = model.comm_state.state_dict()["kept"][str(group.rank)]["residual"]
            ends.append({**wrapped.parameters_of(model), **{f"{n}.kept": kept[n] for n in kept}})
    assert wrapped.same(ends[0], ends[2])
    assert wrapped.same(ends[1], ends[3])


def under_ddp(group):
    ends = []
    for view in (False, True):
        for flat in (False, True):
            module = copy.deepcopy(MODEL)
            if flat:
                optim.flatten(module.parameters())
            model = DistributedDataParallel(
                module, gradient_as_bucket_view=view, find_unused_parameters=True
            )
            model.register_comm_hook(pycomm.hooks.AllReduceState(), pycomm.hooks.all_reduce_hook)
            optimizer = optim.FusedAdamW(model.parameters())
            for step in range(3):
                step_of(model, optimizer, group.rank, step)
            ends.append(wrapped.parameters_of(model))
    assert all(wrapped.same(end, ends[0]) for end in ends)


def in_learned_order(group):
    """A pinned layout keeps its buckets, which still start in the order of backward."""
    model, optimizer = wrap_and_flatten(group, ADAMW)
    names = {id(p): name for name, p in model.module.named_parameters()}

    def starting():
        return [names[id(p)] for bucket in model._exchange._buckets for p in bucket.parameters]

    def lying():
        return sorted(bucket.flat.data_ptr() for bucket in model._exchange._buckets)

    before, places = starting(), lying()
    step_of(model, optimizer, group.rank, 0)
    assert before.index("late.weight") > before.index("convolution.weight")
    assert set(starting()[:2]) == {"late.bias", "late.weight"}
    assert lying() == places


def a_part_of_a_model(group):
    """Wraps only a part of a flattened model: other gradients are not exchanged."""
    plain, flat = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    optim.flatten(flat.parameters())
    for model in (plain, flat):
        model.inner = wrap(model.inner, group)
        model.late = wrap(model.late, group)
        for step in range(2):
            model.zero_grad()
            wrapped.batch_loss(model, group.rank, step).backward()
    assert wrapped.same(wrapped.gradients_of(flat), wrapped.gradients_of(plain))


def wrapped_anew(group):
    """Memory follows the last wrapper, and outlives it."""
    model, optimizer = wrap_and_flatten(group, ADAMW)
    step_of(model, optimizer, group.rank, 0)
    old = model.module.late.weight.grad.data_ptr()
    model = wrap(model.module, group)
    step_of(model, optimizer, group.rank, 1)
    [check_place(p, group, optimizer) for p in model.parameters()]
    assert model.module.late.weight.grad.data_ptr() != old
    module, expected = model.module, wrapped.parameters_of(model)
    del model
    step_of(module, optimizer, group.rank, 2)
    [check_place(p, group, optimizer) for p in module.parameters()]
    assert expected.keys() == wrapped.parameters_of(module).keys()


def moved_away(group):
    """The exchange of its gradients is refused; no state is written to another one's place."""
    model = wrap(ddp.network(), group)
    optim.flatten(model.parameters())
    wrapped.batch_loss(model, group.rank, 0).backward()
    model.bfloat16()
    assert [home_of(p) for p in model.parameters()] == [None] * 6
    optim.FusedAdamW(model.parameters()).step()
    with pytest.raises(ValueError, match="wrap it anew"):
        model(ddp.batch(group.rank, 0).bfloat16()).sum().backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "body",
    [
        accumulating,
        resuming,
        compiled,
        compressed,
        under_ddp,
        in_learned_order,
        a_part_of_a_model,
        wrapped_anew,
        moved_away,
    ],
)
def test_flat_buffers_when(body):
    helpers.run_group(2, body)
