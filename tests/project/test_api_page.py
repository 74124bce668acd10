"""docs/api.md lists every public name, and no other."""

import importlib
import re
from pathlib import Path

import pycomm

ROOT = Path(__file__).resolve().parents[2]
WORDS = set(re.findall(r"`([^`]+)`", (ROOT / "docs/api.md").read_text()))
MODULES = ("hooks", "optim")  # whose names are not pycomm's own
ENVIRON = re.compile(r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"')
# What tools for measuring set, and what launchers set.
FOR_OTHERS = {"OMP_NUM_THREADS", "PATH", "PYTHONPATH", "RANK", "WORLD_SIZE", "FORCE_CUDA"}


def public_names():
    yield from (f"pycomm.{name}" for name in pycomm.__all__ if name not in MODULES)
    for module in MODULES:
        yield from (f"pycomm.{module}.{name}" for name in getattr(pycomm, module).__all__)
    yield from (f"Group.{name}" for name in dir(pycomm.Group) if not name.startswith("_"))


def test_every_public_name_is_listed():
    assert set(public_names()) - WORDS == set()


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


def test_every_environment_variable_is_listed():
    folders = [path for path in (ROOT / "pycomm").iterdir() if path.name != "bench"]
    files = [
        f for path in folders for f in ([path] if path.suffix == ".py" else path.rglob("*.py"))
    ]
    read = {
        name for path in [*files, ROOT / "setup.py"] for name in ENVIRON.findall(path.read_text())
    }
    assert "PYCOMM_LOG" in read
    assert read - FOR_OTHERS - WORDS == set()
