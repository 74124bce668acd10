"""docs/reference/api.md lists every public name, and no other."""

import contextlib
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import pycomm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/api.md").read_text()
WORDS = set(re.findall(r"`([^`]+)`", PAGE))
OPTIONS = ROOT / "docs/how-to/build-options.md"
CMAKE = ROOT / "CMakeLists.txt"
OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
MODULES = ("hooks", "optim")  # whose names are not pycomm's own
# Names where they are read, and pycomm's own wherever they stand.
ENVIRON = re.compile(r'(?:environ(?:\.get\(|\.setdefault\(|\[)"|"(?=PYCOMM_))([A-Z_]+)"')
# What tools for measuring set, and what launchers set.
FOR_OTHERS = {"OMP_NUM_THREADS", "PATH", "PYTHONPATH", "RANK", "WORLD_SIZE"}


def public_names():
    yield from (f"pycomm.{name}" for name in pycomm.__all__ if name not in MODULES)
    for module in MODULES:
        yield from (f"pycomm.{module}.{name}" for name in getattr(pycomm, module).__all__)
    yield from (f"Group.{name}" for name in dir(pycomm.Group) if not name.startswith("_"))


def test_every_public_name_is_listed():
    assert set(public_names()) - WORDS == set()


@pytest.mark.parametrize("name", ["exporters", "memory", "report", "stats"])
def test_every_public_name_of_a_module_is_listed(name):
    """By its own name or, where pycomm has it, too, by that one."""
    module = importlib.import_module(f"pycomm.{name}")
    own = {each for each, value in vars(module).items() if value_of(module, value)}
    public = {each for each in own if not each.startswith(("_", "make_"))}
    assert len(public) > 3
    missing = {each for each in public if f"pycomm.{name}.{each}" not in WORDS}
    assert {each for each in missing if f"pycomm.{each}" not in WORDS} == set()


def value_of(module, value):
    return getattr(value, "__module__", "") == module.__name__


def test_attributes_are_listed():
    """Groups and errors set them in constructors."""
    with pycomm.LocalWorld(1) as world:
        of_groups = public_attributes(world.groups[0])
    listed = [set(re.findall(r"`(\w+)`", line)) for line in re.findall(r".*ttributes: .*", PAGE)]
    assert listed == [of_groups, public_attributes(pycomm.Timeout(""))]


def public_attributes(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


def test_names_of_samples_are_listed():
    page = (ROOT / "docs/how-to/frameworks.md").read_text()
    lists = re.findall(r"^- of (?:operations|ranks|memory): ((?:.|\n  )*)", page, re.MULTILINE)
    assert [*re.findall(r"`(\w+)`", "".join(lists))] == [*pycomm.exporters._HELP]


def test_every_kind_of_error_is_listed():
    """Of those that pycomm raises and does not catch itself, apart from the commands' exits."""
    raised = set()
    for path in ROOT.glob("pycomm/**/*.py"):
        if not {"bench", "advise", "check"} & set(path.relative_to(ROOT).parts):
            raised |= set(re.findall(r"\braise ([A-Z]\w+)\(", path.read_text()))
    section = PAGE.partition("## Errors")[2].partition("\n## ")[0]
    assert {"RuntimeError", "Timeout"} < raised
    caught = {"OSError", "ConnectionError", "TimeoutError"}
    assert {name for name in raised if name not in section} == {"SystemExit", *caught}


@pytest.mark.parametrize("kind", [pycomm.DataParallel, pycomm.hooks.CommState, pycomm.Sharding])
def test_options_of_training(kind):
    """The tables have every option, in order, with its default."""
    page = (ROOT / "docs/reference/options.md").read_text()
    section = page.partition(f"## Of {kind.__name__}\n")[2].partition("\n## ")[0]
    rows = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if "| `" in line]
    defaults = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    shown = {inspect.Parameter.empty: "none", "auto": '`"auto"`'}
    defaults.pop("module", None)
    expected = [(f"`{name}`", shown.get(each, f"`{each}`")) for name, each in defaults.items()]
    assert [(row[0], row[2].partition(":")[0]) for row in rows] == expected
    assert all(row[1] and row[3] for row in rows)


def test_signatures_of_operators():
    schemas = torch._C._jit_get_all_schemas()
    ours = sorted(str(each).removeprefix("pycomm::") for each in schemas if "pycomm::" in str(each))
    page = (ROOT / "docs/reference/gradients.md").read_text()
    assert "```text\n" + "\n".join(ours) + "\n```" in page


def test_reductions():
    """The table of what is reduced, by trying all dtypes that can be moved."""
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    by_reductions = {}
    with pycomm.LocalWorld(1) as world:

        def runs(operation, dtype, *options):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                operation(torch.zeros(4, dtype=dtype), *options, group=world.groups[0])
                return True
            return False

        for dtype in sorted(dtypes, key=str):
            name = str(dtype).removeprefix("torch.")
            whole_bytes = not re.fullmatch(r"u?int[1-7]", name)
            if whole_bytes and runs(pycomm.broadcast, dtype, 0):
                has = [f"`{op}`" for op in OPS if runs(pycomm.all_reduce, dtype, op)]
                by_reductions.setdefault(", ".join(has) or "none", []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {has} |" for has, names in by_reductions.items()]
    table = PAGE.partition("| dtypes | reductions |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == rows


def test_every_listed_name_exists():
    for word in WORDS:
        if match := re.fullmatch(r"python -m (\S+)", word):
            path = ROOT / match[1].replace(".", "/")
            module = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            assert 'if __name__ == "__main__":' in module.read_text()
        elif re.fullmatch(r"(pycomm|Group)(\.\w+)+", word):
            owner, *names = word.split(".")
            found = pycomm.Group if owner == "Group" else pycomm
            for name in names:
                if not hasattr(found, name):
                    importlib.import_module(f"{found.__name__}.{name}")
                found = getattr(found, name)


def read_by(*paths):
    return {name for path in paths for name in ENVIRON.findall(path.read_text())} - FOR_OTHERS


def test_every_environment_variable_is_listed():
    """Those of builds on the page of build options, all others on the page of the API."""
    builds = [ROOT / "setup.py", *ROOT.glob("pycomm/_runtime/c10d*.py")]
    others = [
        path
        for path in ROOT.glob("pycomm/**/*.py")
        if path not in builds and "bench" not in path.relative_to(ROOT).parts
    ]
    assert "PYCOMM_LOG" in read_by(*others)
    assert read_by(*others) - WORDS == set()
    assert {"PYCOMM_CUDA", "TORCH_EXTENSIONS_DIR"} < read_by(*builds)
    variables, options = variables_of_builds()
    assert read_by(*builds) - variables == set()
    of_torch = {"MAX_JOBS", "PYTORCH_NVCC"}
    assert of_torch <= set(re.findall(r"\w+", Path(cpp_extension.__file__).read_text()))
    # setuptools reads CC; setup.py itself reads MAX_JOBS, too
    assert variables - read_by(*builds) == {"CC", *of_torch} - {"MAX_JOBS"}
    declared = re.findall(r"^(?:option|set)\((PYCOMM_\w+) .*", CMAKE.read_text(), re.MULTILINE)
    assert options == {*declared, "CMAKE_CUDA_ARCHITECTURES"}


def variables_of_builds():
    """The environment variables and the options of CMake that the page of build options names."""
    name = r"\b[A-Z]+(?:_[A-Z]+)+\b|\b(?:CC|CXX|HOME)\b"
    return (set(re.findall(name, part)) for part in OPTIONS.read_text().split("## CMake"))
