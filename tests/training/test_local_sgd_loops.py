"""Local SGD in the training loops of others: scalers, accumulation, uneven data, buffers."""

import ddp
import golden
import helpers
import pytest
import torch
import wrapped
from averaging import DILOCO, Trainee
from torch import nn

import pycomm
from pycomm import optim

TOPK = pycomm.TopK(0.05, values=torch.bfloat16)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_gradients_accumulate(world):
    """With or without no_sync."""

    def body(group):
        weights = []
        for several in (True, False):
            trainee = Trainee(group)
            for step in range(2):
                trainee.optimizer.zero_grad()
                with trainee.model.no_sync() if several else torch.enable_grad():
                    trainee.backward(2 * step)
                trainee.backward(2 * step + 1)
                trainee.optimizer.step()
                trainee.state.step()
            weights.append(trainee.weights())
        return weights

    (one, two), (three, four) = world(2).run(body)
    assert wrapped.same(one, two)
    assert wrapped.same(two, three)
    assert wrapped.same(three, four)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_count(world, fused):
    """On one rank only, and at a step with an exchange: no rank waits in vain."""

    def body(group):
        made = optim.FusedSGD if fused else torch.optim.SGD
        trainee = Trainee(group, make_optimizer=lambda params: made(params, lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        changed = []
        for step in range(4):
            trainee.optimizer.zero_grad()
            given = ddp.gradients(trainee.model, group.rank, step)
            if (step, group.rank) == (1, 1):
                given["bias"][0] = torch.inf
            scaler.scale(trainee.model(given)).backward()
            before = trainee.weights()
            scaler.step(trainee.optimizer)
            scaler.update()
            changed.append(not golden.same_bits(before["wide"], trainee.weights()["wide"]))
            trainee.state.step()
        return changed, trainee.weights()

    (all_done, one), (one_skipped, other) = world(2).run(body)
    assert all_done == [True] * 4
    assert one_skipped == [True, False, True, True]
    assert wrapped.same(one, other)
    assert all(weights.isfinite().all() for weights in one.values())


def joined(group, front, steps, options):
    """Weights and residuals after a number of steps per rank, and weights after one more step."""
    options = {"period": 2, **options}
    trainee = Trainee(group, front, make_optimizer=plain_sgd, options=options)
    with (trainee.model if front == "wrapper" else trainee.state).join():
        trainee.run(range(steps[group.rank]))
    kept = trainee.state.state_dict()["differences"]["kept"][str(group.rank)]
    first = trainee.weights()
    trainee.step(0)  # steps are 8 now: an exchange
    return first, kept.get("residual", {}), trainee.weights()


@pytest.mark.parametrize("options", [{}, {"outer_lr": 0.5}, {"compression": TOPK}])
def test_ranks_may_run_out_of_batches(world, options):
    """Steps of plain SGD on gradients that do not depend on parameters: numbers by hand."""
    steps = [7, 3, 0]
    runs = world(3).run(joined, "wrapper", steps, options)
    assert all(wrapped.same(run[i], runs[0][i]) for run in runs for i in (0, 2))
    expected = {name: torch.zeros(shape).double() for name, shape in ddp.SHAPES.items()}
    for begin in (0, 2, 4, 6):
        done = [range(begin, min(begin + 2, n)) for n in steps]
        active = sum(len(part) > 0 for part in done)
        for rank, part in enumerate(done):
            for step in part:
                for name, gradient in ddp.gradients(ddp.Given(), rank, step).items():
                    expected[name] -= 0.1 * options.get("outer_lr", 1) * gradient.double() / active
    for name, weights in runs[0][0].items():
        to_come = sum(kept.get(name, torch.zeros(())) for _, kept, _ in runs) / 3
        whole = (weights + to_come).double()
        torch.testing.assert_close(whole, expected[name], rtol=1e-5, atol=1e-5)


def test_ranks_may_run_out_of_batches_under_the_hook(world):
    options = {"compression": TOPK}
    (one, *_), (other, *_) = helpers.run_group(2, joined, "hook", [7, 2], options)
    (expected, *_), _ = world(2).run(joined, "wrapper", [7, 2], options)
    assert wrapped.same(one, expected)
    assert wrapped.same(other, expected)


def test_ranks_that_have_run_out_stay_until_the_last_has(world):
    """Also if another rank exchanges twice in a row, the second time without steps."""

    def body(group):
        trainee = Trainee(group, options={"period": 3})
        with trainee.model.join():
            for step in range(5 if group.rank else 1):
                trainee.step(step)
                if group.rank:
                    assert trainee.state.exchange() == (step != 2)
                    assert not trainee.state.exchange()
        return trainee.weights(), trainee.state.steps, trainee.state.agreements

    (one, *counts), (other, *same_counts) = world(2).run(body)
    assert wrapped.same(one, other)
    assert counts == same_counts == [5, 5]


def test_a_rank_may_have_no_batches_after_a_resumed_warm_up(world):
    """Its wrapper has never seen a backward."""

    def body(group):
        options = {"period": 2, "gradient_steps": 1}
        trainee = Trainee(group, options=options)
        trainee.run(range(3))
        resumed = Trainee(group, options=options)
        resumed.module.load_state_dict(trainee.module.state_dict())
        resumed.state.load_state_dict(trainee.state.state_dict())
        with resumed.model.join():
            resumed.run(range(3, 3 + 2 * group.rank))
        return resumed.weights()

    one, other = world(2).run(body)
    assert wrapped.same(one, other)


class Normed(nn.Module):
    """A network with buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(40)

    def forward(self, x):
        return self.norm(x)


def test_buffers_are_the_first_ranks_after_an_exchange(world):
    def body(group):
        trainee = Trainee(group, module=Normed(), options={"period": 2})
        seen = []
        trainee.module.register_forward_pre_hook(
            lambda module, _: seen.append(module.norm.running_mean.clone())
        )
        trainee.run(range(4))
        return seen

    one, other = world(2).run(body)
    same = [golden.same_bits(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [True, False, True, False]


def test_buffers_are_the_first_ranks_after_uneven_batches(world):
    def body(group):
        trainee = Trainee(group, module=Normed(), options={"period": 1})
        with trainee.model.join():
            trainee.run(range(4 if group.rank else 2))
        return trainee.module.norm.running_mean, int(trainee.module.norm.num_batches_tracked)

    (one, seen), (other, told) = world(2).run(body)
    assert golden.same_bits(one, other)
    assert (seen, told) == (2, 2)


@pytest.mark.parametrize("options", [{}, {"compression": pycomm.Int8(), **DILOCO}])
def test_what_is_not_finite_reaches_all(world, options):
    """All ranks see it, and no residual is lost."""

    def body(group):
        trainee = Trainee(group, options={"period": 2, **options})
        trainee.run(range(3))
        with torch.no_grad():
            trainee.module.wide[7, 7] = torch.nan if group.rank else 0.0
        trainee.step(3)
        finite = {name: bool(w.isfinite().all()) for name, w in trainee.weights().items()}
        kept = trainee.state.state_dict()["differences"]["kept"][str(group.rank)]
        kept = kept.get("residual", {})
        assert all(residual.isfinite().all() for residual in kept.values())
        return finite

    for finite in world(2).run(body):
        assert finite == {name: name != "wide" for name in ddp.SHAPES}


def test_numbers_for_loggers(world):
    def body(group):
        trainee = Trainee(group, options={"period": 2, "compression": pycomm.Int8()})
        trainee.run(range(4))
        return trainee.state.stats()

    for stats in world(2).run(body):
        assert stats["steps"] == 2  # exchanges
        assert stats["ratio"] > 2
        assert stats["residual_norm"] > 0
