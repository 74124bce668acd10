"""Reports about gradients of gradients, and about gradients that users make; see README.md."""

import habits
import pytest
import torch
from habits import MODES, SHARDED, assert_alike, batch, loss_of, network
from torch.nn import functional

import pycomm


def penalty(model, data):
    """The mean squared distance from 1 of the gradient norms at `data`, as in Wasserstein GANs."""
    data = data.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(data).sum(), data, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_penalty_alone(world, mode, set_to_none):
    """stylegan2-pytorch#48: no output of the model is part of the loss."""
    wanted = habits.alone(network, lambda m, r, s: [penalty(m, batch(r, s))])

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            penalty(model, batch(group.rank, step)).backward()
            optimizer.step()
        assert_alike(model.module, wanted, mode)

    world(2).run(body)


def critic_loss(model, rank, number, order):
    parts = {
        "real": lambda: -model(batch(rank, 10 * number)).mean(),
        "fake": lambda: model(batch(rank, 10 * number + 1)).mean(),
        "penalty": lambda: penalty(model, batch(rank, 10 * number + 2)),
    }
    return sum(parts[name]() for name in order)


ORDERS = (("real", "fake", "penalty"), ("penalty", "real", "fake"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_penalty_in_a_step_of_several_backwards(world, mode, order):
    """PyTorch-StudioGAN#176: only the last backward of a step counted with shard="gradients"."""
    wanted = habits.alone(
        network, lambda m, r, s: [critic_loss(m, r, 2 * s + k, order) for k in range(2)]
    )

    def backward(model, rank, step):
        for part in range(2):
            critic_loss(model, rank, 2 * step + part, order).backward()

    habits.check_training(world, mode, wanted, backward)


def test_a_penalty_that_would_add_to_divided_gradients_raises(world):
    """stylegan2-pytorch#48 with two backwards in a step; after reduce_gradients() it is right."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, s), penalty(m, batch(r, s))])

    def body(group):
        model = habits.wrap(network(), group, "gradients")
        optimizer = habits.optimizer_for(model, "gradients")
        loss_of(model, group.rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"call reduce_gradients\(\)"):
            penalty(model, batch(group.rank, 0)).backward()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            model.reduce_gradients()
            penalty(model, batch(group.rank, step)).backward()
            optimizer.step()
        assert_alike(model.module, wanted)

    world(2).run(body)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("place", ["between backwards", "before the step"])
@pytest.mark.parametrize("mode", MODES)
def test_looking_at_slopes_changes_nothing(world, mode, place, create_graph):
    """understanding-fast-adv-training#3: slopes at the inputs, with and without a graph."""

    def train(group, looks):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)

        def look():
            data = batch(group.rank, 99).requires_grad_()
            torch.autograd.grad(model(data).sum(), data, create_graph=create_graph)

        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, group.rank, 2 * step).backward()
            if looks and place == "between backwards":
                look()
            loss_of(model, group.rank, 2 * step + 1).backward()
            if looks and place == "before the step":
                look()
            optimizer.step()
        return list(model.module.parameters())

    wanted = world(2).run(train, False)
    for got, expected in zip(world(2).run(train, True), wanted, strict=True):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_tasks_from_norms_of_gradients(world, mode):
    """GradNorm#6: gradients of each task for one layer, before the backward of their sum."""

    def loss(model, rank, step):
        outputs = model(batch(rank, step))
        tasks = outputs[:, :2].square().mean(), outputs[:, 2:].abs().mean()
        layer = getattr(model, "module", model)[2].weight
        norms = [torch.autograd.grad(t, layer, retain_graph=True)[0].norm() for t in tasks]
        return tasks[0] * norms[1] + tasks[1] * norms[0]

    wanted = habits.alone(network, lambda m, r, s: [loss(m, r, s)])

    habits.check_training(world, mode, wanted, lambda m, r, s: loss(m, r, s).backward())


def climb(module):
    """The first half of a step of sharpness-aware minimization; returns what it has changed."""
    parameters = list(module.parameters())
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.05 / float(norm))
    return before


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_each_rank_climbs_on_its_own_gradients(world, mode, forward_inside):
    """sam#78, fairscale#989: the first of two backwards is each rank's own."""

    def steps_alone():
        module = network()
        optimizer = habits.optimizer_for(module)
        for step in range(3):
            sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
            for rank in range(2):
                twin = habits.network()
                twin.load_state_dict(module.state_dict())
                loss_of(twin, rank, step).backward()
                climb(twin)
                twin.zero_grad()
                loss_of(twin, rank, step).backward()
                for total, parameter in zip(sums, twin.parameters(), strict=True):
                    total += parameter.grad / 2
            for total, parameter in zip(sums, module.parameters(), strict=True):
                parameter.grad = total
            optimizer.step()
        return module

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            if forward_inside:
                with model.no_sync():
                    loss_of(model, group.rank, step).backward()
            else:
                loss = loss_of(model, group.rank, step)
                with model.no_sync():
                    loss.backward()
            before = climb(model.module)
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            with torch.no_grad():
                for parameter, old in zip(model.module.parameters(), before, strict=True):
                    parameter.copy_(old)
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model.module, wanted, mode)

    wanted = steps_alone()
    world(2).run(body)


