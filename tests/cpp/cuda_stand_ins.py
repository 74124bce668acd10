"""Writes the CUDA libraries that a CUDA build of torch for aarch64 loads: without any code in them.

``python tests/cpp/cuda_stand_ins.py TORCH SYSTEM OUTPUT``: the folders of torch's libraries, of the
system's, and of the stand-ins. torch must load, which takes all names and versions, but on a
machine without a GPU it calls none of them. The package index has torch for aarch64 with CUDA only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TOOL = "aarch64-linux-gnu-"
NO_DEVICE = 100  # what every function returns: cudaErrorNoDevice
# Libraries whose names have no versions: any of them may have to offer a name without one.
UNVERSIONED = re.compile(r"lib(cuda|cusparseLt|cufile|nccl)\.so")


def lines_of(tool: str, *arguments: object) -> list[str]:
    command = [TOOL + tool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def names(library: Path, kind: str) -> set[str]:
    """The dynamic symbols that a library defines or lacks, with their versions."""
    return {line.split()[-1] for line in lines_of("nm", "-D", kind, library) if line.split()}


def needed(library: Path) -> tuple[set[str], dict[str, set[str]]]:
    """The libraries that a library loads, and for each of them the versions of names in it."""
    loaded, versions, of = set(), defaultdict(set), ""
    for line in lines_of("objdump", "-p", library):
        if found := re.match(r"\s+NEEDED\s+(\S+)", line):
            loaded.add(found[1])
        elif found := re.match(r"\s+required from (\S+):", line):
            of = found[1]
        elif of and (found := re.match(r"\s+0x\w+ 0x\w+ \d+ (\S+)", line)):
            versions[of].add(found[1])
    return loaded, versions


def write(output: Path, library: str, names_of: dict[str, set[str]]) -> None:
    """Writes a library with these names, by version; an empty version stands for none."""
    text = "".join(
        f".globl {name}\n.type {name},%function\n{name}:\n"
        for name in sorted(set().union(*names_of.values()))
    )
    source, script = output / "names.s", output / "versions"
    source.write_text(f".text\n{text}mov x0, #{NO_DEVICE}\nret\n")
    versions = {version: listed for version, listed in names_of.items() if version}
    script.write_text(
        "\n".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(listed))} }};"
            for version, listed in versions.items()
        )
    )
    options = [f"-Wl,-soname,{library}", "-o", output / library, source]
    if versions:
        options.append(f"-Wl,--version-script={script}")
    subprocess.run([f"{TOOL}gcc", "-shared", "-nostdlib", *options], check=True)
    source.unlink()
    script.unlink()


def main(torch: Path, system: Path, output: Path) -> None:
    ours = sorted(torch.glob("*.so*"))
    there = [path for path in system.rglob("*.so*") if path.is_file()]
    found = {path.name for path in (*ours, *there)}
    loads = [needed(library) for library in ours]
    missing = set().union(*(loaded for loaded, _ in loads)) - found
    names_of: dict[str, dict[str, set[str]]] = {library: defaultdict(set) for library in missing}
    libraries_of = defaultdict(set)
    for _, versions in loads:
        for library in versions.keys() & missing:
            for version in versions[library]:
                names_of[library][version] = set()
                libraries_of[version].add(library)
    defined = {
        name.split("@")[0] for path in (*ours, *there) for name in names(path, "--defined-only")
    }
    for symbol in set().union(*(names(library, "-u") for library in ours)):
        name, _, version = symbol.replace("@@", "@").partition("@")
        if name not in defined:
            bare = {library for library in missing if UNVERSIONED.match(library)}
            for library in libraries_of[version] if version else bare:
                names_of[library][version].add(name)
    output.mkdir(parents=True, exist_ok=True)
    for library in sorted(missing):
        write(output, library, names_of[library])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
