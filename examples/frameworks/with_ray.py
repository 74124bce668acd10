"""Trains with Ray Train on two workers: gradients in 8 bits, and checkpoints with residuals."""

import tempfile
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import pycomm


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = prepare_model(net)
    state = pycomm.hooks.Int8State(model.named_parameters())
    state.register(model)
    if checkpoint := ray.train.get_checkpoint() or config.get("checkpoint"):
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        net.load_state_dict(saved["model"])
        state.load_state_dict(saved["comm"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(state.step, config["steps"]):
        x = torch.randn(8, 64, generator=torch.manual_seed(2 * step + torch.distributed.get_rank()))
        optimizer.zero_grad()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    kept = {"model": net.state_dict(), "comm": state.state_dict(gathered=True)}  # on all ranks
    with tempfile.TemporaryDirectory() as folder:
        torch.save(kept, f"{folder}/state.pt")
        first = ray.train.Checkpoint.from_directory(folder) if kept["comm"] else None
        ray.train.report({"norm": next(net.parameters()).norm().item()}, checkpoint=first)


if __name__ == "__main__":
    scaling = ray.train.ScalingConfig(num_workers=2)
    TorchTrainer(train, scaling_config=scaling, train_loop_config={"steps": 50}).fit()
