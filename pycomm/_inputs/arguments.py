"""Arguments in torch.distributed's conventions: groups, timeouts, reductions."""

from __future__ import annotations

import multiprocessing
import numbers
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from pycomm import _C

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def seconds(timeout: object, default: float) -> float:
    """Converts a timeout to seconds: a number, a timedelta, or None for the default."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"timeout must be seconds, a datetime.timedelta or None for {default:g} s, "
            f"got {timeout!r}"
        )
    found = float(value)
    if not found > 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    if found > _C.most_seconds:
        raise ValueError(f"timeout must be at most {_C.most_seconds} s, got {timeout}")
    return found


def check_whole(name: str, value: object) -> None:
    """Raises TypeError unless `value` is an int."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")


def check_process_group(group: object) -> None:
    """Raises an error unless `group` is None, a ProcessGroup or a one-dimensional DeviceMesh."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this process")
    dimensions = getattr(group, "ndim", 1) if hasattr(group, "get_group") else 1
    if dimensions != 1:
        raise ValueError(
            f"group must be a DeviceMesh of one dimension, got {group!r}: pass mesh[name], or "
            "mesh.get_group(name)"
        )
    if not (group is None or hasattr(group, "get_group") or isinstance(group, dist.ProcessGroup)):
        number = isinstance(group, numbers.Real)
        raise TypeError(
            "group must be a torch.distributed process group, a DeviceMesh of one dimension or "
            f"None, got {group!r}" + (f": pass timeout={group}" if number else "")
        )


def process_group_of(group: Any) -> Any:
    """The process group of an argument `group`; torch.distributed must be set up."""
    if hasattr(group, "get_group"):
        return group.get_group()
    return group if group is not None else dist.group.WORLD


def not_set_up(in_threads: bool) -> ValueError:
    """The error for a missing default group; `in_threads` if the ranks are threads."""
    if in_threads:
        return ValueError(
            "group must be given by the ranks of a pycomm.LocalWorld, which have no default group: "
            "pass the one that LocalWorld.run gave to this rank"
        )
    return ValueError(
        "torch.distributed is not set up, and torchrun's environment is absent: start with "
        "torchrun, call torch.distributed.init_process_group, or use pycomm.LocalWorld"
    )


def reduction(op: object, allowed: Iterable[str]) -> str:
    """Pycomm's name of a reduction that is given by name or as torch.distributed's ReduceOp."""
    for name in allowed:
        if op == (name if isinstance(op, str) else TORCH_OPS[name]):
            return name
    torchs = "" if isinstance(op, str) else " or torch.distributed's ReduceOp of that meaning,"
    raise ValueError(f"op must be one of {', '.join(allowed)},{torchs} got {op!r}")


def check_rank(argument: str, rank: object, size: int) -> None:
    """Raises ValueError unless `rank` is the number of a rank in a group of this size."""
    if not isinstance(rank, numbers.Integral) or not 0 <= int(rank) < size:
        raise ValueError(f"{argument} must be a rank from 0 to {size - 1}, got {rank!r}")


def check_is_rank() -> None:
    """Raises RuntimeError in a DataLoader's worker, which inherits torchrun's environment."""
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing or get_worker_info() is not None:
        raise RuntimeError(
            "this process is a child of a rank, such as a worker of a DataLoader, and no rank "
            "itself: it must not make or use groups. Scripts that start such processes make theirs "
            "under `if __name__ == '__main__':`"
        )
