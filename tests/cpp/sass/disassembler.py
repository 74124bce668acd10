"""Runs NVIDIA's disassembler, which comes from PATH or from the package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sass.cubin import Cubin, Resources
from sass.flow import Flow
from sass.listing import parse

PACKAGES = ("nvidia-cuda-cuobjdump>=13,<14", "nvidia-cuda-nvdisasm>=13,<14")
PROGRAMS = ("cuobjdump", "nvdisasm")


@dataclass(frozen=True)
class Kernel:
    """A kernel's resources, and its control flow with that of the functions that it calls."""

    name: str
    resources: Resources
    flows: dict[str, Flow]


class Disassembler:
    """The programs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kernels(self, file: Path, wanted: Callable[[str], object]) -> Iterator[Kernel]:
        """The wanted kernels of an object file for one architecture, or of a cubin."""
        with tempfile.TemporaryDirectory() as temporary:
            cubin = file
            if file.suffix == ".o":
                self._run("cuobjdump", "-xelf", "all", str(file.resolve()), cwd=temporary)
                (cubin,) = Path(temporary).iterdir()
            found = {name: it for name, it in Cubin(cubin).kernels().items() if wanted(name)}
            if not found:
                return
            symbols = ",".join(str(resources.symbol) for resources in found.values())
            text = self._run("nvdisasm", "-c", "-ndf", "-fun", symbols, str(cubin))
        flows: dict[str, dict[str, Flow]] = {name: {} for name in found}
        for function in parse(text):
            flows[function.kernel][function.name] = Flow(function)
        for name, resources in found.items():
            yield Kernel(name, resources, flows[name])

    def _run(self, program: str, *arguments: str, cwd: str | None = None) -> str:
        # cuobjdump looks for nvdisasm on PATH.
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [self._folder / program, *arguments], env={**os.environ, "PATH": path}, cwd=cwd,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise OSError(f"{program} {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.stdout


def get(folder: Path) -> Disassembler:
    """The programs on PATH, or from the package index, which are then kept in a folder.

    Raises OSError if they are not to be had.
    """
    found = [shutil.which(program) for program in PROGRAMS]
    if all(found):
        return Disassembler(Path(str(found[0])).parent)
    if not folder.exists():
        _fetch(folder)
    return Disassembler(folder)


def _fetch(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        done = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"pip finds no {' and '.join(PACKAGES)}:\n{done.stderr}")
        programs = Path(temporary) / "bin"
        programs.mkdir()
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if Path(name).name in PROGRAMS:
                        program = programs / Path(name).name
                        program.write_bytes(archive.read(name))
                        program.chmod(0o755)
        programs.rename(folder)


def main() -> int:
    """Gets the programs; the exit status says whether they are there."""
    try:
        get(Path(sys.argv[1]))
    except OSError as error:
        print(f"no disassembler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
