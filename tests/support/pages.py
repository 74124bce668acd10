"""The code blocks of pages: runs ```python blocks on two ranks, as a reader would.

A block that no test runs or compares has a mark before it, with the reason: an HTML comment
``<!-- not run: it needs a GPU -->`` of one line.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+) -->\n\n?)?^ *```(?P<kind>[^\s`]*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: the line of the page before its first.
        kind: its language.
        text: its lines.
        why: why nothing runs it, or None.
    """

    line: int
    kind: str
    text: str
    why: str | None


def pages() -> list[str]:
    """All pages of the project, by their paths."""
    folders = ("*.md", "docs/**/*.md", "benchmarks/*.md")
    return sorted(str(page.relative_to(ROOT)) for each in folders for page in ROOT.glob(each))


def blocks_of(page: str, *kinds: str) -> Iterator[Block]:
    """The blocks of a page, of some languages or of all."""
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        if not kinds or found["kind"] in kinds:
            line = text.count("\n", 0, found.start("text"))
            yield Block(line, found["kind"], found["text"], found["why"])


def readers_own(rank: int) -> dict[str, Any]:
    """What a reader has before a block: a network, its optimizer, batches and a loss."""
    torch.manual_seed(0)
    widths = [(8, 256), (256, 256), (256, 1)]  # operations on so much are all timed
    first, second, third = (nn.Linear(*width) for width in widths)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=random) for _ in range(4)]
    return {
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "batches": batches,
        "next_batch": lambda: batches[0],
        "loss_of": lambda output: output.float().square().mean(),
    }


def run_blocks(
    rank: int, size: int, store: str, page: str, given: str, before: Mapping[str, str], then: str
) -> tuple[list[int], str]:
    """Runs the blocks on one rank, each with what the blocks before it have defined.

    Returns:
        The first lines of the blocks that have run, and what they have printed.
    """
    folder = Path(f"{store}.{rank}")
    folder.mkdir()
    helpers.join_world(rank, size, store)
    names: dict[str, Any] = {"__name__": page, "rank": rank, "shared": store + ".files"}
    ran, printed = [], io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(given, names)
        for block in blocks_of(page, "python"):
            if block.why is not None:
                continue
            names |= readers_own(rank)
            exec("\n".join(before[words] for words in before if words in block.text), names)
            exec(compile("\n" * block.line + block.text, page, "exec"), names)  # with its lines
            ran.append(block.line + 1)
        exec(then, names)
    dist.destroy_process_group()
    return ran, printed.getvalue()


def run(
    page: str, given: str = "", before: Mapping[str, str] | None = None, then: str = ""
) -> tuple[int, str]:
    """Runs a page's blocks on two ranks.

    Args:
        page: the page, by its path in the project.
        given: a program that defines what the page takes for granted.
        before: by words of a block, a program that defines what this block takes for granted.
        then: a program that checks what the blocks have defined.

    Returns:
        The number of the blocks, and what the first rank has printed.
    """
    first, second = helpers.run_ranks(2, run_blocks, page, given, before or {}, then)
    assert first[0] == second[0]
    return len(first[0]), first[1]


def is_like(line: str, other: str) -> bool:
    """Whether two lines have the same words, and numbers within a twentieth of each other."""
    if NUMBER.split(line) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 0.05 * abs(float(a)) for a, b in pairs)


def missing_in(printed: str, page: str) -> list[str]:
    """The lines of a page's samples of output that a program has not printed.

    Samples are blocks of `text`, and of `console` without the commands. ``[0]`` is the rank.
    """
    lines = [line.strip() for line in printed.splitlines()]
    samples = [each.text for each in blocks_of(page, "text", "console") if each.why is None]
    wanted = [line for text in samples for line in text.splitlines() if line[:1] != "$"]
    told = [line.removeprefix("[0] ").strip() for line in wanted]
    return [line for line in told if not any(is_like(line, each) for each in lines)]
