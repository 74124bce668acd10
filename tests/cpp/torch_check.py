"""Compiles the torch.distributed backend against the headers of other versions of torch.

``python tests/cpp/torch_check.py FOLDER [PART]``, after ``torch_headers.py`` with the same ones.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch_headers import others

BUILD = runpy.run_path(str(Path(__file__).parents[2] / "pycomm/_runtime/c10d_build.py"))
OPTIONS = ("-fsyntax-only", "-Wall", "-Wextra", "-Werror")


def check(version: str, folder: Path) -> bool:
    """Whether the backend compiles against one version, without warnings."""
    began = time.monotonic()
    command = [*BUILD["compile_command"](folder / version, version), *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"does not compile against torch {version}:\n{done.stderr}", file=sys.stderr)
        return False
    print(f"ok  torch {version}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def main() -> int:
    """Checks the versions; the exit status says whether all is well."""
    folder, versions = Path(sys.argv[1]), others(*sys.argv[2:])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda version: check(version, folder), versions))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
