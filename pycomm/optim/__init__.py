"""Fused optimizers: torch.optim's rules, with each step as one pass over few bytes.

.. code-block:: python

    optimizer = pycomm.optim.FusedAdamW(
        model.parameters(), lr=3e-4, master_weights="remainder", states="8bit", max_norm=1.0
    )
"""

from pycomm.optim._options import Options
from pycomm.optim.adam import FusedAdam, FusedAdamW
from pycomm.optim.flat import FlatParameters, flatten
from pycomm.optim.lamb import FusedLAMB
from pycomm.optim.lion import FusedLion
from pycomm.optim.scaler import GradScaler
from pycomm.optim.sgd import FusedSGD

__all__ = [
    "FlatParameters",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedLion",
    "FusedSGD",
    "GradScaler",
    "Options",
    "flatten",
]
