"""accelerate and Lightning shard models on the backend, the real packages, on the CPU."""

import backends
import helpers
import pytest
import torch
import torch.distributed as dist
from composing import alone, batch, close, loss_of, make_net, mean_loss
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

STEPS = 3


def shard(net, mesh=None):
    for module in (*net, net):
        fully_shard(module, mesh=mesh)


def accelerated(rank, size, shards):
    from accelerate import Accelerator

    helpers.pretend_torchrun(rank, size)
    accelerator = Accelerator(cpu=True)
    net = make_net()
    model = net
    if shards:
        shard(net)
    else:
        model = accelerator.prepare(net)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, dist.get_backend()


@pytest.mark.parametrize("shards", [False, True])
def test_accelerate(shards):
    """With DistributedDataParallel, and with a model that the caller has sharded."""
    losses, _ = alone(STEPS, parts=2)
    for ours, backend in backends.run(2, accelerated, shards):
        close(ours, losses)
        assert backend == "pycomm"


def accelerated_with_plugin(rank, size):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    helpers.pretend_torchrun(rank, size)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    net = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(make_net())
    return type(net).__name__


def test_accelerate_s_fsdp_plugin_has_no_effect_on_the_cpu():
    """If this fails, accelerate supports it now: change docs/how-to/torch-distributed.md."""
    names = backends.run(2, accelerated_with_plugin)
    assert names == ["DistributedDataParallel"] * 2


def under_lightning(rank, size, tensor_parallel_size):
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = make_net(), []

        def configure_model(self):
            if tensor_parallel_size == 1:
                shard(self.net, self.device_mesh["data_parallel"])
                return
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.net:
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)

        def training_step(self, x):
            loss = loss_of(self.net, x)
            self.losses.append(mean_loss(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(strategy):
        return lightning.Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip

    helpers.pretend_torchrun(rank, size)
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        trainer(FSDPStrategy())
    module = Module()
    strategy = ModelParallelStrategy(
        data_parallel_size=size // tensor_parallel_size, tensor_parallel_size=tensor_parallel_size
    )
    batches = [batch(step, rank) for step in range(STEPS)]
    if tensor_parallel_size > 1:  # all ranks compute the whole batch
        batches = [torch.cat([batch(step, part) for part in range(2)]) for step in range(STEPS)]
    trainer(strategy).fit(module, DataLoader(batches, batch_size=None))
    return module.losses, dist.get_backend()


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_lightning_s_model_parallel_strategy(tensor_parallel_size):
    losses, _ = alone(STEPS, parts=2)
    for ours, backend in backends.run(2, under_lightning, tensor_parallel_size):
        close(ours, losses)
        assert backend == "pycomm"
