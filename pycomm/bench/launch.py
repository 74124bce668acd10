"""Ranks of benchmarks: started by torchrun, by mpirun, or as processes of this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pycomm._runtime import torch_distributed
from pycomm._runtime.sockets import first_of_node
from pycomm._runtime.threads import Deadline
from pycomm.run import call_on_ranks

LOOPBACK = first_of_node()


def require(*modules: str) -> None:
    """Exits with a message that says what to install if a module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def without_nccl(ranks: int) -> str | None:
    """The reason why ranks on this machine cannot exchange over NCCL; None if they can."""
    if dist.is_nccl_available() and torch.cuda.device_count() >= ranks:
        return None
    return "needs torch with NCCL and a GPU per rank"


def under_torchrun() -> bool:
    """True if torchrun, or a launcher with its environment, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """True if this process prints for all: rank 0, or a process without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def under_mpi() -> bool:
    """True if an MPI launcher started this process."""
    return "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ


def run(
    body: Callable[..., object],
    *args: Any,
    ranks: int,
    timeout: float = 300.0,
    backend: str = "gloo",
    device: str = "cpu",
) -> None:
    """Calls ``body(*args)`` on every rank, with torch.distributed set up.

    Under torchrun or mpirun this process is one of the ranks already, and `ranks` has no effect.
    Otherwise `ranks` processes are started, as by :func:`pycomm.launch`.

    Args:
        body: what to run.
        args: its arguments.
        ranks: how many processes to spawn.
        timeout: seconds that a rank may wait for another in torch.distributed.
        backend: torch.distributed's.
        device: ``"cuda"`` adds NCCL to Gloo, for CUDA tensors, if every rank has a GPU of its own.
    """
    if under_torchrun() or under_mpi():
        _run_rank(timeout, backend, device, body, args)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the children as they load OpenMP
        call_on_ranks(_run_rank, (timeout, backend, device, body, args), ranks, forward=False)


def _run_rank(
    timeout: float,
    backend: str,
    device: str,
    body: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    torch_distributed.launched()
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    _enter(store, rank, size, timeout, backend, device)
    torch.set_num_threads(1)
    try:
        body(*args)
        dist.barrier()  # no rank tears down what another still uses
    finally:
        dist.destroy_process_group()


def host_store() -> TCPStore:
    """The store in which ranks of this machine meet, in this process."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def join(
    store: TCPStore,
    rank: int,
    ranks: int,
    timeout: float,
    backend: str = "gloo",
    device: str = "cpu",
) -> None:
    """Enters torch.distributed, and sets what torchrun would have set."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # By default Gloo looks up the host's name, which containers often cannot resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _enter(store, rank, ranks, timeout, backend, device)


def _enter(store: Store, rank: int, ranks: int, timeout: float, backend: str, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if backend == "gloo" and device == "cuda":
        torch_distributed.join(store, rank, ranks, Deadline(timeout))
        return
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
