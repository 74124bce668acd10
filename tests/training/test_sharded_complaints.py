"""Problems that users report of other sharded optimizers, by cause."""

import copy

import pytest
import sharding
import sweep
import torch
from sharding import Parameter, Program, Step
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm import optim

FIVE = tuple(Step() for _ in range(5))
STAGES = ["optimizer", "gradients"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 130), nn.GELU(), nn.LayerNorm(130), nn.Linear(130, 33))


def batch(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def train(group, net, stage, forward=None, steps=range(4), **options):
    """Trains a copy of a network; returns its parameters, norms and the optimizer's checkpoint."""
    net = copy.deepcopy(net)
    model = pycomm.DataParallel(net, group=group, bucket_cap_mb=0.01, shard=stage)
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.01, **options)
    norms = []
    for step in steps:
        optimizer.zero_grad()
        run = model if forward is None else forward(model)
        run(batch(group.rank, step)).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return [p.detach().clone() for p in net.parameters()], norms, optimizer.state_dict()


def compare(world, stage, net, size=3, **options):
    def body(group, shard):
        return train(group, net, shard, **options)

    plain, sharded = (world(size).run(body, shard) for shard in (None, stage))
    found = sharding.difference(plain, sharded)
    assert found is None, found
    return sharded


def two_layers(**options):
    """A program with parameters that are cut in the middle."""
    given = (Parameter((5000,)), Parameter((64, 65), group=1))
    return Program(ranks=3, dtype=torch.float32, parameters=given, steps=FIVE, **options)


@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 0.01, 25])
def test_sizes_of_buckets_change_nothing(bucket_cap_mb):
    sharding.check(two_layers(bucket_cap_mb=bucket_cap_mb, options={"max_norm": 1.0}))


