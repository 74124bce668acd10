"""The programs on pages run on two ranks."""

import json
import re

import pages
import pytest

IMPORTS = "import torch, pycomm; import torch.distributed as dist\n"
GROUP = IMPORTS + "group = pycomm.init()\n"
# Another rank gets as many samples as its speed allows.
DEALT = """
from types import SimpleNamespace
mine = SimpleNamespace(ranks={group.rank: SimpleNamespace(own=1.0 + group.rank)})
assert own_part(60, 30, mine) == (40, 20)[group.rank]
"""
# As the page says. Other processors may round otherwise.
LOSSES = """
assert losses["int8"] < 1.1 * losses["exact"]
assert losses["exact"] < losses["sign_all_reduce"] < losses["no_residual"] < 2 * losses["exact"]
"""


# As the page says, about.
FIRST_DDP = """
assert group.size == 2
assert abs(exact - 0.232) < 0.02 and abs(coded - 0.232) < 0.02
assert 3.5 < after["ratio"] < 3.7 and before["exposed_ms"] > 0
"""


@pytest.mark.parametrize(
    ("page", "blocks", "given", "then"),
    [
        ("README.md", 3, "", ""),
        ("docs/how-to/coming-from.md", 13, "", DEALT),
        ("docs/how-to/mixed-precision.md", 4, GROUP, ""),
        ("docs/how-to/arrays.md", 1, "", ""),
        ("docs/how-to/from-zero-and-fsdp.md", 1, GROUP, ""),
        ("docs/tutorials/first-ddp.md", 1, "", FIRST_DDP),
        ("docs/tutorials/codec.md", 4, "", LOSSES),
        ("docs/tutorials/memory.md", 1, "", ""),
    ],
    ids=[
        "readme",
        "coming-from",
        "mixed-precision",
        "arrays",
        "from-zero-and-fsdp",
        "first-ddp",
        "codec",
        "memory",
    ],
)
def test_programs(page, blocks, given, then):
    assert pages.run(page, given=given, then=then) == blocks


def test_survive():
    """The tutorial's blocks stand in the example."""
    example = re.sub(r"^ +", "", (pages.ROOT / "examples/survive.py").read_text(), flags=re.M)
    blocks = [block for _, block in pages.blocks_of("docs/tutorials/survive.md")]
    assert len(blocks) == 3
    assert all(re.sub(r"^ +", "", block, flags=re.M) in example for block in blocks)


def test_programs_of_the_tour():
    """Apart from those that need another process group, or a rank that dies."""
    as_a_backend, survivors = 2, 6
    left_out = {as_a_backend, survivors}
    words = {as_a_backend: '("pycomm")', survivors: "group.shrink()"}
    blocks = [block for _, block in pages.blocks_of("docs/tutorials/tour.md")]
    assert all(word in blocks[number] for number, word in words.items())
    assert pages.run("docs/tutorials/tour.md", left_out) == len(blocks) - len(left_out)


def test_figures_of_the_readme():
    """The table of all-reduces has the medians of the file of results."""
    file = pages.ROOT / "benchmarks/results/cpu_2ranks_mpi.json"
    names = {
        ("pycomm", "tensor"): "**pycomm**",
        ("pycomm", "window"): "**pycomm**, tensors in its window",
        ("mpi", "tensor"): "Open MPI 5.0",
        ("deepspeed", "tensor"): "DeepSpeed 0.19.8, shared memory",
        ("gloo", "tensor"): "Gloo, torch 2.13",
    }
    readme = (pages.ROOT / "README.md").read_text()
    rows = json.loads(file.read_text())["rows"]
    for contestant, name in names.items():
        line = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", readme, re.M)[1]
        told = [float(cell.strip(" *msu").replace(",", "")) for cell in line.split("|")]
        for size, value, unit in zip((16 << 10, 1 << 20, 64 << 20), told, (1, 1, 1e3), strict=True):
            medians = [
                row["p50_us"] / unit
                for row in rows
                if (row["impl"], row["buffer"], row["bytes"]) == (*contestant, size)
            ]
            assert min(medians) == pytest.approx(value, rel=0.02), (name, size)
