"""Hooks under other people's training loops, the real packages, on the CPU."""

import ddp
import golden
import helpers
import pytest
import torch
from ddp import COMPRESSIONS, Reference
from torch.utils.data import DataLoader

import pycomm

NAMES = ["dense", "int8", "topk"]
STEPS = 3


def check(runs, name):
    """Against the golden models, and that ranks end with the same parameters."""
    Reference(2, COMPRESSIONS[name]).check([seen for seen, _ in runs])
    (mine, theirs) = (parameters for _, parameters in runs)
    assert all(golden.same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def accelerated(rank, size, store, name):
    """Two batches to a step; the loss goes through ``accelerator.backward``."""
    from accelerate import Accelerator

    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = ddp.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(module, optimizer)
    seen = []
    with pycomm.init():
        watched = ddp.Watched(model, COMPRESSIONS[name])
        for step in range(2 * STEPS):
            with accelerator.accumulate(model):
                watched.begin()
                accelerator.backward(model(ddp.batch(rank, step)).square().mean())
                if accelerator.sync_gradients:
                    seen.append(watched.end())
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) == watched.state.step == STEPS
    return seen, [p.detach() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_accelerate(name):
    check(helpers.run_ranks(2, accelerated, name), name)


def under_lightning(rank, size, store):
    """The hook is registered once Lightning has made its DDP model; one training per name."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self, name):
            super().__init__()
            self.network, self.compression, self.seen = ddp.network(), COMPRESSIONS[name], []

        def on_fit_start(self):
            self.watched = ddp.Watched(self.trainer.strategy.model, self.compression)

        def training_step(self, batch):
            self.watched.begin()
            return self.network(batch).square().mean()

        def on_before_optimizer_step(self, optimizer):
            del optimizer
            self.seen.append(self.watched.end())
            self.log_dict(self.watched.state.stats())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(name):
        module = Module(name)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        batches = [ddp.batch(rank, step) for step in range(STEPS)]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        assert trainer.callback_metrics["steps"] == STEPS
        return module.seen, [p.detach() for p in module.parameters()]

    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    with pycomm.init():
        return [train(name) for name in NAMES]


@pytest.mark.slow
def test_lightning():
    mine, theirs = helpers.run_ranks(2, under_lightning)
    for name, *runs in zip(NAMES, mine, theirs, strict=True):
        check(runs, name)
