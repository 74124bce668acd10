"""The fifth of the tests that the gate runs on a day."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

PARTS = 5


def of_part(part: int, tests: Iterable[tuple[str, bool]]) -> set[str]:
    """The ids of the tests that run in a part.

    A part has a fifth of the long tests, and of every other test a fifth of its sets of parameters,
    at least one. All parts together have all tests.

    Args:
        part: 0 to 4.
        tests: each test's id, and True if it is long.
    """
    sets = defaultdict(list)
    for test, long in tests:
        sets["long" if long else test.partition("[")[0]].append(test)
    return {
        test
        for ids in sets.values()
        for number, test in enumerate(sorted(ids))
        if _runs(part, number, len(ids))
    }


def _runs(part: int, number: int, count: int) -> bool:
    if count < PARTS:
        return number == part % count
    # Another place in each row of five, so that a part has all values of each of two parameters.
    return (number + number // PARTS) % PARTS == part
