"""Compressed all-reduces need no memory that grows with the tensor, except in top-k."""

import subprocess
import sys

import pytest

MIB = 1 << 20

# In a process of its own, whose peak nobody else has raised: all tensors are there and touched, and
# a small operation has brought staging and threads. What the peak grows by then is temporary memory
# of the large one, of both ranks together.
SCRIPT = """
import sys
import torch
import pycomm

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

name, algorithm = sys.argv[1:]
torch.set_num_threads(1)
compression = {
    "int8": pycomm.Int8(),
    "stochastic": pycomm.Int8(4096, "stochastic"),
    "bf16": pycomm.Cast(),
    "top-k": pycomm.TopK(0.01),
}[name]
count = 16 << 20
tensors = [torch.randn(count) for _ in range(2)]
residuals = [torch.full((count,), 0.5) for _ in range(2)]

def reduce(group, count):
    pycomm.compressed_all_reduce(
        tensors[group.rank][:count], compression, residual=residuals[group.rank][:count],
        algorithm=algorithm, group=group,
    )

with pycomm.LocalWorld(2, 60) as world:
    world.run(reduce, 1 << 18)
    before = peak()
    world.run(reduce, count)
    print(peak() - before)
"""


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
    command = [sys.executable, "-c", SCRIPT, name, algorithm]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    grown = int(done.stdout)
    assert grown < limit * MIB
