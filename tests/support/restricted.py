"""Programs in namespaces of their own, as on machines that hide or lack something."""

from __future__ import annotations

import ctypes
import os
import struct
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


_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _ABOVE, _ANY_OF, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_CALLS = ("memfd_create", "fallocate", "clone", "pidfd_open", "clone3")
_NUMBERS = {"x86_64": (319, 285, 56, 434, 435), "aarch64": (279, 47, 220, 434, 435)}


def refuse(
    call: str, error: int, argument: int = 0, *, above: int = -1, bits: int = 0, lacks: int = 0
) -> None:
    """From now on the kernel refuses a call in this thread, and in threads and processes of it.

    Args:
        call: its name.
        error: the number of the error.
        argument: which of its arguments matters for the following conditions.
        above: if given, only calls whose argument is larger are refused.
        bits: if given, only calls whose argument has one of these bits.
        lacks: if given, only calls whose argument has none of these bits.
    """
    machine = os.uname().machine
    if machine not in _NUMBERS:
        pytest.skip(f"no numbers of system calls for {machine}")
    conditions = [(_LOAD, 0, 0, 16 + 8 * argument)]  # little endian, below 4 GiB
    conditions += [(_ABOVE, 0, 1, above)] if above >= 0 else []
    conditions += [(_ANY_OF, 0, 1, bits)] if bits else []
    conditions += [(_ANY_OF, 1, 0, lacks)] if lacks else []
    assert len(conditions) <= 2
    program = [
        (_LOAD, 0, 0, 0),  # the call's number
        (_EQUAL, 0, len(conditions) + 1, _NUMBERS[machine][_CALLS.index(call)]),
        *conditions,
        (_RETURN, 0, 0, _REFUSE | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    instructions = ctypes.create_string_buffer(code)
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, filters, 0, 0)):  # no new privileges; seccomp
        if libc.prctl(*arguments) != 0:
            pytest.skip(f"no seccomp: {os.strerror(ctypes.get_errno())}")
