"""Log messages, through Python's logging: the logger "pycomm" and its children.

``PYCOMM_LOG=info`` prints the make-up of groups to stderr, and warnings about slow paths.
``PYCOMM_LOG=debug`` also prints how operations run, once for each kind and size class, and adds the
calling lines to a Mismatch. Without the variable nothing is printed; programs may add handlers of
their own.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pycomm._runtime.lifetime import Member

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"
_MIB = 1 << 20

_pycomm = logging.getLogger("pycomm")
_group = logging.getLogger("pycomm.group")
operations = logging.getLogger("pycomm.operations")


def _set_up() -> str:
    """Sets up the loggers; returns the value of PYCOMM_LOG, or an empty string."""
    _pycomm.addHandler(logging.NullHandler())  # without one, Python prints warnings itself
    asked = os.environ.get("PYCOMM_LOG", "").lower()
    if not asked:
        return ""
    if asked not in _LEVELS:
        levels = ", ".join(_LEVELS)
        raise ValueError(f"PYCOMM_LOG must be one of {levels}, got {os.environ['PYCOMM_LOG']!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    _pycomm.addHandler(handler)
    _pycomm.setLevel(_LEVELS[asked])
    _pycomm.propagate = False  # the program's own handlers would print each message again
    return asked


# Read once, so that it costs operations nothing.
DEBUG = _set_up() == "debug"


def fallback(group: Member, text: str, *values: object) -> None:
    """Warns, once for each group and text, that something takes a slow path."""
    if text not in group._told:
        group._told.add(text)
        _group.warning(f"rank %d: {text}", group.rank, *values)


def backend_falls_back(name: str, rank: int, what: str) -> None:
    """Warns that torch.distributed's group `name` runs an operation over Gloo."""
    _group.warning("rank %d: %s of the process group %s goes over Gloo", rank, what, name)


def backend_stages(name: str, rank: int, what: str) -> None:
    """Warns that torch.distributed's group `name` takes CUDA tensors through host memory."""
    _group.warning(
        "rank %d: %s of CUDA tensors of the process group %s goes through host memory: slow",
        rank,
        what,
        name,
    )


def group_made(group: Member, cores: int, between: str) -> None:
    """Logs how a new group is made up.

    Args:
        group: the group.
        cores: the number of cores that the ranks of this node share.
        between: the transport between nodes.
    """
    nodes = [list(ranks) for ranks in group.nodes]
    local = next(len(ranks) for ranks in nodes if group.rank in ranks)
    vectors = torch.backends.cpu.get_cpu_capability()
    spanning = ""
    if group.stripes:
        table = list(group._algorithms) or "none"
        spanning = f"stripes {group.stripes} over {between}, table of algorithms: {table}, "
    _group.info(
        "rank %d of %d: %s, nodes %s, %sshared memory with %.3g MiB of staging, %d cores, %s, "
        "timeout %g s",
        group.rank,
        group.size,
        group.title,
        nodes,
        spanning,
        group.staging_bytes / _MIB,
        cores,
        vectors,
        group.timeout,
    )
    if local > cores:
        fallback(group, "%d ranks share %d cores and slow each other down", local, cores)
    if _group.isEnabledFor(logging.DEBUG):
        from pycomm._runtime.topology import links_of

        for other, link in sorted(links_of(group, "cpu").items()):
            _group.debug("rank %d: rank %d, %s", group.rank, other, link)
    if group.rank == 0 and any(ranks[-1] - ranks[0] >= len(ranks) for ranks in nodes):
        told = "collectives sort blocks by nodes. Give the ranks of a node consecutive numbers"
        fallback(group, f"the ranks of nodes alternate: {told}")
    if group.stripes and any(len(ranks) != group.stripes for ranks in nodes):
        used = group.stripes
        fallback(group, "nodes differ in size: %d ranks of each exchange with other nodes", used)
    if platform.machine() == "x86_64" and not vectors.startswith("AVX"):
        fallback(group, "the processor has no AVX2: sums and codecs are slower")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        fallback(group, "torch %s has no DLPack exchange API: calls are slower", torch.__version__)


def group_shrunk(smaller: Member, larger: Member) -> None:
    """Logs which ranks a group has lost."""
    lost = sorted(set(larger.ranks) - set(smaller.ranks))
    _group.warning(
        "rank %d of %d: %s goes on as %s without ranks %s",
        smaller.rank,
        smaller.size,
        larger.title,
        smaller.title,
        lost,
    )


def cuda_made(group: Member, device: torch.device, transport: str, lanes: int) -> None:
    """Logs how a group's ranks exchange CUDA tensors."""
    _group.info("rank %d: %s over %s, %d blocks", group.rank, device, transport, lanes)


def all_reduce_called(
    group: Member, tensor: torch.Tensor, algorithm: str, compression: object | None = None
) -> None:
    """Logs how an all-reduce runs, once for each size class, dtype, device and compression."""
    device = tensor.device.type
    kind = f"{tensor.nbytes.bit_length()} {tensor.dtype} {device} {algorithm} {compression}"
    if kind in group._told:
        return
    group._told.add(kind)
    if compression is not None:  # "auto" is two-shot whatever the size
        path: object = f"{compression}, {'two_shot' if algorithm == 'auto' else algorithm}"
    else:
        in_window = device == "cpu" and group._core.offset_of(tensor.data_ptr()) >= 0
        path = plan = group.explain(
            tensor.nbytes, tensor.dtype, algorithm=algorithm, in_window=in_window, device=device
        )
        if plan.path == "staged" and plan.algorithm != "one_shot":
            fallback(group, "large tensors outside of the window are staged: see group.empty()")
    operations.debug(
        "rank %d: all_reduce of %d bytes, %s on %s: %s",
        group.rank,
        tensor.nbytes,
        tensor.dtype,
        device,
        str(path).replace("\n", "; "),
    )


# Labels: tags, which ranks compare to distinguish calls of the same kind, and callers' lines.

_PACKAGE = Path(__file__).parents[1]


def label_of(tag: int | str | None) -> str:
    """The label of a public function's call: its tag and, in debug logs, the caller's line.

    Ranks do not compare what follows a line feed (csrc/core/details.h).
    """
    if tag is not None and (not isinstance(tag, int | str) or isinstance(tag, bool)):
        raise TypeError(f"tag must be an int or a str, got {tag!r}")
    named = "" if tag is None else f"tag={tag!r}"
    if DEBUG:
        caller = sys._getframe(2)
        if caller.f_code.co_name == "on_their_stream":  # pycomm/_inputs.py
            assert caller.f_back is not None
            caller = caller.f_back
        path = Path(caller.f_code.co_filename)
        if _PACKAGE not in path.parents:  # pycomm's own calls may come from different lines
            # Not the whole path, which may differ between nodes.
            named += f"\ncalled at {'/'.join(path.parts[-2:])}:{caller.f_lineno}"
    return named.encode("ascii", "backslashreplace").decode()
