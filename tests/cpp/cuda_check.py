"""Compiles every kernel with nvcc alone, by default for sm_80, sm_90 and sm_100.

Also benchmarks/probe.cu, which nothing runs without a GPU. Refuses spills, warnings and what ptxas
compiles wrongly (ptx_flags.py).

Needs neither a GPU nor torch: ``python tests/cpp/cuda_check.py [FILE ...] [--for 90 ...]``. The
objects stay in build/cuda, where `make sass` reads them. They are compiled again only when a file
has changed. With ``--part``, 0 to 4, algorithms are compiled for float and a fifth of the other
element types only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptx_flags import functions_testing_words

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
PROBE = ROOT / "benchmarks" / "probe.cu"
SOME_TYPES = ROOT / "tests" / "cpp" / "some_types.h"
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
# nvcc 13 makes the same PTX for compute_80 and compute_90, but another one for compute_100. So one
# front end serves both.
FRONT_ENDS = {"80": ("90", "80"), "100": ("100",)}
# Their source asks for the architecture, so each has a front end of its own.
ASK = {"multicast.cu"}
# The host's code takes a third of the time, and is compiled for one architecture only; g++ compiles
# it, too, for the emulated devices. Files of a few lines instantiate the same templates, so one of
# each kind does.
WITH_HOST_CODE = "100"
REPRESENTATIVES = {"ring.cu", "coded_ring.cu", "adamw.cu", "sharded_adamw.cu"}


def has_host_code(source: Path) -> bool:
    """True if the file's code for the host is to be compiled, too."""
    lines = source.read_text().count("\n")
    return lines > 10 or source.name in REPRESENTATIVES


def front_ends(source: Path) -> dict[str, tuple[str, ...]]:
    """The architectures that each front end serves."""
    return {one: (one,) for one in ARCHITECTURES} if source.name in ASK else FRONT_ENDS


def path_of(source: Path, folder: str, suffix: str) -> Path:
    """Where something made of a file lies."""
    name = source.relative_to(PROBE.parent if source == PROBE else CUDA)
    return (ROOT / "build" / "cuda" / folder / name).with_suffix(suffix)


def object_of(source: Path, architecture: str) -> Path:
    """Where a file's kernels for one architecture are, compiled."""
    host = architecture == WITH_HOST_CODE and has_host_code(source)
    return path_of(source, f"sm_{architecture}", ".o" if host else ".cubin")


def is_current(output: Path, listed: Path) -> bool:
    """True if an object is newer than all files that it was made of."""
    if not (output.exists() and listed.exists()):
        return False
    files = listed.read_text().replace("\\\n", " ").partition(": ")[2].split()
    made = output.stat().st_mtime
    needed = [Path(__file__), *map(Path, files)]
    return all(file.exists() and file.stat().st_mtime < made for file in needed)


def forget_another_part(part: int | None) -> None:
    """Removes objects with other element types than those that are to be compiled."""
    stamp = ROOT / "build" / "cuda" / "part"
    if stamp.exists() and stamp.read_text() != str(part):
        shutil.rmtree(stamp.parent)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(str(part))


def check(source: Path, front_end: str, wanted: Sequence[str], part: int | None) -> str:
    """Compiles one file for the wanted architectures of a front end; returns the problem found."""
    listed = path_of(source, f"compute_{front_end}", ".d")
    listed.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        options = [f"-I{ROOT / 'csrc'}", "-MD", "-MF", str(listed), "--keep", "--keep-dir", kept]
        if part is not None and source.parent.name == "algorithms":
            options += [f"-DPYCOMM_PART={part}", "-include", str(SOME_TYPES)]
        ptx = Path(kept, source.stem).with_suffix(".ptx")
        compiled = [str(source), *options]
        served = front_ends(source)[front_end]
        for architecture in (one for one in served if one in wanted):
            name = f"{source.name} for sm_{architecture}"
            output = object_of(source, architecture)
            if is_current(output, listed):
                print(f"ok  {name}: unchanged", flush=True)
                continue
            code = f"arch=compute_{front_end},code=sm_{architecture}"
            problem = compile_one([*compiled, "-gencode", code], ptx, output, name)
            if problem:
                return problem
            compiled = [str(ptx)]
    return ""


def compile_one(arguments: list[str], ptx: Path, output: Path, name: str) -> str:
    """Makes one object, by way of the PTX; returns the problem found."""
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_suffix(".new")  # becomes the object if all is well
    kind = "-c" if output.suffix == ".o" else "-cubin"
    run = subprocess.run(
        ["nvcc", *FLAGS, kind, *arguments, "-o", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        return f"{name} does not compile:\n{run.stdout}{run.stderr}"
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    if any(int(count) for count in spills):
        return f"{name} spills"
    if functions := functions_testing_words(ptx.read_text()):
        return f"{name} tests a word of flags, which ptxas compiles wrongly: {functions}"
    made.replace(output)
    print(f"ok  {name}: {len(spills) // 2} kernels, no spills", flush=True)
    return ""


def add_architectures(parser: argparse.ArgumentParser) -> None:
    """Adds the option that chooses architectures."""
    parser.add_argument("--for", dest="architectures", nargs="+", choices=ARCHITECTURES)
    parser.set_defaults(architectures=ARCHITECTURES)


def main() -> int:
    """Checks all files or those named; the exit status says whether all is well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    add_architectures(parser)
    parser.add_argument("--part", type=int, choices=range(5))
    given = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH: nothing has been checked", file=sys.stderr)
        return 1
    forget_another_part(given.part)
    sources = [path.resolve() for path in given.files] or [PROBE, *sorted(CUDA.rglob("*.cu"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(check, source, front_end, given.architectures, given.part)
            for source in sources
            for front_end in front_ends(source)
        ]
        problems = [problem for job in jobs if (problem := job.result())]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
