"""The wheel: builds, installs into an environment of its own, and works away from the sources."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from unittest.mock import ANY

import pytest
import setuptools
import torch
from cpp_example import INSTALLED, check_example

from pycomm._runtime import c10d_build

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
INFORMATION = [
    "licenses/LICENSE",
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "top_level.txt",
]
SOURCES = [
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
]
PLATFORM = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
OTHER_TORCH = "2.99"  # the torch that is there takes its place
USE = """
import pathlib, sys
import torch
torch.__version__ = sys.argv[1]
import torch.distributed as dist
assert "pycomm" in dist.Backend.backend_list, "torch has not found the entry point"
import pycomm
where = pathlib.Path(pycomm.__file__).resolve()
assert where.is_relative_to(sys.prefix), where
assert (where.parent / "py.typed").exists()
import pycomm.bench
with pycomm.LocalWorld(2) as world:
    results = world.run(lambda g: pycomm.all_reduce(torch.ones(1000) * (g.rank + 1), group=g))
assert all(x.tolist() == [3.0] * 1000 for x in results)
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print("works with", torch.__version__)
"""


def run(*command, cwd, **env):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_wheel(tmp_path):
    """A single test, so that workers do not each build the wheel."""
    check_sources(tmp_path)
    build(tmp_path / "wheel", headers_of_other_torches(tmp_path / "headers"))
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    check_contents(wheel)
    check_name(wheel)
    check_works_in_an_environment_of_its_own(wheel, tmp_path)
    check_serves_programs_in_cpp(wheel, tmp_path)


def headers_of_other_torches(folder):
    """As tests/cpp/torch_headers.py makes it."""
    (folder / OTHER_TORCH).mkdir(parents=True)
    (folder / OTHER_TORCH / "include").symlink_to(Path(torch.__file__).parent / "include")
    return folder


def build(folder, headers):
    """Takes the objects of the last build, and leaves nothing but these in the sources."""
    for left in (ROOT / "build").glob("*"):
        if left.name.startswith(("lib.", "bdist.")):
            shutil.rmtree(left)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    stale = ROOT / "build" / f"lib.{PLATFORM}" / "pycomm" / "_c10d_1_0.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    options = ("--wheel-dir", folder, ROOT)
    run(*pip, *options, cwd=folder.parent, PYCOMM_TORCH_HEADERS=str(headers))


@pytest.mark.parametrize("strict", [None, "1"])
def test_warnings_are_errors_only_in_the_gate(monkeypatch, strict):
    """Users with newer compilers may see new warnings, which must not be errors for them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYCOMM_CUDA", "0")
    monkeypatch.delenv("PYCOMM_STRICT", raising=False)
    if strict is not None:
        monkeypatch.setenv("PYCOMM_STRICT", strict)
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    names = [extension.name for extension in given["ext_modules"]]
    assert names == ["pycomm._C", f"pycomm.{c10d_build.module_name(torch.__version__)}"]
    for extension in given["ext_modules"]:
        flags = extension.extra_compile_args
        assert {"-Wall", "-Wextra"} <= set(flags)
        assert ("-Werror" in flags) == (strict == "1")
    assert "export PYCOMM_STRICT=1" in (ROOT / ".ci" / "run").read_text()


def extensions(monkeypatch, capfd, nvcc, cuda, wanted):
    """What setup.py says of CUDA, and whether it builds it."""
    folder = Path(os.environ["CUDA_HOME"])
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin/nvcc").write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V1'"
    )
    (folder / "bin/nvcc").chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYCOMM_CUDA", wanted)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    return "cudart_static" in given["ext_modules"][0].libraries, capfd.readouterr().out


