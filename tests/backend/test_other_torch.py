"""The backend where pycomm was installed for another torch: its C++ module is compiled once.

Except in one test, a script takes the compiler's place: it copies the module that setup.py built.
"""

import fcntl
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import helpers
import pytest
import torch

import pycomm
from pycomm._runtime import c10d_build, c10d_cache

PACKAGE = Path(pycomm.__file__).parent
MODULE = c10d_build.module_name(torch.__version__)
BUILT = PACKAGE / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"

COMPILER = f"""#!/bin/sh
echo "$@" >> "$CALLS"
until [ -e "$MAY_END" ]; do sleep 0.02; done
for output; do :; done
cp {BUILT} "$output"
"""

# An editable installation would find the module that setup.py built.
RANK = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import torch, torch.distributed as dist, pycomm
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("pycomm", store=dist.FileStore(store, size), rank=rank, world_size=size)
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
print(x.tolist(), sys.modules["pycomm.{MODULE}"].__file__)
dist.destroy_process_group()
"""


@pytest.fixture
def environment(tmp_path):
    """Variables for a process whose pycomm was installed for another torch."""
    site = tmp_path / "site"
    (site / "pycomm").mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if not path.name.startswith("_c10d_"):
            (site / "pycomm" / path.name).symlink_to(path)
    if not (site / "pycomm" / "csrc").exists():
        (site / "pycomm" / "csrc").symlink_to(c10d_build.CSRC)
    (site / "pycomm_backend.py").symlink_to(PACKAGE.parent / "pycomm_backend.py")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return {
        "PYTHONPATH": str(site),
        "PYCOMM_LOG": "info",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
        "CXX": str(compiler),
        "CALLS": str(tmp_path / "calls"),
        "MAY_END": str(tmp_path),
    }


@pytest.fixture
def here(environment, monkeypatch):
    """Sets these variables in this process, for tests that do not load the module."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.fixture
def start(tmp_path):
    """Starts processes, and kills those that are left."""
    started = []

    def start_rank(variables, rank=0, size=1):
        store = tmp_path / (f"store-{len(started)}" if size == 1 else "store")
        log = (tmp_path / f"log-{len(started)}").open("w+")
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(store)],
            env=os.environ | variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        process.log = Path(log.name)
        started.append(process)
        return process

    yield start_rank
    for process in started:
        process.kill()
        process.wait()


def calls(variables):
    path = Path(variables["CALLS"])
    return len(path.read_text().splitlines()) if path.exists() else 0


def folders(variables):
    cache = Path(variables["TORCH_EXTENSIONS_DIR"]) / "pycomm"
    return [path.name for path in cache.iterdir() if path.is_dir()]


def output(process):
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, process.log.read_text()
    return out


def logged(process, text):
    return text in process.log.read_text()


@pytest.mark.slow
def test_ranks_that_start_at_once_compile_once(environment, start, tmp_path):
    environment["MAY_END"] = str(tmp_path / "may end")
    ranks = [start(environment, rank, 2) for rank in range(2)]
    helpers.wait_until(lambda: any(logged(rank, "compiling the torch.dist") for rank in ranks), 60)
    helpers.wait_until(lambda: any(logged(rank, "waiting for another") for rank in ranks), 60)
    Path(environment["MAY_END"]).touch()
    outputs = [output(rank) for rank in ranks]
    assert outputs[0].startswith("[3.0, 3.0, 3.0] " + environment["TORCH_EXTENSIONS_DIR"])
    assert outputs[0] == outputs[1]
    assert calls(environment) == 1


@pytest.mark.slow
def test_a_killed_process_does_not_hold_the_lock(environment, start, tmp_path):
    environment["MAY_END"] = str(tmp_path / "may end")
    killed = start(environment)
    helpers.wait_until(lambda: calls(environment) == 1, 60)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # The first compiler is still running, and has written nothing.
    assert output(start(environment | {"MAY_END": str(tmp_path)})).startswith("[1.0, 1.0, 1.0]")
    Path(environment["MAY_END"]).touch()
    assert not folders(environment)
    assert calls(environment) == 2
    assert output(start(environment | {"CXX": "none"})).startswith("[1.0, 1.0, 1.0]")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_compiler(environment, start):
    del environment["CXX"]
    first, second = (start(environment, rank, 2) for rank in range(2))
    assert output(first) == output(second)
    (path,) = Path(environment["TORCH_EXTENSIONS_DIR"]).glob("pycomm/*.so")
    assert path.name.startswith(f"{MODULE}-{torch.__version__}-")
    assert path.read_bytes()[:-32] != BUILT.read_bytes()


