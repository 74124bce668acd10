"""pycomm: all-reduce algorithms for PyTorch, with gradient compression and fused optimizers.

.. code-block:: python

    import pycomm

    group = pycomm.init()  # a launcher's processes, or torch.distributed's default group
    pycomm.all_reduce(x, op="avg")
    pycomm.compressed_all_reduce(x, pycomm.Int8(), residual=state)
"""

import importlib

import torch  # noqa: F401 - its libraries must be loaded before ours

import pycomm_backend

try:
    importlib.import_module("pycomm._C")
except ModuleNotFoundError:
    raise ImportError(
        f"{__path__[0]} has pycomm's sources, which are not compiled. If pycomm is installed, run "
        "the program or command in another folder: Python looks in the current one first. Or "
        "install these sources: pip install --no-build-isolation -e ."
    ) from None

from pycomm import ops  # noqa: F401 - torch.compile and others look for its kernels
from pycomm._names import lazy_names
from pycomm._runtime import lifetime  # noqa: F401 - its exit handler comes after the program's own

__version__ = "0.2.0"

# Where CMake's find_package finds the C++ libraries, once pycomm is installed from a wheel.
cmake_prefix_path = __path__[0]

# Where names are defined; __init__.pyi tells type checkers the same.
_HOMES = {
    "pycomm._init": ("default_group", "init", "set_default_group"),
    "pycomm._join": ("join",),
    "pycomm._runtime.plan": ("PeerLink", "Plan"),
    "pycomm._training.explain": ("BucketPlan", "ExchangePlan"),
    "pycomm._training.sharding": ("Sharding",),
    "pycomm._work": ("Work",),
    "pycomm.batches": ("even_batches",),
    "pycomm.block_collectives": ("all_to_all", "gather", "scatter"),
    "pycomm.collectives": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "reduce",
        "reduce_scatter",
    ),
    "pycomm.compressed": ("compressed_all_reduce", "compressed_reduce_scatter"),
    "pycomm.compression": ("Cast", "Compression", "Identity", "Int8", "TopK", "parse_compression"),
    "pycomm.data_parallel": ("DataParallel",),
    "pycomm.errors": (
        "Aborted",
        "ArgumentError",
        "ArgumentTypeError",
        "CollectiveError",
        "GroupUnusable",
        "Mismatch",
        "NonFinite",
        "NotRecoverable",
        "PeerDied",
        "ProtocolError",
        "PycommError",
        "Timeout",
    ),
    "pycomm.group": ("Group",),
    "pycomm.local_world": ("LocalWorld",),
    "pycomm.memory": ("MemoryReport", "memory_report"),
    "pycomm.p2p": ("Request", "irecv", "isend", "recv", "send"),
    "pycomm.recovery": ("recover",),
    "pycomm.report": ("RankReport", "RecordedOperation", "Report"),
    "pycomm.run": ("launch",),
    "pycomm.sharing": ("share_state",),
    "pycomm.stats": ("OperationStats", "RankTimes", "Stats"),
    "pycomm.tracing": ("Trace", "trace"),
}
_MODULES = ("backend", "exporters", "hooks", "memory", "ops", "optim")

__all__ = sorted([*_MODULES, *(name for names in _HOMES.values() for name in names)])

__getattr__, __dir__ = lazy_names(__name__, _HOMES)

pycomm_backend.register()
