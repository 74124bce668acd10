"""Collectives of two ranks beside torch's: algorithms, compression, operations, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm
from benchmarks.ranks import Ranks
from pycomm._inputs import ALGORITHMS
from pycomm.bench import launch, peers, verify
from pycomm.bench.cli import COLLECTIVES
from pycomm.bench.contestants import Case, Compressed, Contestant, Pycomm
from pycomm.bench.measure import Prepared
from pycomm.bench.report import KIB, MIB, human_bytes

COMPRESSIONS = ("bf16", "int8", "topk:0.01")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
PEERS = {"cpu": "gloo", "cuda": "nccl"}
TORCH = "torch"  # with the peer of the device

Timer = Callable[..., None]


def make(group: pycomm.Group, name: str, case: Case) -> tuple[Prepared, int]:
    """A contestant's call, and the wrong elements of its result on known inputs."""
    contestant: Contestant
    if name == TORCH:
        (contestant,) = peers.COLLECTIVES[PEERS[case.device]]()
    elif name in COMPRESSIONS:
        contestant = Compressed(group=group, compression=name)
    else:
        contestant = Pycomm(group=group, algorithm=name)
    run = contestant.prepare(case)
    (wrong,) = verify.count_wrong_everywhere(case, group.rank, [contestant], [run])
    return run, wrong


@pytest.fixture
def time(benchmark: Any, two_ranks: Ranks, device: str, fit: Callable[[int], int]) -> Timer:
    """Times a contestant, in a group of the report for each case."""
    ranks = two_ranks.group.size

    def run(
        name: str, collective: str, nbytes: int, dtype: str = "float32", op: str = "sum"
    ) -> None:
        if name == TORCH and device == "cuda" and (reason := launch.without_nccl(ranks)):
            pytest.skip(f"NCCL {reason}")
        kind: torch.dtype = getattr(torch, dtype)
        case = Case(collective, kind, op, fit(nbytes) // kind.itemsize, ranks, device)
        benchmark.group = f"{collective}, {human_bytes(nbytes)}, {dtype}, {op}, {device}"
        two_ranks.time(benchmark, make, name, case)

    return run


@pytest.mark.parametrize("name", [*(name for name in ALGORITHMS if name != "multicast"), TORCH])
@pytest.mark.parametrize("nbytes", [256, 64 * KIB, 4 * MIB], ids=human_bytes)
def test_all_reduce(time: Timer, nbytes: int, name: str) -> None:
    time(name, "all_reduce", nbytes)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("nbytes", [64 * KIB, 4 * MIB], ids=human_bytes)
def test_compressed(time: Timer, nbytes: int, name: str) -> None:
    time(name, "all_reduce", nbytes)


@pytest.mark.parametrize("name", ["auto", TORCH])
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "all_reduce"])
def test_operation(time: Timer, collective: str, name: str) -> None:
    time(name, collective, MIB)


@pytest.mark.parametrize("name", ["auto", TORCH])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(time: Timer, dtype: str, name: str) -> None:
    time(name, "all_reduce", MIB, dtype)


@pytest.mark.parametrize("name", ["auto", TORCH])
@pytest.mark.parametrize("op", ["avg", "min", "max", "prod"])
def test_reduction(time: Timer, op: str, name: str) -> None:
    time(name, "all_reduce", MIB, op=op)
