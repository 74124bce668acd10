"""Reports about optimizers, their states and checkpoints; see README.md."""

import copy

import habits
import pytest
import torch
from habits import MODES, assert_alike, loss_of, network
from torch import nn

import pycomm
from pycomm import optim
from pycomm.hooks import LocalSGDState

UNCOMPRESSED = ["plain", "optimizer", "gradients"]


def step(model, optimizer, ranks, number):
    optimizer.zero_grad()
    for rank in ranks:
        (loss_of(model, rank, number) / len(ranks)).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_others_learns(world, mode):
    """hivemind#447: averages with nobody else were zeros."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, s)], ranks=1)

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for number in range(3):
            step(model, optimizer, [0], number)
        assert_alike(model.module, wanted, mode)

    world(1).run(body)


@pytest.mark.parametrize("mode", ["optimizer", "gradients"])
def test_saving_on_one_rank_only(world, mode):
    """DeepSpeed#2993: rank 0 waited for ever. All ranks must call it; one may get all states."""

    def trained(group):
        model = habits.wrap(network(), group, mode)
        optimizer = optim.FusedAdamW(model.parameters())
        step(model, optimizer, [group.rank], 0)
        return model, optimizer

    def on_one(group):
        model, optimizer = trained(group)

        def go_on():
            if group.rank == 0:
                optimizer.state_dict()
            step(model, optimizer, [group.rank], 1)

        with pytest.raises(pycomm.Mismatch):
            go_on()

    def on_all(group):
        _, optimizer = trained(group)
        return optimizer.state_dict(to=0)

    world(2).run(on_one)
    saved, nothing = world(2).run(on_all)
    assert not nothing["state"]
    plain = network()
    expected = torch.optim.AdamW(plain.parameters())
    step(plain, expected, [0, 1], 0)
    for number, state in expected.state_dict()["state"].items():
        torch.testing.assert_close(saved["state"][number]["exp_avg"], state["exp_avg"])


def test_elements_without_gradients_do_not_move():
    """unsloth-zoo#962: what 8-bit codes of zero decoded to was divided by eps."""
    weight, wanted = (nn.Parameter(torch.ones(64, 256)) for _ in range(2))
    ours = optim.FusedAdamW([weight], lr=1e-2, weight_decay=0, states="8bit")
    torchs = torch.optim.AdamW([wanted], lr=1e-2, weight_decay=0)
    generator = torch.Generator().manual_seed(0)
    for number in range(300):
        gradient = torch.zeros(64, 256)
        gradient[:, ::2] = torch.randn(64, 128, generator=generator)
        if number < 5:
            gradient[:, 1::4] = torch.randn(64, 64, generator=generator) / 2
        weight.grad, wanted.grad = gradient.clone(), gradient
        ours.step()
        torchs.step()
    assert "exp_avg_code" in ours.state[weight]
    assert torch.equal(weight[:, 3::4], torch.ones(64, 64))
    # Those that get no gradients any more come to rest.
    torch.testing.assert_close(weight[:, 1::4], wanted[:, 1::4], rtol=0, atol=0.02)


@pytest.mark.parametrize("master_weights", ["fp32", "remainder"])
@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_weights_that_are_loaded_without_their_optimizer(world, mode, master_weights):
    """prime-rl#3234: old master weights overwrote them in the next step."""
    loaded = network(7).bfloat16()
    wanted = network(7).bfloat16().float()
    step(wanted, torch.optim.SGD(wanted.parameters(), lr=habits.RATE), [0, 1], 5)

    def body(group):
        model = habits.wrap(network().bfloat16(), group, mode)
        optimizer = optim.FusedSGD(
            model.parameters(), lr=habits.RATE, master_weights=master_weights
        )
        for number in (0, 5):
            optimizer.zero_grad()
            data = habits.batch(group.rank, number).bfloat16()
            model(data).float().square().mean().backward()
            if number == 5:
                model.load_state_dict(loaded.state_dict())
                optimizer.zero_grad()
                model(data).float().square().mean().backward()
            optimizer.step()
        for one, other in zip(model.module.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.005)

    world(2).run(body)


