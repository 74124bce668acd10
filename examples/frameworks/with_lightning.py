"""Trains with Lightning: gradients in 8 bits, and checkpoints with their residuals.

.. code-block:: shell

    python examples/frameworks/with_lightning.py
"""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import pycomm
from pycomm.integrations.lightning import CommCallback


class Net(lightning.LightningModule):
    """A network that adds up 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        (x,) = batch
        loss: torch.Tensor = self.down(self.up(x).relu()) - x.sum(dim=1, keepdim=True)
        return loss.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    strategy = DDPStrategy(process_group_backend="pycomm")
    comm = CommCallback(pycomm.hooks.Int8State)
    trainer = lightning.Trainer(devices=2, strategy=strategy, callbacks=[comm], max_epochs=3)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=64))
