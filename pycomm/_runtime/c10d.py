"""The C++ module of the torch.distributed backend, compiled at its first use if need be.

pycomm is installed with the module for one minor version of torch. For another torch, the first
process that needs the module compiles it into the folder in which torch keeps extensions that are
compiled at run time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import torch

from pycomm._runtime import c10d_build, log
from pycomm._runtime.c10d_build import module_name

# Functions of the C++ module that is compiled for one version of torch (see ``c10d_build``).
#
# Each function is None if pycomm was installed for another torch than the one that runs.


def _installed() -> Any:
    try:
        return importlib.import_module(f"pycomm.{module_name(torch.__version__)}")
    except ImportError:  # pycomm was installed for another torch
        return None


_module = _installed()
# Reads tensors for the fast path of collectives.
tensor_reader: Any = getattr(_module, "tensor_reader", None)
# take_memory(taker, giver): the taker, and tensors that share its memory, get the giver's memory.
take_memory: Any = getattr(_module, "take_memory", None)

# The C++ module of the torch.distributed backend, compiled at its first use if need be.

_OUTPUT_SHOWN = 4000  # characters of a failed compiler's output
_UNFINISHED = ".unfinished"  # ends the name of a folder in which a module is being compiled
_TORCH = Path(torch.__file__).parent
_loading = threading.Lock()


def load() -> Any:
    """The module for the torch that runs.

    Raises:
        ImportError: the module must be compiled, and compiling fails.
    """
    name = f"pycomm.{c10d_build.module_name(torch.__version__)}"
    with _loading:
        if importlib.util.find_spec(name) is not None:  # installed, or loaded before
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, compiled())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        return module


def compiled() -> Path:
    """The path of the compiled module in the cache; compiles the module if it is missing."""
    path = _path()
    if _intact(path):  # the folder may then be read-only
        return path
    try:
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
    """torch.utils.cpp_extension uses the same variables, but its import takes long."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache / "torch_extensions"
    return Path(folder) / "pycomm"


def _intact(path: Path) -> bool:
    """Whether the file exists and ends with the SHA-256 of the rest, as ``_compile`` writes it."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _lock(file: IO[str]) -> None:
    if not _try_lock(file):
        log.backend_awaits_compiler(torch.__version__)
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
    log.backend_compiles(torch.__version__, str(path))
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
