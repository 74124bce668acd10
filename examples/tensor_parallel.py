"""Trains a small transformer tensor-parallel: each rank has a part of every matrix.

.. code-block:: shell

    python examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

All ranks train on the same batch. A rank computes some of the attention heads and some of the
neurons, and an all-reduce adds up what the ranks have computed (Shoeybi et al. 2019,
"Megatron-LM: training multi-billion parameter language models using model parallelism").
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from devices import CPU
from model_parallel import Log, loss_of, make_optimizer, parser_of, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_lm import HEADS, Block, Transformer

PLAN = {
    "query_key_value": ColwiseParallel(),
    "mix": RowwiseParallel(),
    "network.0": ColwiseParallel(),
    "network.2": RowwiseParallel(),
}


def keep_heads_whole(linear: nn.Linear, ranks: int) -> None:
    """Reorders rows from (query, key, value) x heads, such that a rank's part holds whole heads."""
    with torch.no_grad():
        for rows in (linear.weight, linear.bias):
            parts = rows.view(3, ranks, len(rows) // (3 * ranks), -1)
            rows.copy_(parts.transpose(0, 1).reshape(rows.shape))


def split(net: nn.Sequential, device: str) -> None:
    """Leaves each rank its part of the matrices."""
    ranks = dist.get_world_size()
    if HEADS % ranks:
        raise SystemExit(f"{HEADS} heads cannot be split among {ranks} ranks")
    mesh = init_device_mesh(device, (ranks,))
    for layer in net:
        if isinstance(layer, Block):
            keep_heads_whole(layer.query_key_value, ranks)
            parallelize_module(layer, mesh, PLAN)


def train(steps: int, plot: str | None = None, device: torch.device = CPU) -> Log:
    """Trains on every rank; rank 0 shows progress."""
    torch.manual_seed(0)
    net = Transformer().to(device)
    split(net, device.type)
    optimizer = make_optimizer(net.parameters())
    log = Log("tensor-parallel", steps, plot, device)
    for inputs, targets in log.batches():
        with log.step():
            loss = loss_of(net(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        log.add(loss)
    log.close()
    return log


if __name__ == "__main__":
    run(train, parser_of(__file__, __doc__).parse_args())
