"""The torch.distributed backend for a torch for which pycomm was not installed.

The first process that needs it compiles it, into the folder in which torch keeps extensions that
are compiled at run time. Other processes wait, and later ones find it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

import torch

from pycomm._runtime import c10d_build

_OUTPUT_SHOWN = 4000  # characters of a failed compiler's output
_UNFINISHED = ".unfinished"  # ends the name of a folder in which a module is being compiled
_TORCH = Path(torch.__file__).parent


def compiled() -> Path:
    """The path of the compiled module in the cache; compiles the module if it is missing."""
    try:
        path = _path()
        if _intact(path):  # the folder may then be read-only
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{path}.lock").open("w") as lock:  # the kernel unlocks it if we die
            _lock(lock)
            if not _intact(path):
                _compile(path)
    except OSError as error:
        raise _failure(
            f"the cache cannot be written: {error}. Set TORCH_EXTENSIONS_DIR to another folder"
        ) from error
    return path


def _path() -> Path:
    """The module's path in the cache; its name depends on everything that the module depends on."""
    abi = torch.compiled_with_cxx11_abi()
    depends_on = repr((abi, c10d_build.FLAGS, sorted(c10d_build.sources().items())))
    digest = hashlib.sha256(depends_on.encode()).hexdigest()[:16]
    module = c10d_build.module_name(torch.__version__)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")  # has Python's version and the processor
    return _folder() / f"{module}-{torch.__version__}-{digest}{suffix}"


def _folder() -> Path:
    """torch.utils.cpp_extension uses the same variables, but its import takes long.

    Raises:
        OSError: there is no variable, and the user has no home, or an empty one.
    """
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder) / "pycomm"
    if not (user_cache := os.environ.get("XDG_CACHE_HOME")):
        if os.environ.get("HOME") == "":  # "~/" would be the root of the file system
            raise OSError("the variable HOME is empty")
        try:
            user_cache = str(Path("~/.cache").expanduser())
        except RuntimeError as error:  # as in a container, for a user without a name
            raise OSError("the user has no home directory") from error
    return Path(user_cache) / "torch_extensions" / "pycomm"


def _intact(path: Path) -> bool:
    """Whether the file exists and ends with the SHA-256 of the rest, as ``_compile`` writes it."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _lock(file: IO[str]) -> None:
    if not _try_lock(file):
        _tell(
            "waiting for another process to compile the torch.distributed backend for torch "
            f"{torch.__version__}"
        )
        fcntl.flock(file, fcntl.LOCK_EX)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(path: Path) -> None:
    """Removes folders of processes that were killed while compiling this or another module.

    The caller has the lock of `path`. A folder of another module is in use if the module's lock is
    taken. A compiler may outlive the process that started it, so no folder's name is used twice.
    """
    for folder in list(path.parent.glob(f"*{_UNFINISHED}")):
        module = path.with_name(folder.name.rsplit(".", 2)[0])
        with Path(f"{module}.lock").open("w") as lock:
            if module == path or _try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _compile(path: Path) -> None:
    _check_tools()
    _tell(
        f"compiling the torch.distributed backend for torch {torch.__version__}, for which pycomm "
        f"was not installed: this takes half a minute or more, once ({path})"
    )
    version, abi = torch.__version__, torch.compiled_with_cxx11_abi()
    command = c10d_build.compile_command(_TORCH, version, abi) + c10d_build.link_options(_TORCH)
    _remove_leftovers(path)
    with tempfile.TemporaryDirectory(_UNFINISHED, f"{path.name}.", path.parent) as folder:
        output = Path(folder) / path.name
        done = subprocess.run(
            [*command, "-o", str(output)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise _failure(
                "the compiler fails; it must be g++ 12, clang++ 19 or newer.\n"
                f"{shlex.join(command)}\n{done.stdout[-_OUTPUT_SHOWN:]}"
            )
        digest = hashlib.sha256(output.read_bytes()).digest()
        with output.open("ab") as file:  # the loader ignores bytes after the library
            file.write(digest)
        output.replace(path)


def _check_tools() -> None:
    """Raises an error that names the missing tool or header."""
    compiler = c10d_build.compiler()[0]
    if shutil.which(compiler) is None:
        raise _failure(
            f"there is no C++ compiler {compiler!r}. Install g++ 12 or newer, set CXX to another "
            "compiler, or set TORCH_EXTENSIONS_DIR to a folder in which the backend has been "
            "compiled for the same versions of pycomm, torch and Python"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise _failure(f"{header} is missing. Install Python's headers (python3-dev)")


def _failure(reason: str) -> ImportError:
    return ImportError(
        "pycomm was installed for another torch, and its torch.distributed backend cannot be "
        f"compiled for torch {torch.__version__}: {reason}"
    )


def _tell(text: str) -> None:
    """Warns of a long wait, on stderr if the log goes nowhere."""
    logger = logging.getLogger("pycomm")
    logger.warning(text)
    if not logger.isEnabledFor(logging.INFO):
        print(f"pycomm: {text}", file=sys.stderr, flush=True)
