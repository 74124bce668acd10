"""The peers: other libraries' collectives, optimizers and training steps, if they are installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import pycomm
from pycomm._runtime.cuda import SYMMETRIC_MEMORY
from pycomm._runtime.torch_private import environment, symmetric_handle, symmetric_tensor
from pycomm.bench import launch, training
from pycomm.bench.contestants import ROOT, Case, Contestant, only_if
from pycomm.bench.measure import Prepared
from pycomm.bench.training import SETTLING, Trainee, TrainingSettings

Found = TypeVar("Found")


def find(
    names: tuple[str, ...], load: Callable[[str], Found]
) -> tuple[list[Found], dict[str, str]]:
    """What `load` returns for each name, and for absent peers the reasons.

    A peer takes part only if every rank has it. All ranks call this.
    """
    present: list[Found] = []
    absent: dict[str, str] = {}
    for name in names:
        loaded, reason = [], ""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                loaded = [load(name)]
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
        is_everywhere = torch.tensor(not reason, dtype=torch.int32)
        dist.all_reduce(is_everywhere, dist.ReduceOp.MIN)
        if is_everywhere:
            present += loaded
        else:
            absent[name] = reason or "another rank lacks it"
    return present, absent


class AbsentError(RuntimeError):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True, kw_only=True)
class TorchPeer(Contestant):
    """A backend of torch.distributed: Gloo on the CPU, NCCL on GPUs."""

    process_group: Any
    device: str

    @staticmethod
    def gloo() -> list[Contestant]:
        """Gloo, which the launcher has set up already."""
        return [TorchPeer(impl="gloo", process_group=dist.group.WORLD, device="cpu")]

    @staticmethod
    def nccl() -> list[Contestant]:
        """NCCL, one GPU per rank."""
        if (reason := launch.without_nccl(dist.get_world_size())) is not None:
            raise AbsentError(reason)
        group = dist.new_group(backend="nccl")
        return [TorchPeer(impl="nccl", process_group=group, device="cuda")]

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
        at_root = functools.partial(only_if, dist.get_rank() == ROOT)

        def blocks(whole: torch.Tensor) -> list[torch.Tensor]:
            return list(whole.chunk(case.ranks))

        # torch 2.13 renamed these two and warns at the old names.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(source, op, group),
            "reduce_scatter": lambda: scatter(result, source, op, group),
            "all_gather": lambda: gather(result, source, group),
            "broadcast": lambda: dist.broadcast(source, ROOT, group),
            "reduce": lambda: dist.reduce(source, ROOT, op, group),
            "gather": lambda: dist.gather(source, at_root(blocks(result)), ROOT, group),
            "scatter": lambda: dist.scatter(result, at_root(blocks(source)), ROOT, group),
            "all_to_all": lambda: dist.all_to_all_single(result, source, group=group),
            "send_recv": lambda: self._pass_on(source, result),
        }
        return Prepared(source, result, calls[case.collective], case.data(source))

    def _pass_on(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Sends to the next rank, and receives from the one before."""
        rank, ranks, group = dist.get_rank(), dist.get_world_size(), self.process_group
        both = [
            dist.P2POp(dist.isend, source, (rank + 1) % ranks, group),
            dist.P2POp(dist.irecv, result, (rank - 1) % ranks, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()


@dataclass(frozen=True, kw_only=True)
class MpiPeer(Contestant):
    """MPI through mpi4py's buffer interface."""

    communicator: Any
    ops: dict[str, Any]
    impl: str = "mpi"

    @staticmethod
    def find() -> list[Contestant]:
        """Makes an all-reduce in place and one between two buffers, since their speeds differ."""
        if not launch.under_mpi():
            raise AbsentError("start the ranks with MPI: mpirun -n 2 python -m pycomm.bench ...")
        from mpi4py import MPI

        ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
        ways = ("in_place", "two_buffers")
        return [MpiPeer(communicator=MPI.COMM_WORLD, ops=ops, algorithm=way) for way in ways]

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
        at_root = functools.partial(only_if, world.rank == ROOT)
        send = given if self.algorithm == "two_buffers" else MPI.IN_PLACE
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: world.Allreduce(send, taken, op),
            "reduce_scatter": lambda: world.Reduce_scatter_block(given, taken, op),
            "all_gather": lambda: world.Allgather(given, taken),
            "broadcast": lambda: world.Bcast(given, ROOT),
            "reduce": lambda: world.Reduce(at_root(MPI.IN_PLACE) or given, taken, op, ROOT),
            "gather": lambda: world.Gather(given, at_root(taken), ROOT),
            "scatter": lambda: world.Scatter(at_root(given), taken, ROOT),
            "all_to_all": lambda: world.Alltoall(given, taken),
            "send_recv": lambda: world.Sendrecv(
                given, (world.rank + 1) % world.size, recvbuf=taken,
                source=(world.rank - 1) % world.size,
            ),
        }  # fmt: skip
        return Prepared(source, result, calls[case.collective], case.data(source))


@dataclass(frozen=True, kw_only=True)
class SymmetricMemoryPeer(Contestant):
    """All-reduces in torch's symmetric memory, whose tensors all ranks map."""

    impl: str = "symm_mem"

    @staticmethod
    def find() -> list[Contestant]:
        """Its one-shot and two-shot kernels."""
        if not may_have_symmetric_memory():
            raise AbsentError("needs torch with CUDA")
        return [SymmetricMemoryPeer(algorithm=name) for name in ("one_shot", "two_shot")]

    def supports(self, case: Case) -> bool:
        """Sums of float32 and bfloat16, of multiples of 16 bytes per rank."""
        summing = case.collective == "all_reduce" and case.op == "sum" and case.device == "cuda"
        aligned = case.nbytes % (16 * case.ranks) == 0
        return summing and aligned and case.dtype in (torch.float32, torch.bfloat16)

    def prepare(self, case: Case) -> Prepared:
        """A tensor in symmetric memory, which two-shot reduces in place."""
        world = dist.group.WORLD
        assert world is not None
        with environment(SYMMETRIC_MEMORY):
            device = torch.device("cuda", torch.cuda.current_device())
            memory = symmetric_tensor(case.nbytes, device)
            source = memory.view(case.dtype).zero_()
            symmetric_handle(source, world)
        result, name = source, world.group_name
        call: Callable[[], object] = functools.partial(
            torch.ops.symm_mem.two_shot_all_reduce_, source, "sum", name
        )
        if self.algorithm == "one_shot":
            result = torch.empty_like(source)
            reduce = torch.ops.symm_mem.one_shot_all_reduce_out
            call = functools.partial(reduce, source, "sum", name, result)
        return Prepared(source, result, call, case.data(source))


def may_have_symmetric_memory() -> bool:
    """True if torch has kernels for it."""
    return torch.version.cuda is not None and torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class DeepSpeedPeer(Contestant):
    """DeepSpeed's all-reduce over shared memory, which it builds on first use."""

    impl: str = "deepspeed"

    @staticmethod
    def find() -> list[Contestant]:
        """Builds and initialises the operator; removes the names of the memory that it shares."""
        ranks = dist.get_world_size()
        os.environ["LOCAL_SIZE"] = str(ranks)  # tells the operator that all ranks share a node
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids its search and a warning
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


COLLECTIVES: dict[str, Callable[[], list[Contestant]]] = {
    "gloo": TorchPeer.gloo,
    "mpi": MpiPeer.find,
    "deepspeed": DeepSpeedPeer.find,
    "nccl": TorchPeer.nccl,
    "symm_mem": SymmetricMemoryPeer.find,
}


OPTIMIZERS = ("torch", "deepspeed")
TORCH_RULES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def make_optimizer(
    peer: str, name: str, params: list[torch.nn.Parameter], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """A peer's optimizer of the same rule.

    torch has neither master weights nor 8-bit states: it keeps everything in the parameters' type.

    Args:
        peer: one of `OPTIMIZERS`.
        name: the rule, as the command line calls it.
        params: the parameters.
        options: the rule's options, with torch's names.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: the peer does not have this rule.
    """
    device = params[0].device.type
    made: torch.optim.Optimizer
    if peer == "torch":
        if name not in TORCH_RULES:
            raise ValueError(f"torch.optim has no {name}")
        made = TORCH_RULES[name](params, fused=True, **options)
    else:
        if name not in ("adam", "adamw") or device != "cpu":
            raise ValueError(f"DeepSpeed's CPUAdam is no {name} on {device}")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made = DeepSpeedCPUAdam(params, adamw_mode=name == "adamw", fp32_optimizer_states=True)
    return made


CPU_TRAINEES = ("deepspeed_zero1", "deepspeed_zero2")  # over Gloo
TRAINEES = ("ddp", "zero", "fsdp2", "fsdp2_pycomm", *CPU_TRAINEES)


def load_trainee(name: str, device: str) -> None:
    """Imports what one of `TRAINEES` needs; raises ImportError or AbsentError without it."""
    ranks = dist.get_world_size()
    if name == "fsdp2" and (absent := training.absent_peers(device, ranks)):
        raise AbsentError(*absent.values())
    if name.startswith("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would search, and warn
        importlib.import_module("deepspeed")


def idle_of(peer: str) -> str:
    """The trainee with the same step without exchange and optimizer, whose time is subtracted."""
    return "idle" if peer in ("ddp", "zero") else "plain"


def make_trainee(
    name: str, settings: TrainingSettings, dtype: torch.dtype, lr: float, group: pycomm.Group
) -> Trainee:
    """A peer that exchanges and steps, with its final buckets.

    Args:
        name: one of `TRAINEES`.
        settings: the settings of the run.
        dtype: the dtype of the parameters. torch keeps its states in the same dtype.
        lr: the learning rate of AdamW.
        group: the ranks that train.
    """
    adam: dict[str, Any] = {"lr": lr, "fused": True}
    if name in ("ddp", "zero"):
        (backend,), _ = training.find_peer(settings, group)
        trainee = training.make(backend, settings, group, dtype)
    else:
        module, rows = training.make_module_and_rows(settings, group.rank, dtype)
        if name.startswith("deepspeed"):
            trainee = DeepSpeedTrainee(module, rows, _engine(module, int(name[-1]), settings, adam))
        else:
            backend = "pycomm" if name == "fsdp2_pycomm" else training.PEERS[settings.device]
            _shard_fully(module, backend, settings.device)
            trainee = Trainee(module, rows)
    if name == "zero":
        adam |= {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        adam["process_group"] = trainee.model.process_group
        trainee.optimizer = ZeroRedundancyOptimizer(trainee.model.parameters(), **adam)
    elif not isinstance(trainee, DeepSpeedTrainee):
        trainee.optimizer = torch.optim.AdamW(trainee.model.parameters(), **adam)
    for _ in range(SETTLING):
        trainee.step()
    return trainee


def _shard_fully(module: nn.Sequential, backend: str, device: str) -> None:
    """Applies FSDP2 to every layer and to the whole."""
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), device)
    for part in (*module, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)


class DeepSpeedTrainee(Trainee):
    """DeepSpeed's engine, which has its own calls for backward and step."""

    def __init__(self, module: nn.Module, rows: torch.Tensor, engine: Any) -> None:
        super().__init__(module, rows)
        self._engine = engine

    def step(self) -> None:
        """Takes a whole step of training."""
        self._engine.backward(self._engine(self.rows).float().square().mean())
        self._engine.step()


def _engine(module: nn.Module, stage: int, settings: TrainingSettings, adam: dict[str, Any]) -> Any:
    """ZeRO over Gloo with torch's fused AdamW; master weights and states are always fp32."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config = {
        "train_micro_batch_size_per_gpu": settings.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # any but its own
        "gradient_clipping": 0.0,  # its default is 1
        "bf16": {"enabled": next(module.parameters()).dtype == torch.bfloat16},
    }
    optimizer = torch.optim.AdamW(module.parameters(), **adam)
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
