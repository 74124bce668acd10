"""Ranks that use two groups in different orders wait for ever: the error tells both waits."""

from __future__ import annotations

import contextlib
import re
import time

import helpers
import pytest
import torch
import torch.distributed as dist

import pycomm

TIMEOUT = 0.5


def summed(group: pycomm.Group, asynchronous: bool = False) -> None:
    x = torch.ones(4)
    work = pycomm.all_reduce(x, group=group, async_op=asynchronous)
    if asynchronous:
        work.wait()
    assert x[0] == group.size


def cross(first: pycomm.Group, second: pycomm.Group, asynchronous: bool = False) -> list[str]:
    """A rank's errors from the two groups; the last rank uses them in the other order."""
    summed(first)
    straight = first.rank < first.size - 1
    said = []
    for group in (first, second) if straight else (second, first):
        with pytest.raises(pycomm.Timeout) as caught:
            summed(group, asynchronous)
        said.append(str(caught.value))
        time.sleep(TIMEOUT)  # until the others have given up, too
    return said if straight else said[::-1]


def check(said: list[list[str]], names: list[list[str]]) -> None:
    """`said` and `names`: by rank, of the first and the second group."""
    culprit = len(said) - 1
    for rank, (messages, (first, second)) in enumerate(zip(said, names, strict=True)):
        told = re.escape(f"of group '{second}' in all_reduce, operation 1 of that group")
        waits = rf"rank {culprit} (waits for|has failed to meet) rank \d+ \(pid \d+\) {told}"
        assert re.search(waits, messages[0]), (rank, messages)
        assert f"this one, '{first}', in different orders" in messages[0], (rank, messages)


def cross_processes(group: pycomm.Group, asynchronous: bool) -> tuple[list[str], list[str]]:
    with pycomm.init(timeout=TIMEOUT) as other:
        return cross(group, other, asynchronous), [group.name, other.name]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_of_processes(size, asynchronous):
    outcomes = helpers.run_group(size, cross_processes, asynchronous, timeout=TIMEOUT)
    check(*zip(*outcomes, strict=True))


@pytest.mark.parametrize("size", [2, 5])
def test_of_threads(world, size):
    first, second = world(size, timeout=TIMEOUT), world(size, timeout=TIMEOUT)
    said = first.run(lambda group: cross(group, second.groups[group.rank]))
    pairs = zip(first, second, strict=True)
    check(said, [[group.name, other.name] for group, other in pairs])


def wait_elsewhere(group: pycomm.Group) -> str | None:
    """Rank 1 waits in a group of the two others for a while, and then never comes."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    with pycomm.init(pairs[1]) if group.rank else contextlib.nullcontext() as other:
        if group.rank == 1:
            summed(other)
            time.sleep(1)
            return None
        if group.rank == 2:
            time.sleep(0.3)
            summed(other)
        with pytest.raises(pycomm.Timeout) as caught:
            summed(group)
        return str(caught.value)


def test_a_wait_that_is_over_is_not_told():
    said = helpers.run_group(3, wait_elsewhere, timeout=TIMEOUT)
    for message in (said[0], said[2]):
        assert "rank 1 " in message
        assert "that group" not in message
