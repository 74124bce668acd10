"""Numbers that pages tell are those of the sources."""

import ast
import operator
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = "csrc/cpu/internode/link.cpp"
RECORD, SUBJECT = "csrc/cpu/observe/record.h", "csrc/cpu/observe/subject.h"
SHRINK = "csrc/cpu/faults/shrink.cpp"
MODULO = {ast.Mult: operator.mul, ast.LShift: operator.lshift, ast.Add: operator.add}


def words_of(page):
    """A page's text in one line."""
    return " ".join((ROOT / page).read_text().split())


def constant(file, name):
    """The value of a constant, in seconds if it is a duration."""
    text = (ROOT / file).read_text()
    value = re.search(rf"\b{name}\b(?:: \w+)? ?= ?(?:std::chrono::)?([^;\n#]+)", text)[1].strip()
    if duration := re.fullmatch(r"(milliseconds|seconds)\((\d+)\)", value):
        return int(duration[2]) / (1000 if duration[1] == "milliseconds" else 1)
    return evaluated(ast.parse(value, mode="eval").body)


def evaluated(node):
    if isinstance(node, ast.BinOp):
        return MODULO[type(node.op)](evaluated(node.left), evaluated(node.right))
    return node.value


PLACES = [
    ("docs/how-to/observing.md", r"record of its last (\d+) operations", RECORD, "kRecords"),
    ("docs/explanation/failures.md", r"two rings of (\d+) records", RECORD, "kRecords"),
    ("docs/explanation/failures.md", r"texts of the last (\d+) operations", RECORD, "kRecords"),
    ("docs/explanation/failures.md", r"Each rank keeps (\d+) texts", SUBJECT, "kSubjects"),
    ("docs/explanation/between-nodes.md", r"waits up to ([\d.]+) s for", LINK, "kFarewells"),
    (
        "docs/explanation/between-nodes.md",
        r"and ([\d.]+) s more for",
        LINK,
        "kFarewellsOfBlameless",
    ),
    (
        "docs/how-to/recovery.md",
        r"`grow\(\)`, (\d+) seconds",
        "pycomm/group.py",
        "_PATIENCE_WITH_NEWCOMERS",
    ),
]


@pytest.mark.parametrize(("page", "pattern", "file", "name"), PLACES)
def test_numbers(page, pattern, file, name):
    told = re.findall(pattern, words_of(page))
    assert told == [f"{constant(file, name):g}"]


def test_failures_between_nodes_end_in_time():
    """Within the timeout and the seconds that the pages tell, if no wait is a chain of rounds."""
    waits = sum(constant(LINK, name) for name in ("kGrace", "kFarewells", "kFarewellsOfBlameless"))
    told = {
        "docs/how-to/clusters.md": r"within the timeout and (\d) seconds",
        "docs/tutorials/tour.md": r"within the timeout and (\d) seconds",
        "docs/explanation/between-nodes.md": r"within the timeout plus (\d) seconds",
    }
    for page, pattern in told.items():
        (seconds,) = re.findall(pattern, words_of(page))
        assert waits < int(seconds) < waits + 1


def test_most_ranks_of_a_group_that_shrinks():
    words = int(re.search(r"members\[(\d+)\]", (ROOT / "csrc/cpu/memory/window.h").read_text())[1])
    assert f"of at most {64 * words:,} |" in (ROOT / "docs/tutorials/tour.md").read_text()
