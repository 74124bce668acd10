"""torch.distributed's operations on pycomm, and on Gloo or NCCL: ``python -m pycomm.bench c10d``.

The smallest sizes are also timed on a backend that does nothing, which is the floor of a call
through torch.distributed. The smallest all-reduce is also timed as a call of ``pycomm.all_reduce``.
A training step has one sample, so it exchanges 25 million fp32 parameters and computes little. The
same step without an exchange is also timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm._runtime.torch_private import backend_that_does_nothing
from pycomm.bench import measure
from pycomm.bench.report import KIB, MIB, Column, RankSettings, Results, TimedRow, cell, spread
from pycomm.bench.training import PEERS, absent_peers

SIZES = {
    "all_reduce": (256, MIB, 64 * MIB),
    "reduce_scatter_tensor": (64 * MIB,),
    "all_gather_into_tensor": (64 * MIB,),
    "all_to_all_single": (64 * KIB, 64 * MIB),
    "ping_pong": (256, 64 * MIB),
    "new_group": (0,),
    "ddp": (25 * 4_000_000,),
    "fsdp": (25 * 4_000_000,),
}
LEAST = 256  # bytes; the size that is also timed on the backend that does nothing
_WIDTH = 1000  # of a layer with a million parameters


@dataclass(frozen=True, kw_only=True)
class C10dSettings(RankSettings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench c10d -h``."""

    operations: tuple[str, ...]
    device: str = "cpu"


@dataclass(frozen=True)
class C10dRow(TimedRow):
    """One way to run one operation.

    Attributes:
        impl: ``"pycomm"``, ``"gloo"`` on the CPU and ``"nccl"`` on CUDA are backends of
            torch.distributed, as is ``"nothing"``, which does nothing; ``"pycomm.all_reduce"`` is
            pycomm's own function, and ``"alone"`` the training step of a model that is not
            distributed.
        operation: a method of torch.distributed; ``"ping_pong"`` is two messages, there and back;
            ``"new_group"`` is a group's life with one barrier; ``"ddp"`` and ``"fsdp"`` are a
            forward and backward pass of DistributedDataParallel and ``fully_shard``.
        bytes: of the whole tensor, or of the parameters.
        speedup: the time of Gloo or NCCL over this one; None where it cannot run.
    """

    operation: str
    bytes: int
    impl: str
    device: str
    ranks: int
    speedup: float | None

    columns: ClassVar[tuple[Column, ...]] = (
        Column("operation", "", 23, cell("operation")),
        Column("bytes", "", 10, cell("bytes")),
        Column("impl", "", 17, cell("impl")),
        Column("time", "(us)", 9, cell("time_us", ".1f")),
        *spread(narrow=("p99",)),
        Column("peer's", "/ this", 7, cell("speedup", ".1f")),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return f"{self.operation} {self.impl}", self.bytes, "bytes"


def run(settings: C10dSettings) -> Results[C10dRow]:
    """Measures everything in the settings; rank 0 prints and writes."""
    with pycomm.init(timeout=settings.timeout) as group:
        absent, groups = absent_peers(settings.device, group.size), {}
        if not absent:
            peer = PEERS[settings.device]
            groups[peer] = dist.new_group(backend=peer)
        groups["pycomm"] = dist.group.WORLD
        results: Results[C10dRow] = Results(settings, absent_peers=absent)
        what = f"torch.distributed on {settings.device}, {group.size} ranks; {results.place}"
        notes = (f"no {name}: {reason}" for name, reason in absent.items())
        results.begin(what, C10dRow.header(settings.wide), *notes)
        for operation in settings.operations:
            for nbytes in SIZES[operation]:
                results.add(_run_case(settings, group, groups, operation, nbytes))
        results.end()
    return results


def _run_case(
    settings: C10dSettings,
    group: pycomm.Group,
    groups: dict[str, Any],
    operation: str,
    nbytes: int,
) -> list[C10dRow]:
    """Times all contestants of a case in the same rounds."""
    device, peer = settings.device, PEERS[settings.device]
    calls = {impl: _call(operation, nbytes, impl, on, device) for impl, on in groups.items()}
    if operation in ("ddp", "fsdp"):
        calls["alone"] = _call(operation, nbytes, "alone", None, device)
    if nbytes == LEAST:
        nothing = dist.new_group(backend=backend_that_does_nothing())
        calls["nothing"] = _call(operation, nbytes, "nothing", nothing, device)
    if operation == "all_reduce" and nbytes == LEAST:
        tensor = torch.zeros(nbytes // 4, device=device)
        calls["pycomm.all_reduce"] = lambda: pycomm.all_reduce(tensor, group=group)
    outcome = measure.compete(group, calls, settings, device)
    base_us = outcome[peer].time_us if peer in outcome else None
    return [
        C10dRow(
            operation=operation,
            bytes=nbytes,
            impl=impl,
            device=device,
            ranks=group.size,
            speedup=round(base_us / figures.time_us, 2) if base_us is not None else None,
            **figures.columns(),
        )
        for impl, figures in outcome.items()
    ]


def _call(operation: str, nbytes: int, impl: str, group: Any, device: str) -> Callable[[], object]:
    """One operation on tensors of its own."""
    if operation in ("ddp", "fsdp"):
        return _training_step(operation, nbytes // (4 * _WIDTH**2), group, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(nbytes // 4, device=device)
    other = torch.zeros_like(whole)
    block = whole.new_zeros(nbytes // 4 // ranks)
    # Since torch 2.13 under new names; the old ones warn.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter_tensor": lambda: reduce_scatter(block, whole, group=group),
        "all_gather_into_tensor": lambda: all_gather(whole, block, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole, group=group),
        "ping_pong": lambda: _ping_pong(whole, rank, group),
        "new_group": lambda: _make_and_destroy(impl),
    }
    return calls[operation]


def _make_and_destroy(backend: str) -> None:
    """Makes a group, runs a barrier, so that all ranks have connected, and destroys the group."""
    group = dist.new_group(backend=backend)
    dist.barrier(group)
    dist.destroy_process_group(group)


def _training_step(wrapper: str, layers: int, group: Any, device: str) -> Callable[[], object]:
    """A forward and backward pass of a model with a million fp32 parameters per layer.

    Without a group, the model is not distributed.
    """
    torch.manual_seed(0)
    parts = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(layers)]
    model: torch.nn.Module = torch.nn.Sequential(*parts)
    sample = torch.ones(1, _WIDTH, device=device)
    if group is None:
        return lambda: model(sample).sum().backward()
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, device)
        for layer in parts:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return lambda: model(sample).sum().backward()


def _ping_pong(tensor: torch.Tensor, rank: int, group: Any) -> None:
    """Rank 0 sends to rank 1, which sends back; other ranks have nothing to do."""
    if rank == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    elif rank == 1:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)
