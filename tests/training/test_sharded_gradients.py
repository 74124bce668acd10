"""What users do with gradients and copies of sharded models: equal bits, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pycomm
from pycomm import optim

STAGES = ("optimizer", "gradients")
torch.manual_seed(5)
NET = nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 40), nn.Linear(40, 1))


def made(group, shard, **options):
    net = copy.deepcopy(NET)
    model = pycomm.DataParallel(net, group=group, shard=shard)
    return net, model, optim.FusedAdamW(model.parameters(), lr=1e-2, **options)


def gradients(net):
    return [p.grad for p in net.parameters() if p.grad is not None]


ZEROINGS = {
    "the module": lambda net: net.zero_grad(set_to_none=False),
    "a layer": lambda net: net[2].zero_grad(set_to_none=False),
    "each": lambda net: [grad.zero_() for grad in gradients(net)],
    "data": lambda net: [grad.data.zero_() for grad in gradients(net)],
    "all at once": lambda net: torch._foreach_zero_(gradients(net)) if gradients(net) else None,
    "never": lambda _: None,
}


def trained(group, shard, zero, between=lambda *_: None):
    net, model, optimizer = made(group, shard)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(4):
        zero(net)
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        between(group, net)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def check_bits(*args):
    with pycomm.LocalWorld(2) as world:
        wanted = world.run(trained, None, *args)
        for shard in STAGES:
            for got, expected in zip(world.run(trained, shard, *args), wanted, strict=True):
                assert all(map(torch.equal, got, expected)), shard


@pytest.mark.parametrize("zeroing", ZEROINGS)
def test_gradients_are_zeroed(zeroing):
    check_bits(ZEROINGS[zeroing])


def zeroed_before_some_steps(group, shard, max_norm, zero):
    """From the second step on, rows of optimizers are those of the step before."""
    net, model, optimizer = made(group, shard, max_norm=max_norm)
    generator = torch.Generator().manual_seed(group.rank)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        if step in (1, 3):
            zero(net)
        optimizer.step()
        seen.append(optimizer.grad_norm.clone() if max_norm else torch.zeros(()))
    return [*seen, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("zeroing", ["a layer", "the module", "each", "data"])
def test_gradients_are_zeroed_before_a_step(zeroing, max_norm):
    with pycomm.LocalWorld(2) as world:
        wanted = world.run(zeroed_before_some_steps, None, max_norm, ZEROINGS[zeroing])
        for shard in STAGES:
            seen = world.run(zeroed_before_some_steps, shard, max_norm, ZEROINGS[zeroing])
            for got, expected in zip(seen, wanted, strict=True):
                assert all(map(torch.equal, got, expected)), shard


def zeroed_twice(group, shard, micro_batches):
    """In place after the step, and dropped before the next one."""
    net, model, optimizer = made(group, shard)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_zeroed_after_and_before_a_step(micro_batches):
    with pycomm.LocalWorld(2) as world:
        wanted = world.run(zeroed_twice, None, micro_batches)
        for shard in STAGES:
            for got, expected in zip(
                world.run(zeroed_twice, shard, micro_batches), wanted, strict=True
            ):
                assert all(map(torch.equal, got, expected)), shard


def step_after(optimizer, change, *args):
    change(*args)
    optimizer.step()


CHANGES = {
    "replaced": lambda net: [setattr(p, "grad", p.grad.clone()) for p in net.parameters()],
    "filled": lambda net: [grad.fill_(1.0) for grad in gradients(net)],
    "one element": lambda net: net[3].bias.grad.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shard", STAGES)
def test_gradients_are_changed(shard, change):
    def check(group):
        net, model, optimizer = made(group, shard)
        model(torch.ones(3, 40)).sum().backward()
        with pytest.raises(RuntimeError, match=r" reduce_gradients\(\)"):
            step_after(optimizer, CHANGES[change], net)
        assert all(map(torch.equal, net.parameters(), NET.parameters()))

    with pycomm.LocalWorld(2) as world:
        world.run(check)


WRITES = {
    "NaN by a mask": lambda grad: grad.masked_fill_(grad.isnan(), 0),
    "NaN by an index": lambda grad: grad.__setitem__(grad.isnan(), 0),
    "NaN": lambda grad: grad.nan_to_num_(),
    "a row": lambda grad: grad[0].zero_(),
    "rows": lambda grad: grad.data[:1].fill_(0),
    "part of a flat view": lambda grad: torch._foreach_zero_([grad.view(-1)[1:]]),
    "out=": lambda grad: torch.mul(grad.detach(), 0, out=grad),
    "factors of several": lambda grad: torch._foreach_mul_([grad], 0.5),
    "its data": lambda grad: setattr(grad, "data", torch.ones_like(grad)),
}


@pytest.mark.parametrize("write", WRITES)
def test_divided_gradients_are_only_zeroed_as_wholes(write):
    """A stand-in's elements share memory, so zeroing some would zero all; one is no exception."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.many, self.one = nn.Parameter(torch.ones(50, 1)), nn.Parameter(torch.ones(1, 1))

        def forward(self, x):
            return (self.many * x).sum() + (self.one * x).sum()

    def check(group):
        model = pycomm.DataParallel(Net(), group=group, shard="gradients")
        optimizer = optim.FusedSGD(model.parameters(), lr=0.1)
        parts = ("a row", "rows", "part of a flat view")
        for parameter in (model.module.many, *([] if write in parts else [model.module.one])):
            model.zero_grad()
            model(torch.ones(1)).backward()
            with pytest.raises(RuntimeError, match=r" reduce_gradients\(\)"):
                step_after(optimizer, WRITES[write], parameter.grad)
        assert all(bool((p == 1).all()) for p in model.parameters())

    with pycomm.LocalWorld(2) as world:
        world.run(check)


