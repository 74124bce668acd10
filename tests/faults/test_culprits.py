"""Several things go wrong at once: all ranks name the same culprit for the same reason."""

import random
import signal
import threading

import helpers
import pytest
import spanning
import torch

import pycomm


def culprit_of(group, attempt):
    with pytest.raises(pycomm.CollectiveError) as caught:
        attempt(group)
    return type(caught.value), caught.value.rank


def work_on(group, count=1000):
    while True:
        pycomm.all_reduce(torch.ones(count), group=group)


@pytest.mark.parametrize("nodes", [None, [1, 1], [1, 2, 1]])
def test_two_ranks_abort_at_once(world, nodes):
    """Each node has heard of its own rank's abort first."""
    size = 3 if nodes is None else sum(nodes)
    for _ in range(3):
        local_world = world(size, nodes=nodes)
        barrier = threading.Barrier(2)

        def abort(rank):
            barrier.wait()  # noqa: B023
            local_world.groups[rank].abort()  # noqa: B023

        threads = [threading.Thread(target=abort, args=(rank,)) for rank in (0, size - 1)]
        for thread in threads:
            thread.start()
        found = set(local_world.run(culprit_of, work_on))
        for thread in threads:
            thread.join()
        assert len(found) == 1
        assert found <= {(pycomm.Aborted, 0), (pycomm.Aborted, size - 1)}
        local_world.close()


def test_a_mismatch_and_an_abort(world):
    rng = random.Random(0)
    for _ in range(30):
        local_world = world(3)
        timer = threading.Timer(rng.uniform(0, 0.002), local_world.groups[2].abort)
        timer.start()
        found = local_world.run(culprit_of, lambda group: work_on(group, 10 + group.rank))
        timer.join()
        assert len(set(found)) == 1
        local_world.close()


def say_who(group, folder):
    (folder / str(group.rank)).touch()
    return culprit_of(group, work_on)


@pytest.mark.parametrize("nodes", [[4], [2, 2], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_are_killed_at_once(tmp_path, seed, nodes):
    """Also if each node has lost one of its own ranks."""
    # Of [1, 2, 1], rank 1 is the only one through which rank 2 can hear of the others.
    victims = random.Random(seed).sample([0, 2, 3] if len(nodes) == 3 else range(4), 2)
    with spanning.ranks(nodes, say_who, tmp_path, timeout=60.0) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
        outcomes = ranks.wait_for(rank for rank in range(4) if rank not in victims)
    found = {outcome.value for outcome in outcomes}
    assert len(found) == 1, outcomes
    assert found <= {(pycomm.PeerDied, victim) for victim in victims}
