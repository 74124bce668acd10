"""Programs in namespaces of their own, as on machines that hide or lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import helpers
import pytest
import spanning
import torch

import pycomm

_SUPPORT, _PACKAGE = Path(__file__).parent, Path(pycomm.__file__).parents[1]


def run(program: str, setup: str, *namespaces: str, limit: float = 180) -> str:
    """The output of a Python program after shell commands in new namespaces.

    Skips the test if the namespaces or the commands are refused.

    Args:
        program: the program.
        setup: the commands, which must succeed.
        namespaces: options of ``unshare``.
        limit: seconds.
    """
    own = ["unshare", *namespaces, "sh", "-ec"]
    tried = subprocess.run(
        [*own, setup], capture_output=True, text=True, check=False, timeout=limit
    )
    if tried.returncode != 0:
        pytest.skip(f"{' '.join(namespaces)} and {setup!r} need root: {tried.stderr.strip()}")
    paths = os.pathsep.join(map(str, (_PACKAGE, _SUPPORT)))
    done = subprocess.run(
        [*own, f'{setup}\nexec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _sum(group: pycomm.Group) -> tuple[float, int]:
    total = pycomm.all_reduce(torch.full((1000,), group.rank + 1.0), group=group)
    return total.sum().item(), len(group.nodes)


def sums(nodes: Sequence[int]) -> list[tuple[float, int]]:
    """Each rank's sum over a group, and the number of nodes that it has found."""
    if len(nodes) > 1:
        return spanning.run(list(nodes), _sum, timeout=60)
    return helpers.run_ranks(nodes[0], helpers.in_group, _sum, {"timeout": 60})
