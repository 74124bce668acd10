"""Compiles every kernel for sm_80, sm_90 and sm_100 with nvcc alone; refuses spills and warnings.

Needs neither a GPU nor torch: ``python tests/cpp/cuda_check.py [FILE ...]``. The objects stay in
build/cuda, where `make sass` reads them, and are compiled again only when a file has changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("80", "90", "100")
FLAGS = (
    "-std=c++20",
    "-O3",
    "--fmad=false",
    "--expt-relaxed-constexpr",
    "-Werror=all-warnings",
    "-Xcompiler=-Wall,-Wextra,-Werror",
    "-Xptxas=-v",
)


# The host's code takes more than half of the time, and is the same for all.
WITH_HOST_CODE = "90"


def object_of(source: Path, architecture: str) -> Path:
    """Where a file's kernels for one architecture are, compiled."""
    suffix = ".o" if architecture == WITH_HOST_CODE else ".cubin"
    name = source.relative_to(ROOT / "csrc" / "cuda").with_suffix(suffix)
    return ROOT / "build" / "cuda" / f"sm_{architecture}" / name


def is_current(output: Path) -> bool:
    """True if an object is newer than all files that it was made of."""
    listed = output.with_suffix(".d")
    if not (output.exists() and listed.exists()):
        return False
    files = listed.read_text().replace("\\\n", " ").partition(": ")[2].split()
    made = output.stat().st_mtime
    needed = [Path(__file__), *map(Path, files)]
    return all(file.exists() and file.stat().st_mtime < made for file in needed)


def check(source: Path, architecture: str) -> str:
    """Compiles one file for one architecture; returns the problems found."""
    output = object_of(source, architecture)
    name = f"{source.name} for sm_{architecture}"
    if is_current(output):
        print(f"ok  {name}: unchanged", flush=True)
        return ""
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_suffix(".new")  # becomes the object if all is well
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    kind = "-c" if architecture == WITH_HOST_CODE else "-cubin"
    command = ["nvcc", *FLAGS, "-gencode", code, f"-I{ROOT / 'csrc'}"]
    run = subprocess.run(
        [*command, "-MD", "-MF", str(output.with_suffix(".d")), kind, str(source), "-o", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        return f"{name} does not compile:\n{run.stdout}{run.stderr}"
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    if any(int(count) for count in spills):
        return f"{name} spills"
    made.replace(output)
    print(f"ok  {name}: {len(spills) // 2} kernels, no spills", flush=True)
    return ""


def main() -> int:
    """Checks all files or those named; the exit status says whether all is well."""
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH: nothing has been checked", file=sys.stderr)
        return 1
    named = [Path(name).resolve() for name in sys.argv[1:]]
    sources = named or sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(check, s, a) for s in sources for a in ARCHITECTURES]
        problems = [problem for job in jobs if (problem := job.result())]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