def contrast(images, texts):
    scores, numbers = images @ texts.T, torch.arange(len(images))
    both = functional.cross_entropy(scores, numbers), functional.cross_entropy(scores.T, numbers)
    return sum(both) / 2


@pytest.mark.parametrize("mode", MODES)
def test_gathered_features_have_gradients_of_the_right_size(world, mode):
    """open_clip#616, pytorch-metric-learning#363, lightly#1977."""

    def features(model, rank, step):
        data = batch(rank, step)
        return model(torch.cat([data, data + 0.2])).chunk(2)

    def loss_alone(module, rank, step):
        if rank == 1:
            return []
        parts = zip(*(features(module, each, step) for each in range(2)), strict=True)
        return [2 * contrast(*map(torch.cat, parts))]

    wanted = habits.alone(network, loss_alone)

    def gather(part, group):
        whole = torch.ops.pycomm.all_gather(part.contiguous(), group.size, group.name)
        return whole.reshape(-1, 4)

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad()
            parts = features(model, group.rank, step)
            contrast(*(gather(part, group) for part in parts)).backward()
            optimizer.step()
        assert_alike(model.module, wanted, mode)

    world(2).run(body)


def clipped_sums(module, rank, step):
    """Gradients of single samples, clipped and added up, as differential privacy needs them."""
    values = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values, sample):
        return torch.func.functional_call(module, values, (sample[None],)).square().mean()

    data = batch(rank, step)
    single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, data)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in single.values()]).norm(dim=0)
    factors = (0.1 / norms).clamp(max=1) / len(data)
    return [torch.einsum("b,b...->...", factors, g) for g in single.values()]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_single_samples_that_the_user_averages(world, mode):
    """opacus#191: gradients are assigned, so that no backward averages them."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            made = clipped_sums(model.module, group.rank, step)
            for parameter, gradient in zip(model.module.parameters(), made, strict=True):
                parameter.grad = pycomm.all_reduce(gradient, "avg", group=group)
            optimizer.step()
        assert_alike(model.module, wanted)

    wanted = network()
    optimizer = habits.optimizer_for(wanted)
    for step in range(3):
        made = [clipped_sums(wanted, rank, step) for rank in range(2)]
        for parameter, *both in zip(wanted.parameters(), *made, strict=True):
            parameter.grad = sum(both) / 2
        optimizer.step()
    world(2).run(body)


@pytest.mark.parametrize("mode", SHARDED)
def test_assigned_gradients_that_nobody_has_averaged(world, mode):
    """opacus#191, and the all-reduce is forgotten."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        made = clipped_sums(model.module, group.rank, 0)
        for parameter, gradient in zip(model.module.parameters(), made, strict=True):
            parameter.grad = gradient
        with pytest.raises(pycomm.CollectiveError, match=r"assigned gradients.*must be averages"):
            optimizer.step()

    world(2).run(body)


@pytest.mark.parametrize("mode", ["optimizer", "gradients"])
def test_gradients_that_are_replaced_after_backward_raise(world, mode):
    """opacus#191: noisy gradients take the place of those of backward."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        loss_of(model, group.rank, 0).backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + group.rank)
        with pytest.raises(RuntimeError, match=r"call reduce_gradients\(\)"):
            optimizer.step()

    world(2).run(body)


@pytest.mark.parametrize("mode", ["plain", *SHARDED])
def test_lbfgs_with_the_mean_loss(world, mode):
    """mace#1639: ranks search along the same line only if they see the same loss."""
    options = {"lr": 0.1, "max_iter": 5, "line_search_fn": "strong_wolfe"}

    @torch.no_grad()
    def mean_loss(module):
        return sum(loss_of(module, rank, 0) for rank in (0, 1)) / 2

    def closure_for(module, optimizer, ranks, finish):
        def closure():
            optimizer.zero_grad()
            loss = sum(loss_of(module, rank, 0) for rank in ranks) / len(ranks)
            loss.backward()
            return finish(loss.detach())

        return closure

    wanted = network()
    optimizer = torch.optim.LBFGS(wanted.parameters(), **options)
    optimizer.step(closure_for(wanted, optimizer, [0, 1], lambda loss: loss))

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = torch.optim.LBFGS(model.parameters(), **options)

        def finish(loss):
            model.reduce_gradients()
            return pycomm.all_reduce(loss, "avg", group=group)

        optimizer.step(closure_for(model, optimizer, [group.rank], finish))
        if "int8" in mode:  # its estimates of curvature, and so its steps, are others
            assert mean_loss(model.module) < mean_loss(network()) / 10
        else:
            assert_alike(model.module, wanted)
        habits.assert_same_on_all_ranks(model, group)

    world(2).run(body)
