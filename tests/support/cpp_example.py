"""pycomm's C++ libraries: what is installed, and the program of examples/cpp that uses them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cpp"
OBJECTS = f"-DPYCOMM_OBJECTS={ROOT / 'build' / 'objects'}"  # of the extension, to save time
PACKAGE = {
    f"lib/cmake/pycomm/pycomm-{part}.cmake"
    for part in ("config", "config-version", "targets", "targets-release")
}
INSTALLED = PACKAGE | {"lib/libpycomm_cpu.a"}
INSTALLED |= {
    f"include/pycomm/{path.relative_to(ROOT / 'csrc')}"
    for part in ("core", "cpu")
    for path in (ROOT / "csrc" / part).rglob("*.h")
}
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # CMake and ninja may lie in there


def cmake(*arguments, tool="cmake"):
    done = subprocess.run(
        [tool, *map(str, arguments)],
        env=os.environ | {"PATH": _PATH},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"


def check_example(folder, *options):
    """The example is built in a folder, and its results are right.

    Returns what its compiler was told besides the names of files.
    """
    more = ("-GNinja", "-DCMAKE_BUILD_TYPE=", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    cmake("-S", EXAMPLE, "-B", folder, *more, *options)
    cmake("--build", folder)
    cmake("--test-dir", folder, "--output-on-failure", "--no-tests=error", tool="ctest")
    commands = json.loads((folder / "compile_commands.json").read_text())
    (line,) = (entry["command"] for entry in commands if entry["file"] == f"{EXAMPLE}/main.cpp")
    return line.split()[1 : line.split().index("-o")]
