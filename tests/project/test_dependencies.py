"""The allowed includes and imports: bind -> cpu, cuda -> core, and layers in Python."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# The layers whose headers each layer may include.
LAYERS = {
    "core": {"core"},
    "cpu": {"cpu", "core"},
    "cuda": {"cuda", "core"},
    "bind": {"bind", "cpu", "cuda", "core"},
    "c10d": {"c10d", "core"},
}
# A group's CUDA side passes failures and progress between kernels and the group on the host. The
# torch.distributed backend shares the names of element types with the binding.
ALSO = {"cuda/group.h": {"cpu"}, "c10d/request.cpp": {"bind"}}
TORCH = r"torch|ATen|c10|pybind11|Python\.h"
SYSTEM = r"sys/|linux/|unistd|fcntl|pthread|poll|sched"
# Headers of other projects that each layer must not include.
FORBIDDEN = {
    "core": TORCH + r"|cuda|cooperative_groups|" + SYSTEM,
    "cpu": TORCH + "|cuda",
    "cuda": TORCH,
    "bind": "cuda",
    "c10d": "cuda",
}


def sources():
    found = [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu", ".inc")]
    assert len(found) > 20
    return sorted(found)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_includes(path):
    layer = path.relative_to(CSRC).parts[0]
    allowed = LAYERS[layer] | ALSO.get(str(path.relative_to(CSRC)), set())
    for kind, name in INCLUDE.findall(path.read_text()):
        if kind == '"':
            assert (CSRC / name).exists(), f'"{name}" is no file of ours'
            assert name.split("/")[0] in allowed, f"{layer} may not include {name}"
        else:
            assert not re.match(FORBIDDEN[layer], name), f"{layer} may not include <{name}>"


def test_core_includes_only_the_standard_library():
    for path in (CSRC / "core").rglob("*.h"):
        for kind, name in INCLUDE.findall(path.read_text()):
            assert kind == '"' or re.fullmatch(r"[a-z_]+", name), f"{path.name} includes <{name}>"


# From the lowest layer up. A room is a package or a module. It imports rooms of lower layers and of
# its own layer only, for type checkers, too.
PYTHON_LAYERS = [
    {"_C", "_names", "_peaks", "errors", "report", "stats"},
    {"_inputs", "_runtime"},
    {
        "_init",
        "_join",
        "_nccl",
        "_short_way",
        "_work",
        "compression",
        "group",
        "local_world",
        "run",
    },
    {"block_collectives", "collectives", "compressed", "p2p", "recovery"},
    {"_kernels", "batches", "ops", "sharing"},
    {"_training", "optim"},
    {"backend", "data_parallel", "fsdp", "hooks"},
    {"exporters", "integrations", "memory", "top", "tracing"},
    {"__init__", "collect_env"},
    {"advise", "bench", "check"},
]
LEVEL = {name: level for level, names in enumerate(PYTHON_LAYERS) for name in names}


def modules():
    """All modules, by their dotted names inside of pycomm; a package by its own name."""
    found = {}
    for path in (ROOT / "pycomm").rglob("*.py"):
        parts = path.relative_to(ROOT / "pycomm").with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path):
    """All names that a module imports: at its head, in functions, and for type checkers.

    A module with lazy names says in a stub of its own where they come from.
    """
    stub = path.with_suffix(".pyi")
    trees = [ast.parse(file.read_text()) for file in (path, stub) if file.exists()]
    for node in itertools.chain(*map(ast.walk, trees)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path):
    """pycomm's modules that a file imports; other names are attributes of such a module."""
    for name in imported(path):
        if name == "pycomm" or name.startswith("pycomm."):
            inside = name.removeprefix("pycomm").removeprefix(".")
            while inside not in MODULES and inside != "_C":
                inside = inside.rpartition(".")[0] or "__init__"
            yield inside


def layer_of(module):
    """The room of a module, as the table of layers names it."""
    return module.split(".")[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_python_imports(name):
    for module in imported_modules(MODULES[name]):
        if layer_of(module) != layer_of(name):
            allowed = LEVEL[layer_of(module)] <= LEVEL[layer_of(name)]
            assert allowed, f"{name} may not import {module}"


def cycle_among(imports):
    """One cycle of a graph, if it has any."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        found = next(filter(None, map(visit, sorted(imports.get(name, ())))), None)
        path.pop()
        done.add(name)
        return found

    return next(filter(None, map(visit, sorted(imports))), None)


def test_no_module_imports_itself_by_way_of_others():
    imports = {name: set(imported_modules(path)) - {name} for name, path in MODULES.items()}
    assert sum(map(len, imports.values())) > 300
    assert cycle_among(imports) is None


def test_cycles_are_found():
    assert cycle_among({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert cycle_among({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_private_modules_stay_in_their_package():
    """No module imports underscored modules of another sub-package."""
    for path in MODULES.values():
        home = ".".join(path.relative_to(ROOT / "pycomm").parent.parts)
        for module in imported_modules(path):
            package, _, last = module.rpartition(".")
            if package and last.startswith("_"):
                assert package == home, f"{path} imports {module}"


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_importing_pycomm_imports_nothing_heavy():
    code = "import sys, pycomm; print(*sorted(sys.modules))"
    loaded = set(run_python(code).split())
    assert "pycomm._C" in loaded
    assert not loaded & {"cupy", "matplotlib", "rich", "pytest", "deepspeed", "mpi4py"}
    assert not any(name.startswith("pycomm.bench") for name in loaded)


def test_importing_pycomm_starts_nothing():
    """No threads, no files in shared memory, no default group."""
    code = """
import os, threading, torch
before = set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
import pycomm
after = set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
print(before == after, threading.active_count(), pycomm._init._default)
"""
    assert run_python(code).split() == ["True", "1", "None"]


def private_parts_of_torch(code):
    """The names with an underscore that a module uses from torch, however it imports them."""
    tree = ast.parse(code)
    bound, found = {"torch"}, set()  # names of the module that stand for something of torch
    for node in ast.walk(tree):
        names = getattr(node, "names", [])
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name for alias in names}
            found |= {f"{node.module}.{alias.name}" for alias in names}
        elif isinstance(node, ast.Import):
            for alias in names:
                if alias.name.split(".")[0] == "torch":
                    bound.add(alias.asname or "torch")
                    found.add(alias.name)
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    own = {name for name in found if name.split(".")[0] in bound}
    return {name for name in own if re.search(r"(^|\.)_(?!_)", name)}


def test_private_parts_are_found():
    for code, part in [
        ("import torch\ntorch._C.f()", "torch._C"),
        ("import torch._dynamo as d", "torch._dynamo"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch._C import x as y", "torch._C.x"),
        ("from torch import distributed as d\nd._f(1)", "d._f"),
        ("import torch.distributed as dist\nx = dist.y._z", "dist.y._z"),
    ]:
        assert part in private_parts_of_torch(code), code
    fine = "import torch\nfrom torch import nn\nnn.Module.__init__(self._mine)\nself._torch.x"
    assert private_parts_of_torch(fine) == set()


def test_private_parts_of_torch_stand_in_one_module():
    found = {name for name, path in MODULES.items() if private_parts_of_torch(path.read_text())}
    assert found == {"_runtime.torch_private"}