def test_divided_gradients_can_be_read():
    def check(group):
        net, model, _ = made(group, "gradients")
        model(torch.ones(3, 40)).sum().backward()
        grad = net[0].bias.grad
        assert repr(grad).startswith("tensor([nan, nan")
        assert len(grad.tolist()) == grad.numel()
        assert all(bool(part.isnan().all()) for part in (grad.norm(), grad.view(-1), grad[:2]))
        assert type(grad + 1) is type(grad.clone()) is torch.Tensor

    with pycomm.LocalWorld(2) as world:
        world.run(check)


def swap_on_rank_0(group, net):
    """Evaluates other parameters on one rank, as with averaged weights."""
    if group.rank == 0:
        keep = copy.deepcopy(net.state_dict())
        net.load_state_dict({name: value / 2 for name, value in keep.items()})
        with torch.no_grad():
            net(torch.ones(1, 40))
        net.load_state_dict(keep)


def test_a_rank_changes_parameters_for_a_while():
    check_bits(ZEROINGS["the module"], swap_on_rank_0)


@pytest.mark.parametrize("shard", STAGES)
def test_copies_of_a_wrapper_divide_their_own_parameters(shard):
    def check(group):
        net, model, _ = made(group, shard)
        twin, averaged = copy.deepcopy(model), AveragedModel(model)
        twins = optim.FusedAdamW(twin.parameters(), lr=1e-2)
        twin(torch.ones(3, 40)).sum().backward()
        twins.step()
        averaged.update_parameters(twin)
        assert all(map(torch.equal, net.parameters(), NET.parameters()))
        assert all(map(torch.equal, averaged.module.parameters(), twin.parameters()))
        held = sum(state["exp_avg"].numel() for state in twins.state.values())
        units = sum(-(-p.numel() // 1024) for p in net.parameters())
        assert held <= -(-units // 2) * 1024

    with pycomm.LocalWorld(2) as world:
        world.run(check)


def test_a_checkpoint_without_its_states_is_refused():
    def check(group):
        _, model, optimizer = made(group, "optimizer")
        model(torch.ones(3, 40)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict(to=0)
        if group.rank == 1:
            with pytest.raises(ValueError, match="has no states, because only rank 0 has"):
                optimizer.load_state_dict(saved)

    with pycomm.LocalWorld(2) as world:
        world.run(check)


def test_a_parameter_that_was_moved_is_found_on_all_ranks():
    def check(group):
        net, model, _ = made(group, "gradients")
        net[0].weight.data = net[0].weight.data.clone()
        with pytest.raises(RuntimeError, match="have left the memory"):
            model(torch.ones(3, 40)).sum().backward()

    with pycomm.LocalWorld(3) as world:
        world.run(check)


def test_ranks_compare_what_changes_a_step():
    def check(group, option, loads):
        _, model, optimizer = made(group, "optimizer", **option)
        model(torch.ones(3, 40)).sum().backward()
        optimizer.param_groups[0]["tag"] = object()  # the user's own
        optimizer.step()
        if loads:
            state = optimizer.state_dict()
            for one in state["state"].values():
                one["step"] = one["step"] + group.rank
            optimizer.load_state_dict(state)
        else:
            optimizer.param_groups[0]["lr"] += group.rank * 1e-9
        with pytest.raises(pycomm.Mismatch, match="options and counts"):
            optimizer.step()

    for loads in (False, True):
        with pycomm.LocalWorld(2) as world:
            world.run(check, {}, loads)


def zeroed_while_empty(group, stage):
    net = nn.Module()
    net.empty, net.full = (nn.Parameter(torch.ones(count)) for count in (0, 50))
    net.forward = lambda x: (net.empty * x).sum() + (net.full * x).sum()
    model = pycomm.DataParallel(net, group=group, shard=stage)
    optimizer = optim.FusedAdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return net.full.detach().clone()


def test_zeroing_an_empty_gradient_changes_nothing():
    with pycomm.LocalWorld(2) as world:
        plain, divided = (world.run(zeroed_while_empty, stage) for stage in (None, "gradients"))
    assert all(torch.equal(one, other) for one, other in zip(plain, divided, strict=True))


@pytest.mark.parametrize("dropped", [1, 6], ids=["one", "all"])
def test_ranks_that_add_to_different_gradients_raise(dropped):
    def check(group):
        net, model, _ = made(group, "gradients")
        model(torch.ones(3, 40)).sum().backward()
        for parameter in list(net.parameters())[: dropped if group.rank == 0 else 0]:
            parameter.grad = None
        with pytest.raises(pycomm.Mismatch):
            model(torch.ones(3, 40)).sum().backward()

    with pycomm.LocalWorld(2) as world:
        world.run(check)
