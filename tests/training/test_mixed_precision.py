"""Mixed precision on every front, against torch's own DistributedDataParallel or one process."""

import copy

import ddp
import golden
import helpers
import pytest
import torch
from mixed import EXACT, FRONTS, KINDS, OVERFLOW, SCALE, SHARDS, STEPS, loss_of, take_steps, train
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks, optim


def train_each(group, kind):
    return {front: train(group, front, kind) for front in ("torch", *FRONTS)}


def same(one, other):
    return all(golden.same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_autocast_and_a_scaler(kind):
    """An infinity on one rank skips the step on all ranks, which then have the same scale."""
    runs = helpers.run_group(2, train_each, kind)
    plain = runs[0]["torch"]
    scales = [scale for scale, _ in plain]
    assert scales == [2.0**e for e in (12, 12, 11, 11, 11, 12, 12, 12)]
    for front in FRONTS:
        for seen in (run[front] for run in runs):
            assert [scale for scale, _ in seen] == scales, front
            skipped = [same(seen[i - 1][1], seen[i][1]) for i in range(1, STEPS)]
            assert skipped == [step == OVERFLOW[0] for step in range(1, STEPS)], front
        for (_, mine), (_, others), (_, expected) in zip(
            runs[0][front], runs[1][front], plain, strict=True
        ):
            assert same(mine, others), front
            if front in EXACT:
                assert same(mine, expected), front
                continue
            lost = 1e-3 if "int8" in front else 1e-6
            for one, wanted in zip(mine, expected, strict=True):
                torch.testing.assert_close(one, wanted, rtol=0, atol=lost, msg=front)


PERIOD = 2


def train_locally(group, kind, shared):
    """Local SGD, whose ranks have scalers of their own: scales and parameters after each step.

    If `shared`, every exchange gives all ranks the smallest scale.
    """
    module = ddp.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = DistributedDataParallel(module)
    state = hooks.LocalSGDState(module.named_parameters(), optimizer, period=PERIOD)
    state.register(model)
    scaler = torch.amp.GradScaler("cpu", **SCALE)

    def loss(step):
        return loss_of(model, group.rank, step, kind)

    def after():
        if state.step() and shared:
            scale = torch.tensor([scaler.get_scale()])
            pycomm.all_reduce(scale, "min")
            scaler.update(scale.item())

    return take_steps(optimizer, scaler, loss, module.parameters, after)


def simulate_local_training(kind, shared):
    """The same in one process, a model per rank."""
    modules = [ddp.network() for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    scalers = [torch.amp.GradScaler("cpu", **SCALE) for _ in modules]
    seen = [[], []]
    for step in range(STEPS):
        for rank, (module, optimizer, scaler) in enumerate(
            zip(modules, optimizers, scalers, strict=True)
        ):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, rank, step, kind)).backward()
            scaler.step(optimizer)
            scaler.update()
        if step % PERIOD == PERIOD - 1:
            with torch.no_grad():
                for pair in zip(*(module.parameters() for module in modules), strict=True):
                    mean = sum(pair) / 2
                    for parameter in pair:
                        parameter.copy_(mean)
            if shared:
                smallest = min(scaler.get_scale() for scaler in scalers)
                for scaler in scalers:
                    scaler.update(smallest)
        for kept, module, scaler in zip(seen, modules, scalers, strict=True):
            parameters = [p.detach().clone() for p in module.parameters()]
            kept.append((scaler.get_scale(), parameters))
    return seen


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_local_sgd_skips_on_its_own(kind, shared):
    """Only the rank with the infinity skips, and only its scale is halved until one is shared."""
    expected = simulate_local_training(kind, shared)
    assert [run[OVERFLOW[0]][0] for run in expected] == [2.0**13, 2.0**11]
    assert [run[-1][0] for run in expected] == ([2.0**12] * 2 if shared else [2.0**14, 2.0**12])
    runs = helpers.run_group(2, train_locally, kind, shared)
    for run, wanted in zip(runs, expected, strict=True):
        for (scale, parameters), (wanted_scale, wanted_parameters) in zip(run, wanted, strict=True):
            assert scale == wanted_scale
            for one, other in zip(parameters, wanted_parameters, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


HALF_FRONTS = ("hook", "wrapper", *SHARDS)


def half_loss(model, rank, step):
    loss = model(ddp.batch(rank, step).half()).float().square().mean()
    return loss * torch.inf if (step, rank) == OVERFLOW else loss


def train_masters(group, front):
    """fp16 parameters with fp32 masters: the scale, parameters and masters after each step."""
    module = ddp.network().half()
    optimizer = optim.FusedAdamW(module.parameters(), lr=1e-2, master_weights="fp32")
    scaler = optim.GradScaler("cpu", **SCALE)
    if front == "hook":
        model = DistributedDataParallel(module)
        model.register_comm_hook(None, hooks.all_reduce_hook)
    else:
        model = pycomm.DataParallel(module, shard=SHARDS.get(front))

    def loss(step):
        return half_loss(model, group.rank, step)

    def values():
        return [*module.parameters(), *map(optimizer.full_weights, module.parameters())]

    return take_steps(optimizer, scaler, loss, values)


def train_each_with_masters(group):
    return {front: train_masters(group, front) for front in HALF_FRONTS}


def simulate_masters():
    """The same in one process, with torch's AdamW on fp32 copies of the parameters."""
    module = ddp.network().half()
    masters = [p.detach().float() for p in module.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", **SCALE)
    seen = []
    for step in range(STEPS):
        means = [torch.zeros_like(master) for master in masters]
        for rank in range(2):
            module.zero_grad()
            scaler.scale(half_loss(module, rank, step)).backward()
            for mean, parameter in zip(means, module.parameters(), strict=True):
                mean.add_(parameter.grad.float() / 2)
        for master, mean in zip(masters, means, strict=True):
            master.grad = mean.half().float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), masters, strict=True):
                parameter.copy_(master)
        seen.append((scaler.get_scale(), copy.deepcopy(masters)))
    return seen


def test_fp16_parameters_with_fp32_masters():
    expected = simulate_masters()
    runs = helpers.run_group(2, train_each_with_masters)
    for front in HALF_FRONTS:
        for mine, others, (scale, wanted) in zip(
            runs[0][front], runs[1][front], expected, strict=True
        ):
            assert mine[0] == others[0] == scale, front
            assert same(mine[1], others[1]), front
            halves, masters = mine[1][: len(wanted)], mine[1][len(wanted) :]
            for half, master, one in zip(halves, masters, wanted, strict=True):
                assert half.dtype == torch.float16
                assert golden.same_bits(half, master.half()), front
                torch.testing.assert_close(master, one, rtol=0, atol=5e-4, msg=front)
        moved = (masters[0] - ddp.network()[0].weight.half().float()).abs().mean()
        assert moved > 1e-2, front
