"""The gate's parts: together they have all tests."""

from parts import PARTS, of_part

ONCE = [("t.py::once", False), ("t.py::one_set[0]", False)]
TWO = [(f"t.py::two[{number}]", False) for number in range(2)]
FOUR = [(f"t.py::four[{number}]", False) for number in range(4)]
TABLE = [(f"t.py::table[{row}-{column}]", False) for row in range(5) for column in range(5)]
LONG = [(f"t.py::long[{number}]", True) for number in range(12)]


def names(tests):
    return {name for name, _ in tests}


def test_all_parts_together_have_all_tests():
    tests = [*ONCE, *TWO, *FOUR, *TABLE, *LONG]
    parts = [of_part(part, tests) for part in range(PARTS)]
    assert set.union(*parts) == names(tests)
    for part in parts:
        assert names(ONCE) <= part
        assert len(part & names(TWO)) == len(part & names(FOUR)) == 1
        assert 2 <= len(part & names(LONG)) <= 3


def test_a_part_has_every_row_and_every_column():
    for part in range(PARTS):
        kept = [name[-4:-1] for name in of_part(part, TABLE)]
        assert {row for row, _, _ in kept} == {column for _, _, column in kept} == set("01234")


def test_a_long_test_alone_runs_in_every_part():
    """As it is tried again alone."""
    for part in range(PARTS):
        assert of_part(part, LONG[:1]) == names(LONG[:1])
