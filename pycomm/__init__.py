"""pycomm: all-reduce algorithms for PyTorch, with gradient compression and fused optimizers.

.. code-block:: python

    import pycomm

    group = pycomm.init()  # under torchrun, or on torch.distributed's default group
    pycomm.all_reduce(x, op="avg")
    pycomm.compressed_all_reduce(x, pycomm.Int8(), residual=state)
"""

import torch  # noqa: F401 - its libraries must be loaded before ours

from pycomm import compressed_ops, hooks, ops, optim
from pycomm._names import parse_compressor
from pycomm._runtime.plan import Plan
from pycomm.collectives import Work, all_gather, all_reduce, barrier, broadcast, reduce_scatter
from pycomm.compressed import compressed_all_reduce
from pycomm.compression import Cast, Compressor, Identity, Int8, TopK
from pycomm.data_parallel import DataParallel
from pycomm.errors import (
    Aborted,
    CollectiveError,
    GroupUnusable,
    Mismatch,
    NonFinite,
    PeerDied,
    ProtocolError,
    PycommError,
    Timeout,
)
from pycomm.group import Group, default_group, init, set_default_group
from pycomm.local_world import LocalWorld
from pycomm.memory import MemoryReport, memory_report

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Cast",
    "CollectiveError",
    "Compressor",
    "DataParallel",
    "Group",
    "GroupUnusable",
    "Identity",
    "Int8",
    "LocalWorld",
    "MemoryReport",
    "Mismatch",
    "NonFinite",
    "PeerDied",
    "Plan",
    "ProtocolError",
    "PycommError",
    "Timeout",
    "TopK",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "compressed_all_reduce",
    "compressed_ops",
    "default_group",
    "hooks",
    "init",
    "memory_report",
    "ops",
    "optim",
    "parse_compressor",
    "reduce_scatter",
    "set_default_group",
]
