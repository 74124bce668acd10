"""Reads the machine code that cuda_check.py has compiled; ``--write`` writes new limits.

``python -m sass [--write] [--for 90 ...]``
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from cuda_check import ROOT, add_architectures, object_of

from sass import disassembler, limits, rules
from sass.hot import HOT_LOOPS
from sass.measure import Figures, measure

CUDA = ROOT / "csrc" / "cuda"
Found = tuple[dict[str, Figures], list[str]]


def examine(programs: disassembler.Disassembler, source: Path, architecture: str) -> Found:
    """The hot loops of a file's kernels, and what is wrong with the kernels."""
    hot_loops = [one for one in HOT_LOOPS if CUDA / one.source == source]
    found: dict[str, Figures] = {}
    problems: list[str] = []
    seen: set[str] = set()

    def is_wanted(name: str) -> bool:
        return bool(rules.MEETING.search(name)) or any(one.kernel in name for one in hot_loops)

    if not object_of(source, architecture).exists():
        return found, [f"{source.name} has not been compiled"]
    for kernel in programs.kernels(object_of(source, architecture), is_wanted):
        if rules.MEETING.search(kernel.name):
            problems += [f"{kernel.name} {problem}" for problem in rules.problems(kernel)]
        for one in hot_loops:
            if one.kernel in kernel.name:
                seen.add(one.name)
                try:
                    found[one.name] = measure(kernel, one, architecture)
                except ValueError as error:
                    problems.append(f"{one.name}: {error}")
    problems += [f"no kernel for {one.name}" for one in hot_loops if one.name not in seen]
    return found, problems


def report(architecture: str, found: dict[str, Figures]) -> None:
    """Prints the figures as a table."""
    print(f"\nsm_{architecture:<31}", end="")
    print("instructions  loads  rounds  registers  stack  blocks  KiB in flight")
    for name, one in found.items():
        print(
            f"{name:34}{one.instructions:12.1f}{one.loads:7}{one.rounds:8}{one.registers:11}"
            f"{one.stack:7}{one.blocks:8}{one.bytes_in_flight / 1024:15.1f}"
        )


def main() -> int:
    """Examines all kernels; the exit status says whether all is well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    add_architectures(parser)
    given = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH: nothing has been read", file=sys.stderr)
        return 1
    try:
        programs = disassembler.get(ROOT / "build" / "disassembler")
    except OSError as error:
        print(f"no disassembler, nothing has been read: {error}", file=sys.stderr)
        return 1
    nvcc = limits.compiler()
    sources = sorted(CUDA.rglob("*.cu"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            a: [pool.submit(examine, programs, source, a) for source in sources]
            for a in given.architectures
        }
    failed = False
    for architecture in given.architectures:
        results = [job.result() for job in jobs[architecture]]
        merged = {name: one for found, _ in results for name, one in found.items()}
        figures = {one.name: merged[one.name] for one in HOT_LOOPS if one.name in merged}
        report(architecture, figures)
        problems = [problem for _, some in results for problem in some]
        written_with, limited = limits.read(architecture)
        if given.write:
            limits.write(architecture, nvcc, figures)
        elif limited and written_with != nvcc:
            print(f"not compared: the limits are for nvcc {written_with}, this is {nvcc}")
        else:
            problems += limits.worse(limited, figures)
        for problem in problems:
            print(f"sm_{architecture}: {problem}", file=sys.stderr)
        failed = failed or bool(problems)
    if failed:
        print("`make sass-limits` writes new limits", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
