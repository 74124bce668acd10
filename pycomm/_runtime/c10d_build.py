"""How the C++ module of the torch.distributed backend is compiled.

setup.py compiles it for the installed torch, c10d_cache.py for another torch at run time.
This file imports nothing of pycomm, so that setup.py can run it.
"""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
from pathlib import Path

_INSTALLED = Path(__file__).parents[1] / "csrc"  # copies, made by setup.py
CSRC = _INSTALLED if _INSTALLED.exists() else Path(__file__).parents[2] / "csrc"
UNIT = "c10d/unity.cpp"
FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"]
LIBRARIES = ["c10", "torch_cpu", "torch_python", "torch"]


def module_name(torch_version: str) -> str:
    """The module's name, which has the minor version of torch that the module works with."""
    major, minor = torch_version.split(".")[:2]
    return f"_c10d_{major}_{minor}"


def sources() -> dict[str, bytes]:
    """Names and contents of all files in csrc/ that are compiled."""
    found: dict[str, bytes] = {}
    wanted = [UNIT]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = (CSRC / name).read_bytes()
            wanted += re.findall(r'^#include "(.+?)"', found[name].decode(), re.MULTILINE)
    return found


def compiler() -> list[str]:
    """The C++ compiler: the variable CXX, or ``c++``."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def compile_command(torch_folder: Path, torch_version: str, new_abi: bool = True) -> list[str]:
    """The compiler's command line, to which callers add the output.

    Args:
        torch_folder: the folder of the package torch, or one that holds only its ``include``.
        torch_version: the version of that torch.
        new_abi: whether that torch uses libstdc++'s new ABI; all wheels on the package index do.
    """
    includes = torch_folder / "include"
    return [
        *compiler(),
        *FLAGS,
        "-fPIC",
        f"-DTORCH_EXTENSION_NAME={module_name(torch_version)}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(new_abi)}",
        f"-I{CSRC}",
        f"-isystem{includes}",
        f"-isystem{includes / 'torch/csrc/api/include'}",
        f"-isystem{sysconfig.get_path('include')}",
        str(CSRC / UNIT),
    ]


def link_options(torch_folder: Path) -> list[str]:
    """Options of :func:`compile_command` for a shared library."""
    libraries = [f"-l{name}" for name in LIBRARIES]
    return ["-shared", "-pthread", f"-L{torch_folder / 'lib'}", *libraries]
