"""The ranks of a benchmark: pytest is rank 0, and processes that it starts are the others."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it

import pycomm
from pycomm.bench import launch, measure
from pycomm.bench.measure import Prepared

TIMEOUT_S = 60.0
# Makes what a rank runs, and counts the wrong elements of its result on all ranks.
Maker = Callable[..., tuple[Prepared, int]]


class Ranks:
    """Times what all ranks run together.

    Attributes:
        group: the ranks' group.
    """

    def __init__(self, group: pycomm.Group, followers: list[Connection]) -> None:
        self.group = group
        self._followers = followers

    def time(self, benchmark: Any, make: Maker, *arguments: Any) -> None:
        """Benchmarks a call on all ranks, and asserts that its result is right.

        A round begins on new input, and ends when the slowest rank has ended.

        Args:
            benchmark: pytest-benchmark's fixture. If it is disabled, there is one round.
            make: an importable function; every rank calls ``make(group, *arguments)``.
            arguments: what it takes besides the group.
        """
        for follower in self._followers:
            follower.send((make, arguments, benchmark.enabled))
        begin, end, rounds, wrong = _prepare(self.group, make, arguments, benchmark.enabled)
        benchmark.pedantic(end, setup=begin, rounds=rounds)
        assert wrong == 0


def _prepare(
    group: pycomm.Group, make: Maker, arguments: tuple[Any, ...], enabled: bool
) -> tuple[Callable[[], None], Callable[[], None], int, int]:
    """The untimed and the timed half of a round, the number of rounds, and the wrong elements."""
    run, wrong = make(group, *arguments)
    rounds = measure.fitting(group, [run])[0] if enabled else 1
    device = run.source.device.type
    rewrite, call = (measure.synchronised(each, device) for each in (run.rewrite, run.call))

    def begin() -> None:
        rewrite()
        pycomm.barrier(group=group)

    def end() -> None:
        call()
        pycomm.barrier(group=group)

    return begin, end, rounds, wrong


@contextlib.contextmanager
def start(ranks: int) -> Iterator[Ranks]:
    """Starts all ranks but this one; they end with the context."""
    spawning = multiprocessing.get_context("spawn")
    store = launch.host_store()
    followers, processes = [], []
    for rank in range(1, ranks):
        ours, theirs = spawning.Pipe()
        followers.append(ours)
        process = spawning.Process(
            target=_follow, args=(rank, ranks, store.port, theirs), daemon=True
        )
        process.start()
        theirs.close()  # so that this process's end is noticed here, and the other's there
        processes.append(process)
    try:
        with _joined(store, 0, ranks) as group:
            yield Ranks(group, followers)
            for follower in followers:
                follower.close()
    finally:
        for process in processes:
            process.kill()
            process.join()


def _follow(rank: int, ranks: int, port: int, leader: Connection) -> None:
    """Runs what rank 0 runs, until it closes the connection."""
    store = TCPStore(launch.LOOPBACK, port, is_master=False)
    with _joined(store, rank, ranks) as group, contextlib.suppress(EOFError):
        while True:
            begin, end, rounds, _ = _prepare(group, *leader.recv())
            for _ in range(rounds):
                begin()
                end()


@contextlib.contextmanager
def _joined(store: TCPStore, rank: int, ranks: int) -> Iterator[pycomm.Group]:
    """The ranks' group, on torch.distributed and, where there are GPUs, on one of them."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # random numbers differ between ranks, as gradients do
    device = "cuda" if torch.cuda.is_available() else "cpu"
    launch.join(store, rank, ranks, TIMEOUT_S, device=device)
    try:
        with pycomm.init(timeout=TIMEOUT_S) as group:
            yield group
    finally:
        dist.destroy_process_group()
