"""The limits of hot loops, a file per architecture: their figures when it was written."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from sass.measure import Figures

FOLDER = Path(__file__).parent / "limits"
# A figure gets worse when it grows, or when it shrinks; instructions may grow a little.
GROWING = ("instructions", "rounds", "registers", "stack")
SHRINKING = ("loads", "blocks", "bytes_in_flight")
TOLERANCE = {"instructions": 1.02}

Limits = dict[str, dict[str, float]]


def compiler() -> str:
    """The version of nvcc. Another one makes other machine code, for which no limits are known."""
    done = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    return str(re.findall(r"V([\d.]+)", done.stdout)[0])


def file_of(architecture: str) -> Path:
    """Where the limits of an architecture are."""
    return FOLDER / f"sm_{architecture}.json"


def read(architecture: str) -> tuple[str, Limits]:
    """The limits of an architecture, and the compiler that they are for; none if there are none."""
    file = file_of(architecture)
    if not file.exists():
        return "", {}
    stored = json.loads(file.read_text())
    return stored["nvcc"], stored["loops"]


def write(architecture: str, nvcc: str, found: Mapping[str, Figures]) -> None:
    """Makes what has been found the limits."""
    stored = {"nvcc": nvcc, "loops": {name: asdict(one) for name, one in found.items()}}
    file_of(architecture).write_text(json.dumps(stored, indent=2) + "\n")


def worse(limits: Limits, found: Mapping[str, Figures]) -> Iterator[str]:
    """What has got worse, and by how much."""
    for name, figures in found.items():
        if name not in limits:
            yield f"{name} has no limits yet"
            continue
        for figure, now in asdict(figures).items():
            limit = limits[name][figure]
            most = limit * TOLERANCE.get(figure, 1)
            if (figure in GROWING and now > most) or (figure in SHRINKING and now < limit):
                yield f"{name}: {figure} {limit:g} -> {now:g}"
    for name in limits.keys() - found.keys():
        yield f"{name} has limits, but is no hot loop any more"
