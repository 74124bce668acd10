"""Labels: tags, which ranks compare to distinguish calls of the same kind, and callers' lines."""

from __future__ import annotations

import sys
from pathlib import Path

from pycomm._runtime.log import DEBUG

_PACKAGE = Path(__file__).parents[1]


def label_of(tag: int | str | None) -> str:
    """The label of a public function's call: its tag and, in debug logs, the caller's line.

    Ranks do not compare what follows a line feed (csrc/core/details.h).
    """
    if tag is not None and (not isinstance(tag, int | str) or isinstance(tag, bool)):
        raise TypeError(f"tag must be an int or a str, got {tag!r}")
    named = "" if tag is None else f"tag={tag!r}"
    if DEBUG:
        caller = sys._getframe(2)
        path = Path(caller.f_code.co_filename)
        if _PACKAGE not in path.parents:  # pycomm's own calls may come from different lines
            # Not the whole path, which may differ between nodes.
            named += f"\ncalled at {'/'.join(path.parts[-2:])}:{caller.f_lineno}"
    return named.encode("ascii", "backslashreplace").decode()
