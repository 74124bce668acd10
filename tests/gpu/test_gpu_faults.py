"""A killed peer, a rank that does not come in time, and an abort, on real devices."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import forked
import helpers
import pytest
import torch

import pycomm

pytestmark = pytest.mark.gpu

SIZE = 3


def fail(rank: int, size: int, store: str, how: str, folder: str) -> tuple[Exception, float]:
    """Returns the error of a rank and its time; afterwards the device still works."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=10)
    tensor = torch.ones(1 << 18, device="cuda")
    pycomm.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    Path(folder, str(rank)).touch()
    if rank == 1 and how == "abort":
        threading.Timer(0.2, group.abort).start()
    try:
        while True:
            if rank == 1 and how == "late":
                time.sleep(15)
            pycomm.all_reduce(tensor, "avg", group=group)
            torch.cuda.synchronize()
            group.check()
    except pycomm.CollectiveError as error:
        at = time.monotonic()
        assert torch.ones(3, device="cuda").sum().item() == 3
        return error, at


def steps_until_stop(rank: int, size: int, store: str) -> int:
    """Rank 1 gets SIGTERM in step 3; the step in which this rank learns it."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with helpers.member(rank, size, store, timeout=60) as group:
        tensor = torch.ones(1 << 12, device="cuda")
        for step in itertools.count():
            pycomm.all_reduce(tensor, "avg", group=group)
            if group.stop_requested():
                assert tensor.sum().item() == 1 << 12
                return step
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError


def test_all_ranks_stop_in_the_same_step() -> None:
    assert helpers.run_ranks(SIZE, steps_until_stop) == [4] * SIZE


@pytest.mark.parametrize(
    ("how", "kind"),
    [("kill", pycomm.PeerDied), ("late", pycomm.Timeout), ("abort", pycomm.Aborted)],
)
def test_every_rank_learns_who_failed(tmp_path: Path, how: str, kind: type) -> None:
    with helpers.Ranks(SIZE, fail, how, str(tmp_path)) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == SIZE, limit=60)
        began = ranks.signal(1, signal.SIGKILL) if how == "kill" else time.monotonic()
        for outcome in ranks.wait_for([0, 2]):
            assert outcome.error is None, outcome.trace
            error, at = outcome.value
            assert type(error) is kind
            assert how == "late" or error.rank == 1
            assert at - began < (20 if how == "late" else 9)  # 10 s are the timeout


def test_a_forked_child_gives_the_group_up() -> None:
    """Its copies of the threads that watch kernels never run."""

    def total(group: pycomm.Group) -> float:
        return pycomm.all_reduce(torch.ones(3, device="cuda"), group=group).sum().item()

    with pycomm.LocalWorld(2) as world:
        assert world.run(total) == [6, 6]
        forked.in_child(world.close)
        assert world.run(total) == [6, 6]


def go_on(group: pycomm.Group) -> tuple[float, float]:
    """Fails, shrinks the group, and adds up on the device and on the host."""
    device = torch.device("cuda", group.rank % torch.cuda.device_count())
    tensor = torch.ones(1 << 16, device=device)
    try:
        while True:
            pycomm.all_reduce(tensor, "avg", group=group)
            group.should_commit()
    except pycomm.PeerDied:
        smaller = group.shrink()
    sums = pycomm.all_reduce(tensor.fill_(1 + smaller.rank), group=smaller)
    torch.cuda.synchronize(device)
    smaller.check()
    assert sums.min() == sums.max()
    return sums[0].item(), pycomm.all_reduce(torch.ones(1), group=smaller).item()


def test_threads_go_on_in_a_smaller_group() -> None:
    def body(group: pycomm.Group) -> tuple[float, float] | None:
        if group.rank == 1:
            device = torch.device("cuda", 1 % torch.cuda.device_count())
            pycomm.all_reduce(torch.ones(1 << 16, device=device), "avg", group=group)
            group.close()
            return None
        return go_on(group)

    with pycomm.LocalWorld(SIZE, timeout=20) as world:
        assert world.run(body) == [(3.0, 2.0), None, (3.0, 2.0)]


def survive(rank: int, size: int, store: str, folder: str) -> tuple[float, float]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20)
    pycomm.all_reduce(torch.ones(4, device="cuda"), group=group)
    torch.cuda.synchronize()
    Path(folder, str(rank)).touch()
    return go_on(group)


def test_processes_go_on_in_a_smaller_group(tmp_path: Path) -> None:
    with helpers.Ranks(SIZE, survive, str(tmp_path)) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == SIZE, limit=60)
        ranks.signal(1, signal.SIGKILL)
        for outcome in ranks.wait_for([0, 2]):
            assert outcome.value == (3.0, 2.0), outcome.trace
