"""What tells one call from another of the same kind, for ranks to compare."""

from __future__ import annotations

import sys
from pathlib import Path

from pycomm._runtime.log import DEBUG

_PACKAGE = Path(__file__).parents[1]


def label_of(tag: int | str | None) -> str:
    """For the function that is called by a user: the tag and, for debugging, the caller's line."""
    if tag is not None and (not isinstance(tag, int | str) or isinstance(tag, bool)):
        raise TypeError(f"tag must be an int or a str, got {tag!r}")
    named = [] if tag is None else [f"tag={tag!r}"]
    if DEBUG:
        caller = sys._getframe(2)
        path = Path(caller.f_code.co_filename)
        if _PACKAGE not in path.parents:  # what pycomm calls itself may come from several places
            # Not the whole path: nodes may have it somewhere else.
            named.append(f"called at {'/'.join(path.parts[-2:])}:{caller.f_lineno}")
    return ", ".join(named).encode("ascii", "backslashreplace").decode()
