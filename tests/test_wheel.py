"""The wheel: builds, installs into an environment of its own, and works away from the sources."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

# One worker builds it for all.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("csrc", "pycomm", "setup.py", "pyproject.toml", "README.md", "LICENSE")

USE = """
import pathlib, sys
import torch, pycomm
where = pathlib.Path(pycomm.__file__).resolve()
assert where.is_relative_to(sys.prefix), where
assert (where.parent / "py.typed").exists()
import pycomm.bench
with pycomm.LocalWorld(2) as world:
    results = world.run(lambda g: pycomm.all_reduce(torch.ones(1000) * (g.rank + 1), group=g))
assert all(x.tolist() == [3.0] * 1000 for x in results)
print("works with", torch.__version__)
"""


def run(*command, cwd, **env):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the build leaves nothing in the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(
                source, copy / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
        else:
            shutil.copy(source, copy / part)
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "--wheel-dir", folder, copy, cwd=folder, PYCOMM_CUDA="0", CXXFLAGS="-O1")
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pycomm").rglob("*.py")}
    assert modules <= set(names)
    assert sum(name.startswith("pycomm/_C.") and name.endswith(".so") for name in names) == 1
    assert "pycomm/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pycomm"}


def test_works_in_an_environment_of_its_own(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    # It sees torch as it lies in this environment, without the .pth files of editable installs.
    (site / "torch-from-elsewhere.pth").write_text(sysconfig.get_path("purelib") + "\n")
    out = run(python, "-c", USE, cwd=tmp_path)
    assert out.startswith("works with")
    out = run(python, "-m", "pycomm.collect_env", cwd=tmp_path)
    assert "pycomm" in out
