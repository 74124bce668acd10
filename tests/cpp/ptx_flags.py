"""Finds tests that ptxas 13.0.88 compiles wrongly, in PTX.

It takes ``((p ? 1 : 0) | (q ? 2 : 0)) == 0`` for "p and q" instead of "neither", for every
architecture. So a kernel must test the flags, not the word.
"""

from __future__ import annotations

import re
from itertools import pairwise

# A register that holds zero or another constant.
CHOICE = re.compile(r"selp\.\w+\s+(%\w+), (?:0, )?(-?\d+), (?:0, )?%\w+;")
COMBINED = re.compile(r"or\.b\d+\s+(%\w+), (%\w+), (%\w+);")
TESTED = re.compile(r"setp\.(?:eq|ne)\.\w+\s+%\w+, (%\w+), 0;")
FUNCTION = re.compile(r"^\.?(?:\w+ )*\.(?:entry|func)\b.*?(\w+)\(", re.MULTILINE)


def functions_testing_words(ptx: str) -> list[str]:
    """The names of the functions that have such a test."""
    functions = list(FUNCTION.finditer(ptx))
    bounds = [*(function.start() for function in functions), len(ptx)]
    return [
        function[1]
        for function, (begin, end) in zip(functions, pairwise(bounds), strict=True)
        if tests_word(ptx[begin:end])
    ]


def tests_word(body: str) -> bool:
    """True if a function tests a word of two different flags; registers are its own."""
    flags = dict(CHOICE.findall(body))
    words = {
        word
        for word, a, b in COMBINED.findall(body)
        if a in flags and b in flags and flags[a] != flags[b]
    }
    return not words.isdisjoint(TESTED.findall(body))
