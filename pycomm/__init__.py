"""pycomm: all-reduce for PyTorch on one machine, faster than what you use today.

.. code-block:: python

    import pycomm

    group = pycomm.init()  # under torchrun, or on torch.distributed's default group
    pycomm.all_reduce(x, op="avg")
"""

import torch  # noqa: F401 - its libraries must be loaded before ours

from pycomm import ops
from pycomm._plan import Plan
from pycomm.collectives import Work, all_gather, all_reduce, barrier, broadcast, reduce_scatter
from pycomm.errors import (
    Aborted,
    CollectiveError,
    GroupUnusable,
    Mismatch,
    PeerDied,
    PycommError,
    Timeout,
)
from pycomm.group import Group, LocalWorld, default_group, init, set_default_group

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "CollectiveError",
    "Group",
    "GroupUnusable",
    "LocalWorld",
    "Mismatch",
    "PeerDied",
    "Plan",
    "PycommError",
    "Timeout",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "default_group",
    "init",
    "ops",
    "reduce_scatter",
    "set_default_group",
]
