"""Compiles every kernel for sm_80, sm_90 and sm_100 with nvcc alone; refuses spills and warnings.

Needs neither a GPU nor torch: ``python tests/cpp/cuda_check.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def check(source: Path, architecture: str, folder: str) -> str:
    """Compiles one file for one architecture; returns the problems found."""
    output = Path(folder) / f"{'_'.join(source.parts[-2:])}_{architecture}.o"
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", *FLAGS, "-gencode", code, f"-I{ROOT / 'csrc'}"]
    run = subprocess.run(
        [*command, "-c", str(source), "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    name = f"{source.name} for sm_{architecture}"
    if run.returncode != 0:
        return f"{name} does not compile:\n{run.stdout}{run.stderr}"
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    if any(int(count) for count in spills):
        return f"{name} spills"
    print(f"ok  {name}: {len(spills) // 2} kernels, no spills", flush=True)
    return ""


def main() -> int:
    """Checks all; the exit status says whether all is well."""
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH: nothing has been checked", file=sys.stderr)
        return 1
    sources = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(check, s, a, folder) for s in sources for a in ARCHITECTURES]
        problems = [problem for job in jobs if (problem := job.result())]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
