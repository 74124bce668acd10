"""Trains a small transformer with FSDP2, in which each rank keeps a part of every parameter.

.. code-block:: shell

    python examples/fsdp.py --compression int8
    torchrun --nproc-per-node 2 examples/fsdp.py

Each rank trains on a part of the batch. FSDP gathers the parameters of a layer when the layer runs,
and gives each rank its part of the mean gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from devices import CPU
from model_parallel import Log, loss_of, make_optimizer, parser_of, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_lm import Transformer

import pycomm
from pycomm.fsdp import AllGather, ReduceScatter

COMPRESSIONS = {"none": None, "bf16": pycomm.Cast(), "int8": pycomm.Int8()}


def shard(net: nn.Sequential, compression: pycomm.Compression | None, device: str) -> None:
    """Leaves each rank its part of the parameters."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*net, net):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_custom_all_gather(AllGather(mesh, compression))
        sharded.set_custom_reduce_scatter(ReduceScatter(mesh, compression))


def train(
    steps: int,
    plot: str | None = None,
    device: torch.device = CPU,
    compression: str = "none",
) -> Log:
    """Trains on every rank; rank 0 shows progress."""
    torch.manual_seed(0)
    net = Transformer().to(device)
    shard(net, COMPRESSIONS[compression], device.type)
    optimizer = make_optimizer(net.parameters())
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    log = Log(f"FSDP, compression {compression}", steps, plot, device)
    for inputs, targets in log.batches():
        with log.step():
            loss = loss_of(net(inputs[mine]), targets[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        log.add(mean)
    log.close()
    return log


if __name__ == "__main__":
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
    arguments = parser.parse_args()
    run(train, arguments, arguments.compression)