def test_a_toolkit_of_another_major_version_is_left_out(monkeypatch, tmp_path, capfd):
    """torch's build helper would refuse to compile."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    args = monkeypatch, capfd
    assert extensions(*args, nvcc="13.3", cuda="13.0", wanted="auto")[0]
    built, said = extensions(*args, nvcc="12.4", cuda="13.0", wanted="auto")
    assert not built
    assert "left out CUDA" in said
    assert "nvcc 12.4" in said
    assert "with CUDA 13.0" in said
    assert extensions(*args, nvcc="12.4", cuda=None, wanted="auto") == (False, ANY)
    with pytest.raises(SystemExit, match=r"nvcc 12\.4 .* with CUDA 13\.0"):
        extensions(*args, nvcc="12.4", cuda="13.0", wanted="1")
    with pytest.raises(SystemExit, match="with CUDA None"):
        extensions(*args, nvcc="13.0", cuda=None, wanted="1")


@pytest.mark.slow
def test_sources_that_are_not_compiled_say_so(tmp_path):
    """As in a checkout after `pip install .`, where they hide the installed package."""
    for path in ROOT.glob("pycomm/**/*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
    (tmp_path / "pycomm_backend.py").symlink_to(ROOT / "pycomm_backend.py")
    for command in (["-c", "import pycomm"], ["-m", "pycomm.top"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode != 0
        assert f"{tmp_path}/pycomm has pycomm's sources, which are not compiled" in done.stderr
        assert "in another folder" in done.stderr
        assert "pip install --no-build-isolation -e ." in done.stderr


def check_contents(wheel):
    """The modules and headers of the sources, and these other files."""
    python = [path for kind in ("py", "pyi") for path in (ROOT / "pycomm").rglob(f"*.{kind}")]
    expected = {path.relative_to(ROOT).as_posix() for path in python}
    expected |= {f"pycomm/{path}" for path in INSTALLED}
    expected |= {f"pycomm/csrc/{name}" for name in c10d_build.sources()}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = ["_C", *map(c10d_build.module_name, (torch.__version__, OTHER_TORCH))]
    expected |= {f"pycomm/{name}{suffix}" for name in modules}
    info = "torch_pycomm-" + wheel.name.split("-")[1] + ".dist-info"
    expected |= {f"{info}/{name}" for name in INFORMATION}
    expected |= {"pycomm_backend.py", "pycomm/py.typed", "pycomm/advise/constants.json"}
    sizes = {entry.filename: entry.compress_size for entry in zipfile.ZipFile(wheel).infolist()}
    assert set(sizes) == expected
    assert sum(sizes[f"pycomm/{path}"] for path in INSTALLED) < 5 << 20


def check_name(wheel):
    """The name pycomm belongs to another project on the package index."""
    assert wheel.name.startswith("torch_pycomm-")
    for path in sources_that_name_it():
        for extra in re.findall(r"pip install [^\n]*?([\w.-]+)\[", path.read_text()):
            assert extra in ("torch-pycomm", "."), path


def sources_that_name_it():
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    return [*found, *ROOT.glob("pycomm/**/*.py"), *ROOT.glob("examples/*.py")]


def check_works_in_an_environment_of_its_own(wheel, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    # It sees torch as it lies in this environment, without the .pth files of editable installs.
    (site / "torch-from-elsewhere.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for version in (torch.__version__, f"{OTHER_TORCH}.1"):
        out = run(python, "-c", USE, version, cwd=tmp_path, CXX="no-compiler", HOME=str(tmp_path))
        assert out == f"works with {version}\n"
    out = run(python, "-m", "pycomm.collect_env", cwd=tmp_path)
    assert "pycomm" in out
    for path in [site, *site.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        said = run(python, "-m", "pycomm.check", cwd=tmp_path)
    finally:
        for path in [site, *site.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
    assert " ok, 0 FAILED, " in said


def check_serves_programs_in_cpp(wheel, tmp_path):
    """CMake finds the libraries where the package says, and where its entry point says."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    show = "import pycomm; print(pycomm.cmake_prefix_path)"
    prefix = run(sys.executable, "-c", show, cwd=tmp_path, PYTHONPATH=str(site)).strip()
    assert prefix == str(site / "pycomm")
    (distribution,) = metadata.distributions(path=[str(site)])
    (entry,) = distribution.entry_points.select(group="cmake.prefix")
    assert site / entry.value == Path(prefix)
    check_example(tmp_path / "example", f"-DCMAKE_PREFIX_PATH={prefix}")


def check_sources(folder):
    """The sdist has all that a build reads. `make nightly` builds from it, which takes minutes."""
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", make, folder, cwd=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        files = [member.name for member in packed.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in files if ".egg-info/" not in name}
    package = [path for path in ROOT.glob("pycomm/**/*") if path.suffix not in (".so", ".pyc")]
    sources = [path for path in [*package, *ROOT.glob("csrc/**/*")] if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    assert names == expected | {"pycomm_backend.py", *SOURCES}
