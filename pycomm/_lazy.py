"""Names of a module that are imported at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec

from pycomm._retired import missing_attribute


def lazy_names(
    module: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module.

    The first use of a name sets it in the module, so that later ones cost nothing. Several threads
    may be the first: they all find the same object. The module has its names in ``__all__``.

    Args:
        module: the module's name. If it is a package, its modules are attributes, too.
        homes: by another module's name, the names that it defines.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    variables = vars(sys.modules[module])

    def find(name: str) -> object:
        if name in home_of:
            found = getattr(import_module(home_of[name]), name)
        elif "__path__" in variables and name.isidentifier() and find_spec(f"{module}.{name}"):
            found = import_module(f"{module}.{name}")
        else:
            raise missing_attribute(module, name)
        variables[name] = found
        return found

    return find, lambda: sorted({*variables, *variables["__all__"]})
