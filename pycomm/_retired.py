"""Names that pycomm has no more, and what replaces each."""

from __future__ import annotations

import sys

_RETIRED = {
    ("pycomm", "plot_step"): "open the file that pycomm.trace writes in https://ui.perfetto.dev",
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have, with the replacement if it had."""
    message = f"module {module!r} has no attribute {name!r}"
    if replacement := _RETIRED.get((module, name)):
        message += f" any more: {replacement}"
    return AttributeError(message, name=name, obj=sys.modules[module])
