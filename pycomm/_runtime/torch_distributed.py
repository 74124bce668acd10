"""Sets up torch.distributed for programs that have not done so."""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch's stubs lack it
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pycomm._inputs import process_group_of
from pycomm._runtime.log import fallback
from pycomm._runtime.rendezvous import TORCHRUN, store_all_gather
from pycomm._runtime.threads import Deadline
from pycomm._runtime.torch_private import set_timeout, store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.lifetime import Member


def set_up(timeout: float, in_threads: bool) -> Callable[[Member], None] | None:
    """Sets up torch.distributed from a launcher's variables, also in restarted processes.

    Args:
        timeout: seconds for the setup. Afterwards torch's operations have torch's own timeout.
        in_threads: the ranks are threads.

    Returns:
        As :func:`join`.

    Raises:
        RuntimeError: the variables are a parent's, which is a rank and lives.
    """
    _check_no_parent_has_them()
    deadline, patience = Deadline(timeout), timedelta(seconds=timeout)
    started = launched(in_threads)
    with deadline.guarding("every process joining torch.distributed"):
        store, rank, size = HashStore(), 0, 1
        if started:
            store, rank, size = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
    warn = join(store, rank, size, deadline)
    set_timeout(default_pg_timeout)
    store_of(process_group_of(None)).set_timeout(default_pg_timeout)
    os.environ[_OWNER] = f"{os.getpid()} {_place()}"
    return warn


WINDOW_FILE = "/memfd:pycomm (deleted)"  # the window of a group, among a process's descriptors
_OWNER = "_PYCOMM_RANK"  # tells children which process is the rank that the variables describe


def _place() -> str:
    return " ".join(os.environ.get(name, "") for name in TORCHRUN)


def _check_no_parent_has_them() -> None:
    """Otherwise a child would wait for ranks that have met long ago."""
    owner, _, place = os.environ.get(_OWNER, "").partition(" ")
    started = "RANK" in os.environ and owner not in ("", str(os.getpid()))
    if started and place == _place() and _has_groups(owner):
        raise RuntimeError(
            f"this process has inherited {', '.join(TORCHRUN)} from rank {os.environ['RANK']} (pid "
            f"{owner}), which has a group already. For groups of its own, set other values; for a "
            "group of one process, remove RANK and WORLD_SIZE"
        )


def _has_groups(pid: str) -> bool:
    """True if a process has open groups; its descriptors show their windows."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(file.readlink()) == WINDOW_FILE:
                    return True
    return False


def launched(in_threads: bool = False) -> bool:
    """True if a launcher has started this process; then torchrun's variables are set.

    See :func:`pycomm._runtime.launchers.set_variables`.
    """
    if os.environ.keys() >= set(TORCHRUN):
        return True
    from pycomm._runtime import launchers

    return launchers.set_variables(in_threads)


def join(store: Store, rank: int, size: int, deadline: Deadline) -> Callable[[Member], None] | None:
    """Makes torch.distributed's default group, with Gloo and, where it can connect, with NCCL.

    NCCL, for CUDA tensors, connects at once, on the device that becomes the current one. If a rank
    has no NCCL, no device or another rank's device, which NCCL refuses, all ranks have Gloo alone.

    Args:
        store: how the ranks meet; also in restarted processes.
        rank: this rank.
        size: the number of ranks.
        deadline: for the setup; its whole time is the timeout of torch's operations.

    Returns:
        A function that warns that the ranks of a group have Gloo alone, although ranks have GPUs.
    """
    device = _own_device()
    gpus, store = store_all_gather(
        PrefixStore("pycomm", store), rank, size, _describe(device), deadline
    )
    why = _obstacle_to_nccl(gpus)
    if not why:
        torch.cuda.set_device(device)
    with deadline.guarding("every process joining torch.distributed"):
        dist.init_process_group(
            "gloo" if why else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline.seconds),
            device_id=None if why else device,
        )
    return functools.partial(_warn, why) if why and set(gpus) != {_NO_DEVICE} else None


def _warn(why: str, group: Member) -> None:
    fallback(
        group,
        "torch.distributed has Gloo alone, because %s: its own operations on CUDA tensors, and "
        "pycomm's between nodes, go through host memory",
        why,
    )


# What ranks tell each other instead of their device's UUID.
_NO_DEVICE, _NO_NCCL = "has no CUDA device", "has no NCCL in its torch"


def _own_device() -> torch.device | None:
    """The current device if this process has used CUDA, otherwise the device of its local rank."""
    if not torch.cuda.is_available():
        return None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _describe(device: torch.device | None) -> str:
    if device is None:
        return _NO_DEVICE
    if not dist.is_nccl_available():
        return _NO_NCCL
    return str(torch.cuda.get_device_properties(device).uuid)


def _obstacle_to_nccl(gpus: Sequence[str]) -> str:
    """Why NCCL cannot connect ranks with these devices; an empty string if it can."""
    for rank, gpu in enumerate(gpus):
        if gpu in (_NO_DEVICE, _NO_NCCL):
            return f"rank {rank} {gpu}"
        if (first := gpus.index(gpu)) < rank:
            return f"ranks {first} and {rank} are on the same GPU"
    return ""


def take_down(process: int, group: object) -> None:
    """Undoes :func:`set_up`, in the process that has called it.

    Otherwise Gloo's threads would make a process fail that has finished its work.
    """
    if os.getpid() == process and dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
