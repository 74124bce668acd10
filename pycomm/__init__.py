"""pycomm: all-reduce algorithms for PyTorch, with gradient compression and fused optimizers.

.. code-block:: python

    import pycomm

    group = pycomm.init()  # torchrun's processes, or torch.distributed's default group
    pycomm.all_reduce(x, op="avg")
    pycomm.compressed_all_reduce(x, pycomm.Int8(), residual=state)
"""

from typing import TYPE_CHECKING

import torch  # noqa: F401 - its libraries must be loaded before ours

from pycomm import backend, exporters, hooks, ops, optim
from pycomm._init import default_group, init, join, set_default_group
from pycomm._retired import missing_attribute
from pycomm._runtime import lifetime  # noqa: F401 - what it registers
from pycomm._runtime.plan import Plan
from pycomm._training.sharding import Sharding
from pycomm._work import Work
from pycomm.batches import even_batches
from pycomm.block_collectives import all_to_all, gather, scatter
from pycomm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from pycomm.compressed import compressed_all_reduce, compressed_reduce_scatter
from pycomm.compression import Cast, Compression, Identity, Int8, TopK, parse_compression
from pycomm.data_parallel import DataParallel
from pycomm.errors import (
    Aborted,
    ArgumentError,
    ArgumentTypeError,
    CollectiveError,
    GroupUnusable,
    Mismatch,
    NonFinite,
    NotRecoverable,
    PeerDied,
    ProtocolError,
    PycommError,
    Timeout,
)
from pycomm.group import Group
from pycomm.local_world import LocalWorld
from pycomm.memory import MemoryReport, memory_report
from pycomm.p2p import Request, irecv, isend, recv, send
from pycomm.recovery import recover
from pycomm.report import RankReport, RecordedOperation, Report
from pycomm.sharing import share_state
from pycomm.stats import OperationStats, RankTimes, Stats
from pycomm.tracing import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "ArgumentError",
    "ArgumentTypeError",
    "Cast",
    "CollectiveError",
    "Compression",
    "DataParallel",
    "Group",
    "GroupUnusable",
    "Identity",
    "Int8",
    "LocalWorld",
    "MemoryReport",
    "Mismatch",
    "NonFinite",
    "NotRecoverable",
    "OperationStats",
    "PeerDied",
    "Plan",
    "ProtocolError",
    "PycommError",
    "RankReport",
    "RankTimes",
    "RecordedOperation",
    "Report",
    "Request",
    "Sharding",
    "Stats",
    "Timeout",
    "TopK",
    "Trace",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend",
    "barrier",
    "broadcast",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "default_group",
    "even_batches",
    "exporters",
    "gather",
    "hooks",
    "init",
    "irecv",
    "isend",
    "join",
    "memory_report",
    "ops",
    "optim",
    "parse_compression",
    "recover",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "set_default_group",
    "share_state",
    "trace",
]

if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
