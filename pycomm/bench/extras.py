"""What the benchmark and the examples need beyond pycomm's own dependencies."""

from __future__ import annotations

import importlib.util


def require(*modules: str) -> None:
    """Leaves with a message that says what to install, where a module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(f"needs {' and '.join(missing)}: pip install 'torch-pycomm[bench]'")
