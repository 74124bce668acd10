"""A slow rank is named by its own time, and batches are suggested that balance the ranks."""

import time

import helpers
import pytest
import torch

import pycomm
from pycomm.stats import RankTimes, Stats, make_stats

STEPS = 50
STEP = 0.04  # seconds


def sleep_and_reduce(group, slow):
    """One rank needs 20 % more than 40 ms per step."""
    own = STEP * (1.2 if group.rank == slow else 1)
    for _ in range(STEPS):
        time.sleep(own)
        pycomm.all_reduce(torch.ones(10_000), group=group)
    stats = group.stats()
    group.should_commit()  # nobody closes the group before all have looked
    return stats


def check_names(stats, slow):
    """A busy machine adds to all ranks' own times, so that the score is more than 0.83."""
    score = stats.skew
    assert min(score, key=score.get) == slow
    assert 0.7 < score[slow] < 0.96
    assert all(score[rank] > score[slow] + 0.03 for rank in score if rank != slow)


@pytest.mark.parametrize("slow", [0, 2])
def test_processes(slow):
    for stats in helpers.run_group(3, sleep_and_reduce, slow):
        check_names(stats, slow)
        assert sum(row.count for row in stats.operations) == STEPS
        times = stats.ranks[stats.rank]
        assert 0.8 < (times.own + times.blocked) / (STEPS * STEP * 1.2) < 2


def test_threads(world):
    for stats in world(2).run(lambda group: sleep_and_reduce(group, 1)):
        check_names(stats, 1)


class Sleeping(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layers(torch.nn.Module):
    """A bucket per layer, whose exchange goes on while the layers before it compute."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def forward(self, x, seconds):
        for layer in self.layers:
            x = Sleeping.apply(layer(x), seconds / 4)
        return x


def train(group, slow, compression, wrap):
    module = Layers()
    if wrap:
        model = pycomm.DataParallel(
            module, group=group, compression=compression, bucket_cap_mb=0.2, feedback=False
        )
    else:
        model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.2)
        state = pycomm.hooks.CommState(compression, module.named_parameters(), group=group)
        model.register_comm_hook(state, pycomm.hooks.comm_hook)
    own = STEP * (1.2 if group.rank == slow else 1)
    for step in range(STEPS):
        if step == 5:
            before = group.stats()
        model(torch.ones(2, 256), own).sum().backward()
    stats = group.stats(before)
    group.should_commit()
    return stats


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("compression", [None, pycomm.Int8()])
def test_exchanges_that_overlap_backward(compression, wrap):
    """The worker waits for the slow rank at every bucket, the program only at the end."""
    for stats in helpers.run_group(2, train, 1, compression, wrap):
        check_names(stats, 1)
        codec = "none" if compression is None else "int8"
        rows = [row for row in stats.operations if row.codec == codec and row.size >= 1 << 17]
        assert sum(row.count for row in rows) >= 4 * (STEPS - 5)


def samples(own):
    return Stats(0, len(own), (), {r: RankTimes(seconds, 0.0) for r, seconds in enumerate(own)})


@pytest.mark.parametrize(
    ("own", "batches", "expected"),
    [
        ([1.0, 1.2], 33, (36, 30)),
        ([1.0, 1.0, 1.0], 5, (5, 5, 5)),
        ([3.0, 1.0], [30, 10], (20, 20)),  # equal speeds, unequal batches
        ([1.0, 1.0, 100.0], [1, 1, 1], (1, 1, 1)),  # nobody is left without any
        ([1.0, 2.0, 4.0], 7, (12, 6, 3)),
    ],
)
def test_suggestions(own, batches, expected):
    suggested = pycomm.suggest_batches(samples(own), batches)
    assert suggested == expected
    given = [batches] * len(own) if isinstance(batches, int) else batches
    assert sum(suggested) == sum(given)


def test_suggestions_of_any_sizes_keep_the_total():
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 40):
        own = (torch.rand(size, generator=generator) + 0.01).tolist()
        batches = torch.randint(1, 50, (size,), generator=generator).tolist()
        suggested = pycomm.suggest_batches(samples(own), batches)
        assert sum(suggested) == sum(batches)
        assert min(suggested) >= 1
        speeds = [n / seconds for n, seconds in zip(batches, own, strict=True)]
        for n, speed in zip(suggested, speeds, strict=True):
            ideal = sum(batches) * speed / sum(speeds)
            assert n <= max(ideal, 1) + 1


def balance(group):
    """Each sample takes 2 ms on rank 0 and 4 ms on rank 1."""
    cost = 0.002 * (group.rank + 1)
    batches, totals = [9, 9], []
    for _ in range(2):
        before = group.stats()
        for _ in range(10):
            time.sleep(batches[group.rank] * cost)
            pycomm.all_reduce(torch.ones(10_000), group=group)
        totals.append(group.skew(before))
        suggested = torch.tensor(pycomm.suggest_batches(group.stats(before), batches))
        pycomm.broadcast(suggested, 0, group=group)
        batches = suggested.tolist()
    return batches, totals


def is_balanced(outcome):
    batches, (before, after) = outcome
    return batches == [12, 6] and before[1] < 0.6 and min(after.values()) > 0.85


def test_suggested_batches_balance_the_ranks():
    """A busy machine may wake a rank late in some of the attempts."""
    attempts = (helpers.run_group(2, balance) for _ in range(8))
    assert any(all(map(is_balanced, outcomes)) for outcomes in attempts)


def test_bad_arguments(world):
    def body(group):
        return group.stats()

    stats, other = world(2).run(body)
    assert stats.skew == {}
    with pytest.raises(ValueError, match="timed, got none"):
        pycomm.suggest_batches(stats, 4)
    fine = samples([1.0, 2.0])
    for wrong in ([1, 2, 3], [0, 1], 0, [1.5, 2], 2.5, None):
        with pytest.raises(ValueError, match="batches must be 2 positive integers, got"):
            pycomm.suggest_batches(fine, wrong)
    with pytest.raises(TypeError, match=r"stats must come from group.stats\(\), got dict"):
        pycomm.suggest_batches({}, 4)
    part = Stats(0, 4, (), fine.ranks)
    with pytest.raises(ValueError, match="one node, got 2 of 4 ranks"):
        pycomm.suggest_batches(part, 4)
    with pytest.raises(ValueError, match="earlier"):
        stats.since(other)
    told = {"ranks": [(0, 0.0, 0.0)], "operations": [], "middles": []}
    assert make_stats(told, 0, 1).skew == {}
