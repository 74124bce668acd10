"""Peers: other libraries, if they are installed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm.bench import launch
from pycomm.bench.cases import Case
from pycomm.bench.contestants import Contestant, Prepared


class AbsentError(RuntimeError):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True)
class TorchPeer:
    """A backend of torch.distributed: Gloo on the CPU, NCCL on GPUs."""

    impl: str
    process_group: Any
    device: str
    algorithm: str = "default"
    buffer: str = "tensor"
    compression: str = "none"

    @staticmethod
    def gloo() -> list[Contestant]:
        """Gloo, which the launcher has set up already."""
        return [TorchPeer("gloo", dist.group.WORLD, "cpu")]

    @staticmethod
    def nccl() -> list[Contestant]:
        """NCCL, one GPU per rank."""
        if not dist.is_nccl_available() or torch.cuda.device_count() < dist.get_world_size():
            raise AbsentError("needs torch with NCCL and a GPU per rank")
        return [TorchPeer("nccl", dist.new_group(backend="nccl"), "cuda")]

    def supports(self, case: Case) -> bool:
        """True on its own device, except for averages of integers."""
        return case.device == self.device and (case.op != "avg" or case.dtype.is_floating_point)

    def prepare(self, case: Case) -> Prepared:
        """Ordinary tensors."""
        source, result = case.tensors(
            lambda n, dtype: torch.empty(n, dtype=dtype, device=case.device)
        )
        names = {"prod": "PRODUCT"}
        op = getattr(dist.ReduceOp, names.get(case.op, case.op.upper()))
        group = self.process_group
        # torch 2.13 renamed these two and warns at the old names.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(source, op, group),
            "reduce_scatter": lambda: scatter(result, source, op, group),
            "all_gather": lambda: gather(result, source, group),
            "broadcast": lambda: dist.broadcast(source, 0, group),
        }
        return Prepared(source, result, calls[case.collective], case.data(source))


@dataclass(frozen=True)
class MpiPeer:
    """MPI through mpi4py's buffer interface."""

    communicator: Any
    ops: dict[str, Any]
    algorithm: str
    impl: str = "mpi"
    buffer: str = "tensor"
    compression: str = "none"

    @staticmethod
    def find() -> list[Contestant]:
        """An all-reduce in place and one between two buffers, since their speeds differ."""
        if not launch.under_mpi():
            raise AbsentError("start the ranks with MPI: mpirun -n 2 python -m pycomm.bench ...")
        from mpi4py import MPI

        ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
        ways = ("in_place", "two_buffers")
        return [MpiPeer(MPI.COMM_WORLD, ops, way) for way in ways]

    def supports(self, case: Case) -> bool:
        """MPI has no 16-bit floats and no average; only all-reduce has two versions."""
        if case.device != "cpu" or case.op not in self.ops:
            return False
        if case.dtype in (torch.float16, torch.bfloat16):
            return False
        return self.algorithm == "in_place" or case.collective == "all_reduce"

    def prepare(self, case: Case) -> Prepared:
        """Prepares NumPy views of ordinary tensors for mpi4py."""
        from mpi4py import MPI

        world, op = self.communicator, self.ops[case.op]
        source, result = case.tensors(torch.empty)
        if self.algorithm == "two_buffers":
            result = torch.empty_like(source)
        given, taken = source.numpy(), result.numpy()
        send = given if self.algorithm == "two_buffers" else MPI.IN_PLACE
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: world.Allreduce(send, taken, op),
            "reduce_scatter": lambda: world.Reduce_scatter_block(given, taken, op),
            "all_gather": lambda: world.Allgather(given, taken),
            "broadcast": lambda: world.Bcast(given, 0),
        }
        return Prepared(source, result, calls[case.collective], case.data(source))


@dataclass(frozen=True)
class DeepSpeedPeer:
    """DeepSpeed's all-reduce over shared memory, which it builds on first use."""

    impl: str = "deepspeed"
    algorithm: str = "default"
    buffer: str = "tensor"
    compression: str = "none"

    @staticmethod
    def find() -> list[Contestant]:
        """Builds and initialises the operator; removes the names of the memory that it shares."""
        ranks = dist.get_world_size()
        os.environ["LOCAL_SIZE"] = str(ranks)  # tells the operator that all ranks share a node
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids its search and a warning
        with contextlib.redirect_stdout(sys.stderr):
            from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

            library = ShareMemCommBuilder().load(verbose=False)
        if library.vector_kernel_level() < 2:
            raise AbsentError("its kernels need AVX-512")
        dist.barrier()
        library.initialize(ranks, dist.get_rank())
        dist.barrier()
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
        Path("/dev/shm", name).unlink(missing_ok=True)
        return [DeepSpeedPeer()]

    def supports(self, case: Case) -> bool:
        """Sums of 32-bit and 16-bit floats."""
        floats = (torch.float32, torch.float16, torch.bfloat16)
        summing = case.collective == "all_reduce" and case.op == "sum"
        return summing and case.device == "cpu" and case.dtype in floats

    def prepare(self, case: Case) -> Prepared:
        """Ordinary tensors."""
        source, result = case.tensors(torch.empty)
        reduce = torch.ops.deepspeed.inference_all_reduce_
        return Prepared(source, result, lambda: reduce(source), case.data(source))


FINDERS: dict[str, Callable[[], list[Contestant]]] = {
    "gloo": TorchPeer.gloo,
    "mpi": MpiPeer.find,
    "deepspeed": DeepSpeedPeer.find,
    "nccl": TorchPeer.nccl,
}


def find(names: tuple[str, ...]) -> tuple[list[Contestant], dict[str, str]]:
    """The named peers, and for absent ones the reasons.

    A peer takes part only if every rank has it.
    """
    present: list[Contestant] = []
    absent: dict[str, str] = {}
    for name in names:
        found: list[Contestant] = []
        reason = ""
        try:
            found = FINDERS[name]()
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error)
        everywhere = torch.tensor([bool(found)], dtype=torch.int32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere.item():
            present += found
        else:
            absent[name] = reason or "another rank lacks it"
    return present, absent
