"""The C++ libraries: a program that is none of ours finds them and runs, wherever they lie.

test_wheel.py has the same for the wheel.
"""

import re
import shutil
import tomllib

import pytest
from cpp_example import EXAMPLE, INSTALLED, OBJECTS, PACKAGE, ROOT, check_example, cmake


def built(folder, *options):
    cmake("-S", ROOT, "-B", folder, "-GNinja", OBJECTS, "-DCMAKE_INSTALL_LIBDIR=lib", *options)
    cmake("--build", folder)
    return folder


@pytest.mark.slow
def test_build_folder(tmp_path):
    """It serves without being installed, and hands on its headers, C++20 and nothing else."""
    library = built(tmp_path / "library")
    told = check_example(tmp_path / "example", f"-DCMAKE_PREFIX_PATH={library}")
    assert told == ["-isystem", f"{library}/include", "-std=gnu++20"]


@pytest.mark.slow
def test_install_prefix(tmp_path):
    """It has exactly these files, may be moved, and bears other folders of the same names."""
    library, first, prefix = (tmp_path / name for name in ("library", "first", "prefix"))
    cmake("--install", built(library), "--prefix", first)
    shutil.rmtree(library)
    first.rename(prefix)
    files = [path for path in prefix.rglob("*") if path.is_file()]
    assert {path.relative_to(prefix).as_posix() for path in files} == INSTALLED
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    package = "".join((prefix / path).read_text() for path in PACKAGE)
    assert f'set(PACKAGE_VERSION "{version}")' in package
    assert str(tmp_path) not in package
    for name in ("core/types.h", "cpu/group/group.h"):
        (tmp_path / "others" / name).parent.mkdir(parents=True)
        (tmp_path / "others" / name).write_text("#error a header of another project\n")
    others = f"-DCMAKE_CXX_FLAGS=-I{tmp_path / 'others'}"
    check_example(tmp_path / "example", f"-DCMAKE_PREFIX_PATH={prefix}", others)


@pytest.mark.slow
def test_subdirectory(tmp_path):
    """As a part of a larger build, pycomm installs nothing and changes no options."""
    folder = tmp_path / "example"
    told = check_example(folder, f"-DPYCOMM_SOURCE={ROOT}", OBJECTS)
    assert told == [f"-I{folder}/pycomm/include", "-std=gnu++20"]
    cmake("--install", folder, "--prefix", tmp_path / "prefix")
    assert not (tmp_path / "prefix").exists()


def test_page():
    """It shows the example as it is."""
    page = (ROOT / "docs/how-to/cpp.md").read_text()
    blocks = re.findall(r"```(?:c\+\+|cmake)\n(.*?)```\n", page, re.DOTALL)
    assert blocks == [(EXAMPLE / name).read_text() for name in ("main.cpp", "CMakeLists.txt")]
