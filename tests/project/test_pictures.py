"""The pictures of the algorithms show what the algorithms do."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs/images/steps"
DRAW = runpy.run_path(str(FOLDER / "draw.py"))
RANKS = DRAW["RANKS"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    program = DRAW["compiled"](tmp_path_factory.mktemp("schedule"))
    return {name: DRAW["simulate"](DRAW["schedule"](program, name)) for name in DRAW["ALGORITHMS"]}


@pytest.mark.parametrize(
    ("name", "steps", "orders"),
    [
        ("one_shot", 1, ["0123"] * 4),
        ("two_shot", 2, ["0123"] * 4),
        ("ring", 6, ["0123", "1230", "2301", "3012"]),
        ("tree", 6, ["0123", "0123", "3210", "3210"]),
    ],
)
def test_sums(runs, name, steps, orders):
    """At the end, all ranks have all sums, added in the documented order."""
    run = runs[name]
    assert run.steps == steps
    for rank in range(RANKS):
        assert [run.at((rank, 2, i), steps) for i in range(RANKS)] == orders


@pytest.mark.parametrize("name", DRAW["ALGORITHMS"])
def test_drawn(runs, name):
    """`python docs/images/steps/draw.py` draws them anew."""
    assert DRAW["svg"](name, runs[name]) == (FOLDER / f"{name}.svg").read_text()


def test_bytes(runs):
    """Elements that come to a rank from others are those of the table in docs/explanation."""
    for name, expected in [("one_shot", 3 * RANKS), ("two_shot", 6), ("ring", 6)]:
        arrows = runs[name].arrows
        for rank in range(RANKS):
            assert sum(arrow.count for arrow in arrows if arrow.target[0] == rank) == expected
