"""Trains with torch's DistributedDataParallel in spawned processes, with gradients in 8 bits.

.. code-block:: shell

    python examples/spawn_ddp.py
    python examples/spawn_ddp.py --ranks 4 --compression none
    python examples/spawn_ddp.py --device cuda --dtype bfloat16

Everything is as in a program for torch alone: `spawn` starts the processes, a DistributedSampler
gives each rank its share of the samples, and `set_epoch` shuffles them anew in each epoch. The two
lines that name `hooks` make pycomm average the gradients.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from itertools import pairwise

import torch
import torch.distributed as dist
from devices import DTYPES, add_device, add_dtype, count, device_of
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pycomm
from pycomm import hooks

SAMPLES, BATCH, WIDTH = 4096, 64, 128


def make_dataset() -> TensorDataset:
    """Points in eight dimensions, and a function of them to learn; the same on every rank."""
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sin().sum(1, keepdim=True))


def make_model() -> nn.Module:
    """Two hidden layers; the weights are those of the seed."""
    torch.manual_seed(0)
    sizes = [8, WIDTH, WIDTH]
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(group: pycomm.Group, device: torch.device, epochs: int, compression: str) -> list[float]:
    """Trains on one rank.

    Args:
        group: the ranks.
        device: of this rank's tensors.
        epochs: how often every sample is seen.
        compression: of the gradients, ``"int8"`` or ``"none"``.

    Returns:
        The mean loss of each epoch over all ranks.
    """
    dataset = make_dataset()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // group.size, sampler=sampler)
    net = make_model().to(device)
    model = DistributedDataParallel(net)
    parameters = net.named_parameters()
    state = hooks.Int8State(parameters) if compression == "int8" else hooks.AllReduceState()
    state.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first one
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for points, values in loader:
            loss = functional.mse_loss(model(points.to(device)), values.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach() / len(loader)
        pycomm.all_reduce(total, "avg")
        losses.append(total.item())
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}", flush=True)
    if group.rank == 0 and compression == "int8":
        print(f"{state.stats()['ratio']:.1f} times fewer bytes than uncompressed gradients")
    return losses


def run_rank(
    rank: int, folder: str, ranks: int, epochs: int, compression: str, device: str, dtype: str
) -> None:
    """What a spawned process does; `spawn` passes its rank first."""
    torch.set_num_threads(1)
    torch.set_default_dtype(DTYPES[dtype])
    place = device_of(device, rank)
    # Gloo is for torch's own operations. It accepts GPUs that ranks share, which NCCL refuses.
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    with pycomm.init() as group:
        train(group, place, epochs, compression)
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=count, default=2, help="processes (default 2)")
    parser.add_argument("--epochs", type=count, default=5, help="(default 5)")
    parser.add_argument("--compression", choices=("int8", "none"), default="int8")
    add_device(parser)
    add_dtype(parser)
    options = parser.parse_args()
    if not 1 <= options.ranks <= BATCH:
        parser.error(f"--ranks must be 1 to {BATCH}, the samples of a step")
    device_of(options.device, 0)  # raises here, rather than in every process
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, *vars(options).values())
        multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
