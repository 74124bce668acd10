"""If a rank stops answering, the others raise Timeout, which names it."""

import os
import signal
import time

import helpers
import pytest
import torch

import pycomm

PATIENCE = 1.5


def endless(group, algorithm, elements, ready):
    """Runs operations until an error; returns it, its time, and if the group refuses more."""
    x = torch.ones(elements)
    pycomm.all_reduce(x, "max", algorithm=algorithm, group=group)
    (ready / str(group.rank)).touch()
    try:
        while True:
            pycomm.all_reduce(x, "max", algorithm=algorithm, group=group)
    except pycomm.CollectiveError as error:
        at = time.monotonic()
        with pytest.raises(pycomm.GroupUnusable, match="has failed"):
            pycomm.all_reduce(x, group=group)
        return error, at


@pytest.mark.parametrize(
    ("algorithm", "size", "elements"),
    [("one_shot", 2, 1), ("two_shot", 3, 1 << 18), ("ring", 4, 4096), ("tree", 4, 1 << 20)],
)
def test_a_stopped_rank_is_named_and_raises_when_it_wakes(algorithm, size, elements, tmp_path):
    sleeper = size - 1
    arguments = ({"timeout": PATIENCE}, algorithm, elements, tmp_path)
    with helpers.Ranks(size, helpers.in_group, endless, *arguments) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == size)
        time.sleep(0.1)  # wherever this falls
        stopped_at = ranks.signal(sleeper, signal.SIGSTOP)
        others = ranks.wait_for(rank for rank in range(size) if rank != sleeper)
        ranks.signal(sleeper, signal.SIGCONT)
        outcomes = ranks.join()
    for outcome in others:
        error, at = outcome.value
        assert type(error) is pycomm.Timeout, outcome
        assert (error.rank, error.pid) == (sleeper, outcomes[sleeper].pid)
        assert f"rank {sleeper}" in str(error)
        assert at - stopped_at <= PATIENCE + 1
    assert isinstance(outcomes[sleeper].value[0], pycomm.CollectiveError)


def oversleep(group, flag):
    """The last rank stops itself before it enters an operation on tensors in the window."""
    x = group.empty(1 << 16).fill_(1)
    pycomm.all_reduce(x, algorithm="two_shot", group=group)
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = None
    try:
        pycomm.all_reduce(x, algorithm="two_shot", group=group)
    except pycomm.CollectiveError as caught:
        error = caught
    if group.rank == group.size - 1:
        return type(error).__name__
    # The memory is this rank's own again.
    x.fill_(-1)
    with open(f"{flag}{group.rank}", "w"):  # noqa: PTH123
        pass
    deadline = time.monotonic() + 20
    while not os.path.exists(f"{flag}done") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.01)
    return type(error).__name__, bool((x == -1).all())


def test_a_late_sleeper_writes_nothing_into_others_tensors(tmp_path):
    flag = str(tmp_path / "flag")
    with helpers.Ranks(3, helpers.in_group, oversleep, {"timeout": 1.0}, flag) as ranks:
        helpers.wait_until(lambda: (tmp_path / "flag0").exists() and (tmp_path / "flag1").exists())
        ranks.signal(2, signal.SIGCONT)
        (sleeper,) = ranks.wait_for([2])
        (tmp_path / "flagdone").touch()
        outcomes = ranks.join()
    assert sleeper.value in ("Timeout", "PeerDied"), sleeper
    assert [outcome.value for outcome in outcomes[:2]] == [("Timeout", True)] * 2


def test_a_rank_that_never_comes(world):
    local_world = world(3, timeout=0.5)
    start = time.monotonic()

    def body(group):
        if group.rank == 1:
            time.sleep(1.2)
            return None
        with pytest.raises(pycomm.Timeout, match=r"rank 1 .*did not answer within") as caught:
            pycomm.barrier(group=group)
        return caught.value.rank, time.monotonic() - start

    for rank, took in (pair for pair in local_world.run(body) if pair):
        assert rank == 1
        assert 0.5 <= took <= 1.5


def test_slow_is_not_dead(world):
    """A rank may take its time, as long as it is less than the timeout."""
    local_world = world(2, timeout=5)

    def body(group):
        x = torch.ones(10)
        for _ in range(3):
            time.sleep(0.3 * group.rank)
            pycomm.all_reduce(x, group=group)
        return x[0].item()

    assert local_world.run(body) == [8.0, 8.0]