@pytest.mark.parametrize("loads_after", [False, True])
def test_outer_steps_begin_at_weights_that_are_loaded(world, loads_after):
    """prime-diloco#18: the outer optimizer began at the weights before them."""
    loaded = network(7).state_dict()

    def body(group):
        module = network()
        if not loads_after:
            module.load_state_dict(loaded)
        inner = torch.optim.SGD(module.parameters(), lr=0.05)
        named = module.named_parameters()
        outer = {"outer_lr": 0.7, "outer_momentum": 0.9, "period": 2}
        local = LocalSGDState(named, inner, group=group, **outer)
        model = pycomm.DataParallel(module, state=local)
        if loads_after:
            model.load_state_dict(loaded)
        for number in range(2):
            step(model, inner, [group.rank], number)
            local.step()
        return list(module.parameters())

    changes = []
    for rank in range(2):
        module = network(7)
        inner = torch.optim.SGD(module.parameters(), lr=0.05)
        for number in range(2):
            step(module, inner, [rank], number)
        parts = zip(module.parameters(), loaded.values(), strict=True)
        changes.append([after.detach() - before for after, before in parts])
    for got in world(2).run(body):
        for one, before, *both in zip(got, loaded.values(), *changes, strict=True):
            first = 0.7 * (1 + 0.9) * sum(both) / 2  # Nesterov's first step
            torch.testing.assert_close(one, before + first, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_settings_of_groups_come_back_with_a_checkpoint(world, mode):
    """prime-rl#3561: tensors were restored, and settings and counters were not."""

    def body(group):
        first = habits.wrap(network(), group, mode)
        optimizer = optim.FusedAdamW(first.parameters(), lr=0.125, betas=(0.5, 0.7))
        for number in range(3):
            step(first, optimizer, [group.rank], number)
        saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
        second = habits.wrap(network(9), group, mode)
        resumed = optim.FusedAdamW(second.parameters(), lr=0.75)
        second.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.param_groups[0]["lr"] == 0.125
        assert resumed.param_groups[0]["betas"] == (0.5, 0.7)
        for model, each in ((first, optimizer), (second, resumed)):
            step(model, each, [group.rank], 3)
        assert all(map(torch.equal, first.module.parameters(), second.module.parameters()))

    world(2).run(body)


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_one_scaler_for_two_optimizers(world, mode):
    """neosr#50: an overflow in one of them, on one rank, skips its step and no other."""
    wanted = network(), network(1)
    for number in range(4):
        for which, module in enumerate(wanted):
            if (which, number) != (1, 1):
                step(module, habits.optimizer_for(module), [0, 1], number)

    def body(group):
        models = [habits.wrap(network(seed), group, mode) for seed in range(2)]
        optimizers = [habits.optimizer_for(model, mode) for model in models]
        scaler = optim.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            for which, model in enumerate(models):
                optimizers[which].zero_grad()
                loss = loss_of(model, group.rank, number)
                overflows = (which, number, group.rank) == (1, 1, 1)
                scaler.scale(loss * float("inf") if overflows else loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        for model, module in zip(models, wanted, strict=True):
            assert_alike(model.module, module)
        assert scaler.get_scale() == 512

    world(2).run(body)


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_groups_that_come_later_and_lie_between(world, mode):
    """fairscale#310, pytorch#54736: groups do not follow the order of the module."""

    def groups_of(module):
        parameters = list(module.parameters())
        return [{"params": parameters[::2]}], {"params": parameters[1::2], "lr": 0.03}

    def train(module, call, make, ranks):
        first, later = groups_of(module)
        optimizer = make(first, lr=habits.RATE, momentum=0.9)
        model = call(module)  # after the optimizer
        for number in range(5):
            if number == 2:
                optimizer.add_param_group(later)
            if number == 4:
                saved = optimizer.state_dict()
                again, second = groups_of(module)
                optimizer = make([*again, second], lr=1.0)
                optimizer.load_state_dict(saved)
            module.zero_grad()
            for rank in ranks:
                (loss_of(model, rank, number) / len(ranks)).backward()
            optimizer.step()

    wanted = network()
    train(wanted, lambda module: module, torch.optim.SGD, [0, 1])

    def body(group):
        module = network()
        wrap = lambda module: habits.wrap(module, group, mode)  # noqa: E731
        train(module, wrap, optim.FusedSGD, [group.rank])
        assert_alike(module, wanted)

    world(2).run(body)
