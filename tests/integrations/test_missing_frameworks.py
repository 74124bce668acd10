"""An adapter whose framework is not installed says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_the_error_names_the_package(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"pycomm.integrations.{name}", raising=False)
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{name} needs {name}: pip install {name}$"):
        importlib.import_module(f"pycomm.integrations.{name}")
