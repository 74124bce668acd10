"""docs/reference/errors.md has messages that pycomm raises."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/errors.md").read_text()
MESSAGES = [row.split(" | ")[0] for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE)]
SHORTEST = 6  # of a piece of a message that is looked for


def literals():
    """All text of the sources, with the literals of a message joined."""
    kinds = ("pycomm/**/*.py", "csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu*")
    texts = [path.read_text() for kind in kinds for path in ROOT.glob(kind)]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.fixture(scope="module")
def sources():
    return literals()


@pytest.mark.parametrize("message", [each for each in MESSAGES if "`" in each])
def test_messages(sources, message):
    pieces = [
        piece.strip(" :,;")
        for part in re.findall(r"`([^`]+)`", message)
        for piece in part.split("...")
    ]
    long_enough = [piece for piece in pieces if len(piece) >= SHORTEST]
    assert long_enough
    assert [piece for piece in long_enough if piece not in sources] == []


def test_enough():
    assert len([each for each in MESSAGES if "`" in each]) > 20
