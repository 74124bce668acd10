"""Tables of algorithms: which one ``algorithm="auto"`` runs between nodes.

A table is a JSON file with a list of rows, such as
``{"nodes": 4, "ranks": 32, "bytes": 1048576, "algorithm": "tree"}``. The numbers are the largest
groups and tensors to which the row applies; one that is missing is no limit. The first row that
applies counts, and where none applies, two-shot runs (csrc/core/algorithms/select.h).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

Row = dict[str, Any]

ALGORITHMS = ("two_shot", "ring", "tree")
_LIMITS = {"nodes": 2**31 - 1, "ranks": 2**31 - 1, "bytes": 2**63 - 1}  # and their largest values


def read(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a table file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no table.
        TypeError: `path` is no path.
    """
    where = f"algorithms: {Path(path)}"
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} must be a JSON file: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{where} must have a list of rows, got {rows!r}")
    for number, row in enumerate(rows, start=1):
        _check(f"{where}: row {number}", row)
    return rows


def _check(where: str, row: object) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, got {row!r}")
    allowed = (*_LIMITS, "algorithm")
    for name in row:
        if name not in allowed:
            raise ValueError(f"{where} may have the fields {', '.join(allowed)}, got {name!r}")
    for name, most in _LIMITS.items():
        value = row.get(name, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(
                f"{where}: {name} must be a whole number from 1 to {most}, got {value!r}"
            )
    if row.get("algorithm") not in ALGORITHMS:
        raise ValueError(
            f"{where}: algorithm must be one of {', '.join(ALGORITHMS)}, "
            f"got {row.get('algorithm')!r}"
        )


def limits_of(row: Mapping[str, Any]) -> str:
    """To what a row applies, in words."""
    limits = [f"up to {row[name]:,} {name}" for name in _LIMITS if name in row]
    return ", ".join(limits) or "everything"


def reason(rows: Sequence[Mapping[str, Any]], index: int) -> str:
    """Why a group with this table has chosen an algorithm; the index is -1 if no row applies."""
    if not rows:
        return "no table: two-shot between nodes, whatever the size"
    if index < 0:
        return f"none of the table's {len(rows)} rows applies"
    return f"row {index + 1} of the table: {limits_of(rows[index])}"
