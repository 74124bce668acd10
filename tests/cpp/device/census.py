"""Fails if no test has launched a kernel: python census.py NM FOLDER LIBRARY TEST...

FOLDER holds a file for every test, with the offsets of the kernels that it has launched
(census.cpp). Each kernel of the library has a variable kKernel (cuda/runtime.cuh).
"""

import re
import subprocess
import sys
from pathlib import Path

KERNEL = re.compile(r"pycomm::cuda::kKernel<&\((.*)\)>")


def symbols(nm: str, binary: Path) -> list[tuple[int, str]]:
    """The address and demangled name of everything that a binary defines."""
    lines = subprocess.check_output(
        [nm, "--demangle", "--defined-only", "--no-sort", str(binary)], text=True
    )
    found = re.findall(r"^([0-9a-f]+) \w (.*)$", lines, re.MULTILINE)
    return [(int(address, 16), name) for address, name in found]


def main(nm: str, folder: Path, library: Path, tests: list[Path]) -> str:
    """Returns an error, or an empty string."""
    found = (KERNEL.fullmatch(name) for _, name in symbols(nm, library))
    kernels = {match[1] for match in found if match}
    launched: set[str] = set()
    for test in tests:
        offsets = {int(offset, 16) for offset in (folder / test.name).read_text().split()}
        launched |= {name for address, name in symbols(nm, test) if address in offsets}
    missing = sorted(kernels - launched)
    print(f"{len(kernels) - len(missing)} of {len(kernels)} kernels were launched by tests")
    if not kernels:
        return "no kernels found"
    return "".join(f"\nno test launches {name}" for name in missing)


if __name__ == "__main__":
    nm, *paths = sys.argv[1:]
    folder, library, *tests = map(Path, paths)
    sys.exit(main(nm, folder, library, tests) or None)
