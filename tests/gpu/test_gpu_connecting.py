"""Nodes connect over NCCL: a rank that dies, or cannot connect, and groups that grow and shrink."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import gpu_nodes
import growing
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm
from pycomm._nccl import connect as nccl_connect

pytestmark = [pytest.mark.gpu, gpu_nodes.needs_gpus]

SECONDS = 60.0  # the groups' timeout
SOON = 20.0
CUDA = torch.device("cuda")


def fail_with(failure):
    """Makes this rank fail when it connects the next time."""
    nccl_connect.StripePeers = lambda *_: failure()


def die():
    time.sleep(0.3)  # slower ranks leave the rendezvous
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise RuntimeError("no link")


def join_nodes(rank, size, store, nodes):
    gpu_nodes.take_nccl(rank)
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)


def await_threads():
    helpers.wait_until(lambda: "pycomm-nccl" not in [t.name for t in threading.enumerate()])


def sum_on_device(group):
    x = torch.full((5,), float(1 + group.rank), device="cuda")
    return group._spans(CUDA), pycomm.all_reduce(x, group=group).tolist()


def make(rank, size, store, nodes, victim):
    join_nodes(rank, size, store, nodes)
    if rank == victim:
        fail_with(die)
    began = time.monotonic()
    with pytest.raises(pycomm.PeerDied) as raised:
        pycomm.init(timeout=SECONDS)
    await_threads()
    dist.destroy_process_group()
    return raised.value.rank, time.monotonic() - began < SOON


@pytest.mark.parametrize("nodes", ["ab", "abc", "abab"])
def test_a_death_while_nodes_connect_ends_the_wait(nodes):
    with helpers.Ranks(len(nodes), make, nodes, 1) as ranks:
        left = [rank for rank in range(len(nodes)) if rank != 1]
        found = [(outcome.value, outcome.trace) for outcome in ranks.wait_for(left)]
    assert found == [((1, True), "")] * len(left)


def fall_back(rank, size, store, nodes, victim, waits):
    """The victim cannot connect; or it has not tried before the timeout."""
    join_nodes(rank, size, store, nodes)
    over, told = threading.Event(), logging.Handler()
    if rank == victim:
        fail_with(lambda: (waits and over.wait()) or refuse())
    texts = []
    told.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("pycomm.group").addHandler(told)
    began = time.monotonic()
    with pycomm.init(timeout=4 if waits else SECONDS) as group:
        took = time.monotonic() - began
        over.set()
        seen = sum_on_device(group)
    await_threads()
    dist.destroy_process_group()
    return seen, took < SOON, [text for text in texts if "NCCL" in text]


@pytest.mark.parametrize(
    ("nodes", "waits"), [("ab", False), ("abab", False), ("ab", True), ("abc", True)]
)
def test_if_a_rank_cannot_connect_all_do_without_nccl(nodes, waits):
    """The warning names the rank that is behind, not the ranks that wait for it."""
    victim, size = len(nodes) - 1, len(nodes)
    why = "not connected within 4 s" if waits else "RuntimeError: no link"
    for rank, (seen, soon, texts) in enumerate(
        helpers.run_ranks(size, fall_back, nodes, victim, waits)
    ):
        assert seen == (False, [size * (size + 1) / 2] * 5)
        assert soon
        assert texts == [
            f"rank {rank}: NCCL could not connect the nodes (rank {victim}: {why}): Gloo carries "
            "CUDA tensors through host memory"
        ]


def come_late(rank, size, store):
    join_nodes(rank, size, store, "ab")
    came, seen = Path(f"{store}.came"), []
    connect, deadline = nccl_connect.connect_nodes, nccl_connect.Deadline

    def connect_late(*given):
        if rank == 1:
            time.sleep(0.5)
            came.touch()
        return connect(*given)

    def begin(seconds):
        seen.append(came.exists())
        return deadline(seconds)

    nccl_connect.connect_nodes, nccl_connect.Deadline = connect_late, begin
    with pycomm.init(timeout=SECONDS):
        dist.destroy_process_group()
    return seen


def test_the_deadline_begins_when_all_have_come():
    assert helpers.run_ranks(2, come_late) == [[True]] * 2


def operate(group):
    while True:
        pycomm.barrier(group=group)


def shrink(rank, size, store, nodes):
    """Rank 3 dies, and rank 1 when the smaller group connects."""
    join_nodes(rank, size, store, nodes)
    group = pycomm.init(timeout=SECONDS)
    if rank == 1:
        fail_with(die)  # the group has connected already
    pycomm.barrier(group=group)
    time.sleep(0.3)
    if rank == 3:
        die()
    with pytest.raises(pycomm.CollectiveError):
        operate(group)
    began = time.monotonic()
    with group.shrink() as smaller:
        return smaller.ranks, time.monotonic() - began < SOON, sum_on_device(smaller)


@pytest.mark.parametrize(("nodes", "spans"), [("abcd", True), ("abab", False), ("abca", True)])
def test_a_death_while_the_smaller_group_connects(nodes, spans):
    """The remaining ranks connect over NCCL if they are on several nodes."""
    with helpers.Ranks(4, shrink, nodes) as ranks:
        found = [(outcome.value, outcome.trace) for outcome in ranks.wait_for([0, 2])]
    assert found == [(((0, 2), True, (spans, [3.0] * 5)), "")] * 2


def train(group):
    last, parameters = spanning.train(group, 0, lambda _: die(), "cuda")
    return last.ranks, last._spans(CUDA), [parameter.tolist() for parameter in parameters]


@pytest.mark.parametrize(("names", "spans"), [("abc", True), ("abb", False)])
def test_training_goes_on_when_a_rank_dies(names, spans):
    with helpers.Ranks(3, gpu_nodes.member, names, train) as ranks:
        outcomes = ranks.wait_for([1, 2])
    assert [outcome.trace for outcome in outcomes] == [""] * 2
    mine, other = (outcome.value for outcome in outcomes)
    assert mine == other
    assert mine[:2] == ((1, 2), spans)


def grow(rank, size, store, path):
    join_nodes(rank, size, store, "ab")
    group = pycomm.init(timeout=SECONDS)
    seen = [sum_on_device(group)]
    while group.size < 3:
        growing.publish(group, path)
        group = group.grow()
    with group:
        return [*seen, sum_on_device(group)]


def join(_rank, _size, _store, path):
    torch.cuda.set_device(2)
    spanning.pretend("a")
    helpers.wait_until(Path(path).exists)
    with pycomm.join(Path(path), SECONDS) as group:
        return [sum_on_device(group)]


def test_a_larger_group_goes_through_host_memory(tmp_path):
    path = str(tmp_path / "door")
    with helpers.Ranks(2, grow, path) as members, helpers.Ranks(1, join, path) as newcomer:
        found = [(outcome.value, outcome.trace) for outcome in members.wait_for([0, 1])]
        (joined,) = newcomer.wait_for([0])
    assert found == [([(True, [3.0] * 5), (False, [6.0] * 5)], "")] * 2
    assert (joined.value, joined.trace) == ([(False, [6.0] * 5)], "")
