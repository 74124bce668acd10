"""Trains with accelerate: gradients in 8 bits, and checkpoints with their residuals.

.. code-block:: shell

    torchrun --nproc-per-node 2 examples/frameworks/with_accelerate.py
"""

import torch
from accelerate import Accelerator

import pycomm
from pycomm.integrations.accelerate import Gathered


def train(folder: str, begin: int, end: int) -> torch.Tensor:
    """Trains from one step to another; loads a checkpoint unless it begins at 0."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    state = pycomm.hooks.Int8State(model.named_parameters())
    state.register(model)
    accelerator.register_for_checkpointing(Gathered(state))
    if begin:
        accelerator.load_state(folder)
    for step in range(begin, end):
        torch.manual_seed(100 * step + accelerator.process_index)
        x = torch.randn(32, 64, device=accelerator.device)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


if __name__ == "__main__":
    train("checkpoint", 0, 50)
    print("norm of the parameters", train("checkpoint", 50, 100).norm().item())