class Shuffled(nn.Module):
    """Uses its layers in another order than it was given them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])

    def forward(self, x):
        for index in (2, 0, 3, 1):
            x = self.layers[index](x).tanh()
        return x


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_used_in_another_order_than_they_lie(world, stage):
    compare(world, stage, Shuffled())


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_saved_right_after_a_step_are_its_own_on_all_ranks(world, stage):
    seen = compare(world, stage, network())
    assert sharding.difference([seen[0]] * 3, seen) is None


@pytest.mark.parametrize(
    ("stage", "after", "before"), sweep.a_third_of(STAGES, [1, 3, 4], [1, 2, 5])
)
def test_a_checkpoint_loads_into_another_number_of_ranks(world, before, after, stage):
    """Steps after it have the bits of an unsharded run on the new number of ranks."""
    options = {"states": "8bit", "max_norm": 1.0}
    net = nn.Linear(40, 130)
    parameters, _, saved = world(before).run(lambda g: train(g, net, stage, **options))[0]

    def resume(group, shard):
        copied = copy.deepcopy(net)
        with torch.no_grad():
            for parameter, value in zip(copied.parameters(), parameters, strict=True):
                parameter.copy_(value)
        model = pycomm.DataParallel(copied, group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01, **options)
        optimizer.load_state_dict(saved)
        for step in (7, 8):
            optimizer.zero_grad()
            model(batch(group.rank, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in copied.parameters()], optimizer.state_dict()

    plain, sharded = (world(after).run(resume, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@pytest.mark.parametrize("backwards", [1, 2])
def test_no_sync_accumulates(backwards):
    steps = tuple(Step(without_sync=2, backwards=backwards) for _ in range(3))
    sharding.check(Program(2, torch.bfloat16, (Parameter((5000,)), Parameter((7,))), steps))


def test_no_sync_sends_nothing(world):
    def sent(group, stage):
        model = pycomm.DataParallel(network(), group=group, shard=stage)
        model(batch(group.rank, 0)).sum().backward()
        model.zero_grad()
        before = group.traffic()
        with model.no_sync():
            for step in range(3):
                model(batch(group.rank, step)).sum().backward()
        return [now - then for now, then in zip(group.traffic(), before, strict=True)]

    for stage in STAGES:
        assert not any(map(any, world(2).run(sent, stage)))


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_all_ranks_gradients(world, stage):
    """At once after the step, on every rank, and in double precision."""
    net = network()
    seen = compare(world, stage, net, max_norm=0.1, steps=range(1))
    loss = torch.stack([net(batch(rank, 0)).square().mean() for rank in range(3)]).mean()
    loss.backward()
    expected = torch.stack([p.grad.double().square().sum() for p in net.parameters()]).sum().sqrt()
    for _, norms, _ in seen:
        torch.testing.assert_close(norms[0], expected, rtol=1e-5, atol=0)


def test_remainders_survive_another_wrapper():
    """The optimizer has stepped before the first wrapper was made."""
    steps = (
        Step(),
        Step(),
        Step(wraps="shard"),
        Step(),
        Step(wraps="whole"),
        Step(checkpoint=True),
    )
    given = (Parameter((5000,)),)
    options = {"master_weights": "remainder"}
    sharding.check(Program(2, torch.bfloat16, given, steps, options=options, begins="stepped"))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_parameters(frozen):
    given = tuple(Parameter((40, 30), frozen=index != frozen) for index in range(3))
    sharding.check(Program(3, torch.float32, given, FIVE))


def test_everything_is_frozen_but_one_tiny_parameter():
    """Two of three ranks own nothing."""
    given = (Parameter((3,)), Parameter((5000,), frozen=True))
    sharding.check(Program(3, torch.float32, given, FIVE, rule="lamb", options={"max_norm": 0.1}))


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_is_frozen_later(world, stage):
    net = network()

    def body(group, shard):
        model = pycomm.DataParallel(copy.deepcopy(net), group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if step == 2:
                model.module[0].weight.requires_grad_(False)
            optimizer.zero_grad()
            model(batch(group.rank, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_tied_parameters_of_uneven_shards(ranks):
    """Every rank's elements are updated, the last rank's as well."""
    given = (Parameter((101, 53)), Parameter((53,)))
    sharding.check(Program(ranks, torch.float32, given, FIVE, tied=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("masters", ["fp32", "remainder"])
def test_loading_only_the_model_rebuilds_masters(world, stage, masters):
    net = network().bfloat16()
    other = {name: value * 0.5 for name, value in net.state_dict().items()}

    def body(group, shard):
        model = pycomm.DataParallel(copy.deepcopy(net), group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), lr=1e-4, master_weights=masters)
        for step in range(4):
            if step == 2:
                model.load_state_dict(other)
            optimizer.zero_grad()
            model(batch(group.rank, step).bfloat16()).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_activation_checkpointing(world, stage, reentrant):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            x.requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=reentrant, preserve_rng_state=False)

    compare(world, stage, Recomputed())


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_modules(world, stage):
    """One rank, because torch compiles in one thread at a time."""
    net = network()
    compiled = world(1).run(
        lambda g: train(g, net, stage, forward=lambda m: torch.compile(m, backend="eager"))
    )
    plain = world(1).run(lambda g: train(g, net, None))
    assert sharding.difference(plain, compiled) is None


@pytest.mark.parametrize("stage", STAGES)
def test_channels_last(world, stage):
    def body(group, shard):
        torch.manual_seed(0)
        convolution = nn.Conv2d(8, 40, 3)
        net = nn.Sequential(convolution, nn.BatchNorm2d(40)).to(memory_format=torch.channels_last)
        model = pycomm.DataParallel(net, group=group, shard=shard)
        optimizer = optim.FusedLAMB(model.parameters(), lr=0.01, states="8bit")
        for step in range(3):
            rng = torch.Generator().manual_seed(9 * step + group.rank)
            x = torch.randn(2, 8, 6, 6, generator=rng)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()], optimizer.state_dict()

    torch.manual_seed(0)
    first = nn.Conv2d(8, 40, 3).weight.detach()
    assert not first.to(memory_format=torch.channels_last).is_contiguous()
    runs = []
    for shard in (None, stage):
        runs.append(world(1).run(body, shard))
    assert sharding.difference(*runs) is None
