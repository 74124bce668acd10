"""Death and disagreement in the middle of compressed all-reduces: every survivor is told."""

import signal
import time
from pathlib import Path

import helpers
import pytest
import torch

import pycomm

COMPRESSIONS = {
    "int8": pycomm.Int8(),
    "stochastic": pycomm.Int8(4096, "stochastic"),
    "topk": pycomm.TopK(0.02),
}


def compress_for_ever(group, name, algorithm, under_way):
    x, residual = torch.randn(300_000), torch.zeros(300_000)
    while True:
        pycomm.compressed_all_reduce(
            x, COMPRESSIONS[name], residual=residual, algorithm=algorithm, group=group
        )
        if group.rank == 1:
            Path(under_way).touch()


def until_a_peer_is_gone(group, *arguments):
    """The error, its time, and the group's behaviour afterwards."""
    with pytest.raises(pycomm.PeerDied) as caught:
        compress_for_ever(group, *arguments)
    raised_at = time.monotonic()
    with pytest.raises(pycomm.GroupUnusable, match="died"):
        pycomm.compressed_all_reduce(torch.ones(9), pycomm.Int8(), group=group)
    return raised_at, caught.value.rank, caught.value.pid, caught.value.operation


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("int8", "two_shot"), ("int8", "ring"), ("stochastic", "tree"), ("topk", "auto")],
)
def test_a_kill_in_mid_operation(name, algorithm, tmp_path):
    under_way = tmp_path / "under way"
    arguments = (until_a_peer_is_gone, {"timeout": 30}, name, algorithm, str(under_way))
    with helpers.Ranks(3, helpers.in_group, *arguments) as ranks:
        helpers.wait_until(under_way.exists)
        victim = ranks.pids[1]
        killed_at = ranks.signal(1, signal.SIGKILL)
        survivors = ranks.wait_for([0, 2])
    for outcome in survivors:
        assert outcome.error is None, outcome.trace
        raised_at, rank, pid, operation = outcome.value
        assert (rank, pid, operation) == (1, victim, "all_reduce")
        assert raised_at - killed_at < 1


def test_a_rank_that_aborts_stops_the_others(world):
    """A rank that gives up before the lists are exchanged stops all ranks, and none hangs."""

    def body(group):
        if group.rank == 1:
            group.abort()
        with pytest.raises(pycomm.Aborted) as caught:
            pycomm.compressed_all_reduce(torch.ones(5000), pycomm.TopK(0.1), group=group)
        return caught.value.rank

    assert world(3).run(body) == [1, 1, 1]
