"""Trains a model that is split over two ranks, which send each other activations and gradients.

.. code-block:: shell

    python examples/split_model.py
    torchrun --nproc-per-node 2 examples/split_model.py
    python examples/split_model.py --device cuda --dtype bfloat16

Rank 0 has the first layers and rank 1 the last ones. In each step,

1. rank 0 computes its layers' output, the activations, and sends them;
2. rank 1 computes the loss from them, and in backward the loss's gradient with respect to them;
3. rank 1 sends this gradient back, and rank 0 goes on with backward from there;
4. each rank's optimizer updates the rank's own layers.

The whole model in one process has the same losses. While one rank computes, the other one waits;
``pipeline.py`` cuts batches into microbatches, so that both compute.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from devices import DTYPES, add_device, add_dtype, count, device_of
from torch import nn
from torch.nn import functional

import pycomm
from pycomm.bench import launch

BATCH, WIDTH = 64, 128
LEARNING_RATE = 0.02


def make_layers() -> tuple[nn.Sequential, nn.Sequential]:
    """Both parts of the model; the weights are those of the seed."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def make_optimizer(layers: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE, momentum=0.9)


def batches(steps: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Points, and a function of them to learn; the same on every rank."""
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        points = torch.randn(BATCH, 8, generator=random)
        yield points.to(device), points.sin().sum(1, keepdim=True).to(device)


def train_first(steps: int, device: torch.device) -> None:
    """Trains the first layers, on rank 0."""
    layers = make_layers()[0].to(device)
    optimizer = make_optimizer(layers)
    for points, _ in batches(steps, device):
        activations = layers(points)
        pycomm.send(activations.detach(), dst=1)
        gradient = torch.empty_like(activations)
        pycomm.recv(gradient, src=1)
        optimizer.zero_grad()
        activations.backward(gradient)
        optimizer.step()


def train_last(steps: int, device: torch.device) -> list[float]:
    """Trains the last layers, on rank 1, and returns the loss of each step."""
    layers = make_layers()[1].to(device)
    optimizer = make_optimizer(layers)
    losses = []
    for _, values in batches(steps, device):
        activations = torch.empty(BATCH, WIDTH, device=device)
        pycomm.recv(activations, src=0)
        activations.requires_grad_()
        loss = functional.mse_loss(layers(activations), values)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert activations.grad is not None
        pycomm.send(activations.grad, dst=0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_whole(steps: int, device: torch.device) -> list[float]:
    """Trains the model in one process, and returns the loss of each step."""
    model = nn.Sequential(*make_layers()).to(device)
    optimizer = make_optimizer(model)
    losses = []
    for points, values in batches(steps, device):
        loss = functional.mse_loss(model(points), values)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_rank(steps: int, device: str, dtype: str) -> None:
    """Trains on one rank; rank 1 compares the losses with those of the whole model."""
    torch.set_default_dtype(DTYPES[dtype])
    with pycomm.init() as group:
        if group.size != 2:
            raise SystemExit(f"the model has two parts, so it needs 2 ranks, not {group.size}")
        place = device_of(device, group.rank)
        pycomm.all_reduce(torch.zeros(1, device=place))  # connects GPUs, for messages between them
        if group.rank == 0:
            train_first(steps, place)
        else:
            split, whole = train_last(steps, place), train_whole(steps, place)
            print(" step   split   whole")
            for step in range(0, steps, max(steps // 10, 1)):
                print(f"{step + 1:5}  {split[step]:.4f}  {whole[step]:.4f}")
            difference = max(abs(a - b) for a, b in zip(split, whole, strict=True))
            print(f"largest difference of a loss: {difference:g}")


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=count, default=200, help="training steps (default 200)")
    add_device(parser)
    add_dtype(parser)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    device_of(options.device, 0)  # raises here, rather than in every process
    launch.run(run_rank, *vars(options).values(), ranks=2)


if __name__ == "__main__":
    main()
