"""Who may include or import whom: bind -> cpu, cuda -> core, and the same in Python."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# What of our own each layer may include.
LAYERS = {
    "core": {"core"},
    "cpu": {"cpu", "core"},
    "cuda": {"cuda", "core"},
    "bind": {"bind", "cpu", "cuda", "core"},
}
TORCH = r"torch|ATen|c10|pybind11|Python\.h"
SYSTEM = r"sys/|linux/|unistd|fcntl|pthread|poll|sched"
# What of others' each layer may not.
FORBIDDEN = {
    "core": TORCH + r"|cuda|cooperative_groups|" + SYSTEM,
    "cpu": TORCH + "|cuda",
    "cuda": TORCH,
    "bind": "cuda",
}


def sources():
    found = [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu", ".inc")]
    assert len(found) > 20
    return sorted(found)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_includes(path):
    layer = path.relative_to(CSRC).parts[0]
    for kind, name in INCLUDE.findall(path.read_text()):
        if kind == '"':
            assert (CSRC / name).exists(), f'"{name}" is no file of ours'
            assert name.split("/")[0] in LAYERS[layer], f"{layer} may not include {name}"
        else:
            assert not re.match(FORBIDDEN[layer], name), f"{layer} may not include <{name}>"


def test_core_includes_only_the_standard_library():
    for path in (CSRC / "core").rglob("*.h"):
        for kind, name in INCLUDE.findall(path.read_text()):
            assert kind == '"' or re.fullmatch(r"[a-z_]+", name), f"{path.name} includes <{name}>"


# From the lowest layer up; a module imports only what comes before it.
PYTHON_LAYERS = [
    {"_C", "_runtime.log", "_runtime.torch_private"},
    {"errors", "_inputs.labels", "_inputs.arguments"},
    {"_training.graphs", "_training.prefixes", "_training.hook_state"},
    {"_inputs.dtypes", "_inputs.arrays", "_training.zeros"},
    {"_runtime.staging", "_runtime.waiting", "_runtime.pulse"},
    {"_inputs.tensors", "_runtime.internode"},
    {"_runtime.peers"},
    {"_runtime.meeting"},
    {"ops", "_runtime.plan", "_runtime.rendezvous", "_runtime.cuda", "compression"},
    {"group", "_names"},
    {"_given"},
    {"collectives", "local_world"},
    {"compressed", "_training.parameters", "_training.residuals", "_training.members"},
    {"_training.promise", "_training.weighing", "_training.reports"},
    {"compressed_ops", "_training.exchange", "_training.flat"},
    {"_training.buckets", "_training.flights", "_training.step"},
    {"_training.comm_state", "_training.gradient_exchange"},
    {"_training.outer"},
    {"_training.local_sgd"},
    {"hooks", "data_parallel"},
    {"optim"},
    {"memory"},
    {"__init__"},
    {"collect_env", "bench"},
    {"bench.gpu", "advise"},
    {"bench.nodes"},
]
PRIVATE = ("_inputs", "_runtime", "_training")
LEVEL = {name: level for level, names in enumerate(PYTHON_LAYERS) for name in names}


def imported_at_import_time(path):
    """Modules that `import path` would import; not those for type checkers or inside functions."""
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if node.module == "pycomm" or node.module in (f"pycomm.{name}" for name in PRIVATE):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


def module_of(name):
    """The module, or the sub-package that counts as one, of a dotted name inside pycomm."""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] in PRIVATE else 1])


def modules():
    top = (ROOT / "pycomm").glob("*.py")
    inside = (p for name in PRIVATE for p in (ROOT / "pycomm" / name).glob("[!_]*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (*top, *inside)}


@pytest.mark.parametrize("name", sorted(modules()))
def test_python_imports(name):
    level = LEVEL[module_of(name)]
    for imported in imported_at_import_time(modules()[name]):
        if imported.startswith("pycomm."):
            lower = module_of(imported)
            # What is no module is an attribute of the package itself.
            allowed = LEVEL.get(lower, LEVEL["__init__"]) < level
            assert allowed, f"{name} may not import {lower}"


def test_private_modules_stay_in_their_package():
    """Underscored modules of another sub-package are nobody's business."""
    for path in (ROOT / "pycomm").rglob("*.py"):
        home = ".".join(path.relative_to(ROOT).parent.parts)
        for imported in imported_at_import_time(path):
            package, _, module = imported.rpartition(".")
            if package.startswith("pycomm.") and module.startswith("_"):
                assert package == home, f"{path} imports {imported}"


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
print(before == after, threading.active_count(), pycomm.group._default)
"""
    assert run_python(code).split() == ["True", "1", "None"]


def test_private_parts_of_torch_stand_in_one_module():
    private = re.compile(r"\btorch(\.\w+)*\._[^\W_]|from torch[\w.]* import _")
    found = {p.name for p in (ROOT / "pycomm").rglob("*.py") if private.search(p.read_text())}
    assert found == {"torch_private.py"}