def test_a_compiled_module_is_used_again_without_a_compiler(here, monkeypatch):
    path = c10d_cache.compiled()
    assert path.read_bytes()[:-32] == BUILT.read_bytes()
    monkeypatch.setenv("CXX", "none")
    assert c10d_cache.compiled() == path
    assert calls(here) == 1


def test_what_killed_processes_have_left_is_removed(here):
    cache = Path(here["TORCH_EXTENSIONS_DIR"]) / "pycomm"
    for name in ("old.so.abc.unfinished", "other.so.def.unfinished", "not mine"):
        (cache / name).mkdir(parents=True)
        (cache / name / "part of a module").touch()
    with (cache / "other.so.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it is being compiled
        c10d_cache.compiled()
    assert sorted(folders(here)) == ["not mine", "other.so.def.unfinished"]


@pytest.mark.parametrize("keep", [0, 20, 100_000, -1])
def test_incomplete_modules_are_compiled_again(here, keep):
    path = c10d_cache.compiled()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert c10d_cache.compiled() == path
    assert path.read_bytes() == whole
    assert calls(here) == 2


def test_damaged_modules_are_compiled_again(here):
    path = c10d_cache.compiled()
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    assert c10d_cache.compiled().read_bytes() == whole
    assert calls(here) == 2


def test_all_sources_are_compiled():
    listed = set(c10d_build.sources())
    folder = c10d_build.CSRC / "c10d"
    assert {f"c10d/{path.name}" for path in folder.iterdir()} < listed
    assert "core/backend_table.h" in listed


def test_what_the_module_depends_on_is_in_its_path(monkeypatch):
    paths = {c10d_cache._path()}
    sources = c10d_build.sources()
    changed = sources | {"core/call.h": sources["core/call.h"] + b"\n"}
    for target, name, value in [
        (torch, "__version__", "2.99.1"),
        (torch, "compiled_with_cxx11_abi", lambda: False),
        (sysconfig, "get_config_var", lambda _: ".cpython-399-riscv.so"),
        (c10d_build, "FLAGS", ["-O1"]),
        (c10d_build, "sources", lambda: changed),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            paths.add(c10d_cache._path())
    assert len(paths) == 6


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/some/where"}, "/some/where/pycomm"),
        ({"XDG_CACHE_HOME": "/my/cache"}, "/my/cache/torch_extensions/pycomm"),
        ({"HOME": "/me"}, "/me/.cache/torch_extensions/pycomm"),
    ],
)
def test_folder_of_the_cache(monkeypatch, variables, folder):
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(c10d_cache._folder()) == folder


def test_a_user_without_a_home(here, monkeypatch):
    """As a number without a name in a container, with and without the variable that helps."""

    def no_home(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert c10d_cache.compiled().exists()
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    refuses("no home directory", "Set TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", "")
    refuses("HOME is empty", "Set TORCH_EXTENSIONS_DIR")
    assert calls(here) == 1


@pytest.mark.parametrize("shown", ["info", ""])
def test_compiling_is_announced_once(environment, start, shown):
    """In the log if somebody reads it, otherwise on stderr."""
    rank = start(environment | {"PYCOMM_LOG": shown})
    output(rank)
    assert rank.log.read_text().count("compiling the torch.distributed backend") == 1


def refuses(*texts):
    with pytest.raises(ImportError) as caught:
        c10d_cache.compiled()
    assert f"cannot be compiled for torch {torch.__version__}" in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def test_errors_say_what_is_missing(here, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler -m64")
        refuses("no C++ compiler 'no-such-compiler'", "Install g++", "CXX")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "include"))
        refuses(str(tmp_path / "include" / "Python.h"), "python3-dev")
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "calls" / "no folder"))
        (tmp_path / "calls").touch()
        refuses("the cache cannot be written", "TORCH_EXTENSIONS_DIR")
    assert calls(here) == 0


def test_a_failed_compiler_leaves_only_the_lock(here, tmp_path):
    Path(here["CXX"]).write_text("#!/bin/sh\necho unity.cpp:1: what is this; exit 1\n")
    refuses("g++ 12", "unity.cpp:1: what is this")
    assert [path.suffix for path in (tmp_path / "cache" / "pycomm").iterdir()] == [".lock"]
