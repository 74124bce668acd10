"""Compressed all-reduces need no memory that grows with the tensor, except in top-k."""

from pathlib import Path

import helpers
import pytest
import torch

import pycomm

MIB = 1 << 20
COMPRESSIONS = {
    "int8": pycomm.Int8(),
    "stochastic": pycomm.Int8(4096, "stochastic"),
    "bf16": pycomm.Cast(),
    "top-k": pycomm.TopK(0.01),
}


def peak():
    """The most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def growth(_rank, _size, _store, name, algorithm):
    """Temporary bytes of an operation on 64 MiB, of both ranks together.

    Runs in a process of its own, whose peak nothing else has raised. Before the operation, all
    tensors are there and touched, and a small operation has brought staging and threads.
    """
    count = 16 << 20
    tensors = [torch.randn(count) for _ in range(2)]
    residuals = [torch.full((count,), 0.5) for _ in range(2)]

    def reduce(group, count):
        pycomm.compressed_all_reduce(
            tensors[group.rank][:count],
            COMPRESSIONS[name],
            residual=residuals[group.rank][:count],
            algorithm=algorithm,
            group=group,
        )

    with pycomm.LocalWorld(2, 60) as world:
        world.run(reduce, 1 << 18)
        before = peak()
        world.run(reduce, count)
        return peak() - before


@pytest.mark.parametrize(
    ("name", "algorithm", "limit"),
    [
        ("int8", "two_shot", 4),
        ("int8", "ring", 4),
        ("int8", "tree", 4),
        ("stochastic", "two_shot", 4),
        ("bf16", "two_shot", 4),
        # Per rank 168,000 entries: of 8 bytes in lists that grow, of 6 in areas of two shares.
        ("top-k", "two_shot", 24),
    ],
)
def test_no_temporary_as_large_as_a_tensor_of_64_mib(name, algorithm, limit):
    (grown,) = helpers.run_ranks(1, growth, name, algorithm, limit=120)
    assert grown < limit * MIB
