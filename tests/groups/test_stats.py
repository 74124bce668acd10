"""Statistics count every operation, and tell what a wait was for."""

import math
import threading
import time

import helpers
import pytest
import torch

import pycomm
from pycomm.stats import Times


def rows_of(stats):
    return {(row.operation, row.codec, row.size): row for row in stats.operations}


def run_kinds(group):
    for _ in range(1000):
        pycomm.all_reduce(torch.ones(10), group=group)
    works = [pycomm.all_reduce(torch.ones(20_000), group=group, async_op=True) for _ in range(30)]
    for work in works:
        work.wait()
    for _ in range(7):
        pycomm.compressed_all_reduce(torch.ones(1 << 16), pycomm.Int8(), group=group)
        pycomm.compressed_all_reduce(torch.ones(1 << 16), pycomm.TopK(density=0.01), group=group)
    pycomm.all_gather(torch.ones(group.size * 100), torch.ones(100), group=group)
    pycomm.barrier(group=group)
    stats = group.stats()
    pycomm.barrier(group=group)
    return stats


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_counts(size):
    for rank, stats in enumerate(helpers.run_group(size, run_kinds)):
        assert (stats.rank, stats.size, sorted(stats.ranks)) == (rank, size, list(range(size)))
        counted = {key: (row.count, row.bytes) for key, row in rows_of(stats).items()}
        assert counted == {
            ("all_reduce", "none", 32): (1000, 40_000),
            ("all_reduce", "none", 65536): (30, 2_400_000),
            ("all_reduce", "int8", 1 << 18): (7, 7 << 18),
            ("all_reduce", "topk", 1 << 18): (7, 7 << 18),
            ("all_gather", "none", 256): (1, 400),
            ("barrier", "none", 0): (1, 0),
        }
        for (_, _, size_from), row in rows_of(stats).items():
            if size_from >= 65536:
                assert row.whole.count == row.exchange.count == row.count
            if row.whole.count:
                parts = row.late + row.transfer + row.contention
                assert math.isclose(parts, row.whole.mean, abs_tol=1e-12)
                assert 0 <= row.transfer <= row.exchange.mean
        assert "all_reduce, int8" in str(stats)


def test_what_was_not_timed_says_so(world):
    """The first operation is not sampled, and a single rank waits for nobody."""
    (group,) = world(1)
    pycomm.barrier(group=group)
    stats = group.stats()
    (row,) = stats.operations
    assert row.count == 1
    times = (row.p50, row.p99, row.late, row.transfer, row.contention, row.gb_per_s)
    assert all(map(math.isnan, times))
    assert "none was timed" in str(stats)
    assert "nan" not in str(stats)


def small_ones(group):
    for _ in range(20_000):
        pycomm.all_reduce(torch.ones(10), group=group)
    stats = group.stats()
    pycomm.barrier(group=group)
    return stats.operations[0]


@pytest.mark.slow
def test_samples_stand_for_all_small_operations():
    for row in helpers.run_group(2, small_ones):
        assert row.count == 20_000
        assert 0.9 < row.whole.count / row.count < 1.1


def measure(group):
    """The times of operations, from outside and by statistics."""
    clock = []
    for _ in range(200):
        pycomm.barrier(group=group)
        x = torch.ones(1 << 18)
        begin = time.perf_counter()
        pycomm.all_reduce(x, group=group)
        clock.append(time.perf_counter() - begin)
    stats = group.stats()
    pycomm.barrier(group=group)
    return clock, rows_of(stats)["all_reduce", "none", 1 << 20]


def test_quantiles_agree_with_a_clock_outside():
    for clock, row in helpers.run_group(2, measure):
        clock.sort()
        for told, outside in ((row.p50, clock[99]), (row.p99, clock[197])):
            # Every operation takes less time than its call. A bucket is off by up to 6 %.
            assert told < 1.07 * outside
        assert row.p50 > 0.3 * clock[99]
        assert 0.5 * sum(clock) < row.whole.seconds < sum(clock)
        assert 0.9 < row.gb_per_s * row.exchange.mean * 1e9 / (1 << 20) < 1.1


def be_late(group, count, async_op):
    for _ in range(20):
        if group.rank == 1:
            time.sleep(0.02)
        work = pycomm.all_reduce(torch.ones(count), group=group, async_op=async_op)
        if async_op:
            work.wait()
    stats = group.stats()
    group.should_commit()
    return stats


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_waits_for_a_late_rank_are_told_from_exchanges(count, async_op):
    early, late = helpers.run_group(2, be_late, count, async_op)
    early_row, late_row = (
        next(row for row in stats.operations if row.operation == "all_reduce")
        for stats in (early, late)
    )
    assert 0.014 < early_row.late < 1
    assert early_row.late > 0.5 * early_row.whole.mean
    assert late_row.late < 0.5 * early_row.late
    for stats in (early, late):
        # A rank that is ahead may ask before the others have counted the last operation.
        assert stats.ranks[0].blocked > 18 * 0.014
        assert stats.ranks[1].own > 18 * 0.0199
        assert stats.ranks[0].own < 0.5 * stats.ranks[1].own


def test_differences(world):
    def body(group):
        for _ in range(10):
            pycomm.all_reduce(torch.ones(20_000), group=group)
        group.should_commit()
        before = group.stats()
        for _ in range(3):
            pycomm.all_reduce(torch.ones(20_000), group=group)
        since = group.stats(before)
        again = group.stats()
        group.should_commit()
        return before, since, again

    for before, since, again in world(2).run(body):
        row = since.operations[0]
        assert len(since.operations) == 1
        assert row.count == row.whole.count == row.exchange.count == 3
        assert row.bytes == 240_000
        total = before.operations[0].whole.seconds + row.whole.seconds
        assert math.isclose(total, again.operations[0].whole.seconds, rel_tol=1e-3, abs_tol=1e-6)
        with pytest.raises(ValueError, match="earlier result of the same rank and group"):
            before.since(again)


def test_from_another_thread(world):
    """While operations run; not after close()."""
    local_world = world(2)
    group = local_world.groups[0]
    over, counts = threading.Event(), []

    def look():
        while not over.is_set():
            counts.append(sum(row.count for row in group.stats().operations))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        local_world.run(lambda g: [pycomm.barrier(group=g) for _ in range(2000)] and None)
    finally:
        over.set()
        thread.join()
    assert counts == sorted(counts)
    assert group.stats().operations[0].count == 2000
    group.close()
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        group.stats()


def test_failures_do_not_count(world):
    def body(group):
        if group.rank == 1:
            time.sleep(0.1)
            group.abort()
            return
        with pytest.raises(pycomm.Aborted):
            pycomm.barrier(group=group)
        assert group.stats().operations == ()

    world(2).run(body)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99, 1.0])
def test_quantiles(share):
    times = Times(0.0, {0: 10, 5: 80, 9: 10}, [float(i) for i in range(10)])
    every = [0.0] * 10 + [5.0] * 80 + [9.0] * 10
    assert times.quantile(share) == every[math.ceil(share * 100) - 1]
    assert math.isnan(Times(0.0, {}, []).quantile(share))


def test_nodes():
    """A rank sees the ranks of its own node."""

    def body(group):
        for _ in range(5):
            pycomm.all_reduce(torch.ones(5000), group=group)
        return group.stats()

    with pycomm.LocalWorld(3, nodes=[2, 1], timeout=20) as nodes:
        for rank, stats in enumerate(nodes.run(body)):
            assert rows_of(stats)["all_reduce", "none", 16384].count == 5
            assert (stats.size, sorted(stats.ranks)) == (3, [2] if rank == 2 else [0, 1])
