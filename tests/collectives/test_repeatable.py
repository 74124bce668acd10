"""The same bits on every rank and in every run, at any timing, also when epochs wrap around."""

import hashlib
import time

import golden
import helpers
import pytest
import sweep
import torch

import pycomm


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(golden.bits(tensor).numpy().tobytes())
    return sha.hexdigest()


def reduce_everything(group, run, delays):
    """A fixed sequence of operations; `run` only shifts the delays."""
    results = []
    turn = 0
    for algorithm in (*sweep.ALGORITHMS, "auto"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for count in (3, 1000, 20_011):
                turn += 1
                if delays and (turn * 7 + group.rank * 3 + run) % 5 == 0:
                    time.sleep(0.001 * ((turn + run) % 3))
                x = sweep.Case(algorithm, "sum", dtype, count).input(group.rank)
                results.append(pycomm.all_reduce(x, "avg", algorithm=algorithm, group=group))
    return digest(results)


LONG = pytest.mark.slow


@pytest.mark.parametrize("runs", [6, pytest.param(20, marks=LONG)])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_runs_with_and_without_delays(world, size, runs):
    hashes = set()
    for run in range(runs):
        local_world = world(size, staging_bytes=1 << 16)
        hashes |= set(local_world.run(reduce_everything, run, run % 2 == 1))
    assert len(hashes) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_processes_give_the_bits_of_threads(world, size):
    threads = world(size, staging_bytes=1 << 16).run(reduce_everything, 0, False)
    processes = helpers.run_group(size, reduce_everything, 1, True, staging_bytes=1 << 16)
    assert len({*threads, *processes}) == 1


def test_deterministic_has_one_order_for_all_sizes(world):
    """auto, one_shot and two_shot agree on every bit, also at the sizes where auto switches."""

    def body(group):
        seen = set()
        for algorithm in ("auto", "one_shot", "two_shot"):
            results = []
            for count in (1, 1024, 1025, 4096, 4097, 8192, 8193, 131_072):
                x = sweep.Case("", "sum", torch.float32, count).input(group.rank)
                pycomm.all_reduce(x, algorithm=algorithm, deterministic=True, group=group)
                results.append(x)
            seen.add(digest(results))
        return seen

    for size in (2, 4, 5):
        seen = set.union(*world(size).run(body))
        assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_flags_and_epochs_wrap(size):
    """They start a little below 2^32, and wrap in each operation and algorithm in turn."""
    for before in (1, 3, 1000):
        with pycomm.LocalWorld(
            size, 30, staging_bytes=sweep.small_staging(size), _first_epoch=2**32 - before
        ) as local_world:
            assert local_world.run(operate, before + 200) == [(True, 2**32 - before)] * size


@pytest.mark.parametrize(
    ("size", "worlds"),
    [(9, 80), (16, 40), pytest.param(9, 500, marks=LONG), pytest.param(16, 250, marks=LONG)],
)
def test_a_fresh_window_holds_nothing_that_passes_for_new(size, worlds):
    """Zeros look like future epochs; ranks must still wait for missing data."""

    def body(group):
        results = []
        for turn in range(2):
            x = torch.full((16,), 5 + turn)
            x = pycomm.all_reduce(x.float(), algorithm="one_shot", group=group)
            results.append(x.tolist() == [size * (5.0 + turn)] * 16)
        return all(results)

    for number in range(worlds):
        with pycomm.LocalWorld(size, 30, staging_bytes=1 << 14, _first_epoch=2**32 - 2000) as world:
            assert world.run(body) == [True] * size, f"world {number}"


def operate(group, turns):
    first = group._core.sequence
    right = True
    for turn in range(turns):
        x = torch.arange(turn % 300) + group.rank + turn
        expected = group.size * (torch.arange(turn % 300) + turn) + sum(range(group.size))
        kind = turn % 7
        if kind < 4:
            pycomm.all_reduce(x, algorithm=sweep.ALGORITHMS[kind], group=group)
        elif kind == 4:
            pycomm.broadcast(x, turn % group.size, group=group)
            expected = torch.arange(turn % 300) + turn % group.size + turn
        elif kind == 5:
            pycomm.barrier(group=group)
            expected = x
        else:
            y = group.empty(turn % 300, dtype=torch.int64).copy_(x)
            x = pycomm.all_reduce(y, algorithm=sweep.ALGORITHMS[1 + turn % 3], group=group)
        right = right and torch.equal(x, expected)
    # Numbers 0 and 1 are left out when it wraps.
    assert group._core.sequence == first + turns - 2**32 + 2
    return right, first
