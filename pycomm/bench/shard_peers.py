"""Other libraries that exchange and step, in the benchmark of sharded steps."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.bench.optim_tasks import Scheme
from pycomm.bench.shard_tasks import LR, Stepper, make_module_and_rows
from pycomm.bench.training import SETTLING, TrainingSettings, exchange_nothing

# The same step without exchange and optimizer, whose time is subtracted.
IDLE = {
    "ddp": "ddp idle",
    "zero": "ddp idle",
    "fsdp2": "idle",
    "fsdp2_pycomm": "idle",
    "deepspeed_zero1": "idle",
    "deepspeed_zero2": "idle",
}
PEERS = tuple(IDLE)
_NEEDS = {"deepspeed_zero1": "deepspeed", "deepspeed_zero2": "deepspeed"}


def find_absent(names: tuple[str, ...]) -> dict[str, str]:
    """Peers that some rank lacks, with the reasons; all ranks must call this."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search, and warn
    absent = {}
    for name in names:
        reason = ""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(_NEEDS.get(name, "torch"))
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
        present = torch.tensor(not reason, dtype=torch.int32)
        dist.all_reduce(present, dist.ReduceOp.MIN)
        if not present:
            absent[name] = reason or "another rank lacks it"
    return absent


def make_peer(
    name: str, settings: TrainingSettings, scheme: Scheme, group: pycomm.Group
) -> Stepper:
    """A peer with its final buckets, or what its step is compared with.

    Args:
        name: one of `PEERS`, or ``"idle"`` for the bare model without an optimizer, ``"ddp idle"``
            for the same in DDP with a hook that exchanges nothing.
        settings: the settings of the run.
        scheme: gives the type of the parameters. torch keeps its states in the same type.
        group: the ranks that train.
    """
    made = _make(name, settings, scheme, group)
    for _ in range(SETTLING):
        made.step()
    return made


def _make(name: str, settings: TrainingSettings, scheme: Scheme, group: pycomm.Group) -> Stepper:
    module, rows = make_module_and_rows(settings, scheme, group.rank)
    if name.startswith("deepspeed"):
        return DeepSpeedStepper(module, rows, engine=_engine(module, int(name[-1]), settings))
    made = Stepper(module, rows)
    if name.startswith("fsdp2"):
        backend = "pycomm" if name == "fsdp2_pycomm" else "gloo"
        mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        for part in (*module, module):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    elif name != "idle":
        made.model = ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if name == "ddp idle":
            ddp.register_comm_hook(None, exchange_nothing)
    adam: dict[str, Any] = {"lr": LR, "fused": True}
    if name == "zero":
        adam |= {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        made.optimizer = ZeroRedundancyOptimizer(made.model.parameters(), **adam)
    elif name in PEERS:
        made.optimizer = torch.optim.AdamW(made.model.parameters(), **adam)
    return made


@dataclass
class DeepSpeedStepper(Stepper):
    """DeepSpeed's engine, which has its own calls for backward and step."""

    engine: Any = None

    def step(self) -> None:
        """Takes a whole step of training."""
        self.engine.backward(self.engine(self.rows).float().square().mean())
        self.engine.step()


def _engine(module: nn.Module, stage: int, settings: TrainingSettings) -> Any:
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
    adam = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        return deepspeed.initialize(model=module, optimizer=adam, config=config)[0]
