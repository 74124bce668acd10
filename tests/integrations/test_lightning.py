"""Lightning saves and loads residuals and divided states."""

import sys
from pathlib import Path

import ddp
import golden
import helpers
import pytest
from torch.utils.data import DataLoader

import pycomm
from pycomm import optim

lightning = pytest.importorskip("lightning")
sys.path.append(str(Path(__file__).parents[2] / "examples/frameworks"))


def strategy_and_callback(kind):
    from lightning.pytorch.strategies import DDPStrategy

    from pycomm.integrations.lightning import CommCallback, DataParallelStrategy

    if kind == "hook":
        strategy = DDPStrategy(process_group_backend="pycomm")
        return strategy, CommCallback(pycomm.hooks.Int8State)
    wrapper = {"shard": "optimizer"} if kind == "shards" else {"compression": pycomm.Int8()}
    return DataParallelStrategy(wrapper), CommCallback()


def fit(rank, kind, folder, resume=None):
    """The parameters after two epochs, and the callback's state."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from with_lightning import Net

    class Module(Net):
        def configure_optimizers(self):
            return optim.FusedAdamW(self.parameters(), lr=1e-3)

    lightning.seed_everything(0)
    module, (strategy, callback) = Module(), strategy_and_callback(kind)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2,
        callbacks=[callback, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    batches = [[ddp.batch(rank, step).repeat(1, 2)[:, :64]] for step in range(4)]
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resume)
    return [p.detach().clone() for p in module.parameters()], callback.state.step


def resumed(rank, size, store, kind):
    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    whole, steps = fit(rank, kind, f"{store}.whole")
    rest, other_steps = fit(rank, kind, f"{store}.rest", f"{store}.whole/epoch=0.ckpt")
    assert steps == other_steps == 4
    return whole, rest


@pytest.mark.parametrize("kind", ["hook", "wrapper", "shards"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(kind):
    (whole, rest), (other, _) = helpers.run_ranks(2, resumed, kind)
    assert all(golden.same_bits(a, b) for a, b in zip(whole, other, strict=True))
    assert all(golden.same_bits(a, b) for a, b in zip(whole, rest, strict=True))
