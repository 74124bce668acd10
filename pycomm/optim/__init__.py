"""Fused optimizers: torch.optim's rules, with each step as one pass over as few bytes as possible.

.. code-block:: python

    optimizer = pycomm.optim.FusedAdamW(
        model.parameters(), lr=3e-4, master_weights="remainder", states="8bit", max_norm=1.0
    )
"""

from pycomm._names import lazy_names

# The modules that define the names; __init__.pyi has them for type checkers.
_HOMES = {
    "pycomm.optim._options": ("Options",),
    "pycomm.optim.adam": ("FusedAdam", "FusedAdamW"),
    "pycomm.optim.flat": ("FlatParameters", "flatten"),
    "pycomm.optim.lamb": ("FusedLAMB",),
    "pycomm.optim.lion": ("FusedLion",),
    "pycomm.optim.scaler": ("GradScaler",),
    "pycomm.optim.sgd": ("FusedSGD",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
