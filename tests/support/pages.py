"""Runs the programs in a page's ```python blocks, on two ranks, as a reader would."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import helpers
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks_of(page: str) -> Iterator[tuple[int, str]]:
    """The blocks of a page, and the line before each one's first."""
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start(1)), found[1]


def readers_own(rank: int) -> dict[str, Any]:
    """What a reader has before a block: a network, its optimizer, batches and a loss."""
    torch.manual_seed(0)
    widths = [(8, 256), (256, 256), (256, 1)]  # operations on so much are all timed
    first, second, third = (nn.Linear(*width) for width in widths)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    random = torch.Generator().manual_seed(rank)
    return {
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "batches": [torch.randn(4, 8, generator=random) for _ in range(4)],
        "loss_of": lambda output: output.float().square().mean(),
    }


def run_blocks(
    rank: int, size: int, store: str, page: str, left_out: Container[int], given: str, then: str
) -> list[int]:
    """Runs the blocks on one rank, each with what the blocks before it have defined.

    Returns:
        The first lines of the blocks that have run.
    """
    helpers.join_world(rank, size, store)
    names: dict[str, Any] = {"__name__": page}
    exec(given, names)
    ran = []
    for number, (line, block) in enumerate(blocks_of(page)):
        if number in left_out:
            continue
        names |= readers_own(rank)
        exec(compile("\n" * line + block, page, "exec"), names)  # so tracebacks name the line
        ran.append(line + 1)
    exec(then, names)
    dist.destroy_process_group()
    return ran


def run(page: str, left_out: Container[int] = (), given: str = "", then: str = "") -> int:
    """Runs a page's blocks on two ranks, and returns their number.

    Args:
        page: the page, by its path in the project.
        left_out: numbers of blocks that are not run.
        given: a program that defines what the page takes for granted.
        then: a program that checks what the blocks have defined.
    """
    first, second = helpers.run_ranks(2, run_blocks, page, left_out, given, then)
    assert first == second
    return len(first)
