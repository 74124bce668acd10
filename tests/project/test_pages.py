"""The programs on pages run on two ranks."""

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


@pytest.mark.parametrize(
    ("page", "blocks", "given", "then"),
    [
        ("docs/how-to/coming-from.md", 13, "", DEALT),
        ("docs/mixed-precision.md", 4, GROUP, ""),
        ("docs/how-to/arrays.md", 1, "", ""),
        ("docs/from-zero-and-fsdp.md", 1, GROUP, ""),
    ],
    ids=["coming-from", "mixed-precision", "arrays", "from-zero-and-fsdp"],
)
def test_programs(page, blocks, given, then):
    assert pages.run(page, given=given, then=then) == blocks


def test_programs_of_the_readme():
    """Apart from those that need another process group, or a rank that dies."""
    as_a_backend, survivors = 3, 7
    left_out = {as_a_backend, survivors}
    words = {as_a_backend: '("pycomm")', survivors: "group.shrink()"}
    blocks = [block for _, block in pages.blocks_of("README.md")]
    assert all(word in blocks[number] for number, word in words.items())
    assert pages.run("README.md", left_out) == len(blocks) - len(left_out)
