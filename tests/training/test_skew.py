"""A slow rank is named by its own time."""

import time

import helpers
import pytest
import torch
from wrapping import data_parallel

import pycomm
from pycomm.stats import make_stats

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
        model = data_parallel(
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


def test_statistics_of_nothing(world):
    def body(group):
        return group.stats()

    stats, other = world(2).run(body)
    assert stats.skew == {}
    with pytest.raises(ValueError, match="earlier"):
        stats.since(other)
    told = {"ranks": [(0, 0.0, 0.0)], "operations": [], "middles": [], "memory": [0] * 60}
    assert make_stats(told, 0, 1).skew == {}
