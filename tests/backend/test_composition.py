"""Libraries on top of torch.distributed train on pycomm as a single process trains."""

import backends
import pytest
import torch
import torch.distributed.checkpoint as dcp
from composing import WIDTH, alone, batch, close, loss_of, make_net, mean_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def sharded(rank, _size, mesh_shape, in_window, policy):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    net = make_net()
    options = {"mesh": mesh}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in net:
        fully_shard(block, **options)
    fully_shard(net, **options)
    if in_window:
        for module in (*net, net):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(net, batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))
    return losses, [p.full_tensor().detach() for p in net.parameters()]


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_fully_shard_trains_as_one_process(mesh_shape, in_window):
    losses, parameters = alone()
    for ours, params in backends.run(4, sharded, mesh_shape, in_window, False):
        close(ours, losses)
        close(params, parameters)


def test_fully_shard_in_bf16_is_repeatable():
    first = backends.run(2, sharded, (2,), True, True)
    second = backends.run(2, sharded, (2,), True, True)
    for (losses, params), (again, params_again) in zip(first, second, strict=True):
        assert losses == again
        assert all(map(torch.equal, params, params_again))


def parallel(_rank, size, sequence):
    mesh = init_device_mesh("cpu", (size,))
    net = make_net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
    for block in net:
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.cat([batch(step, part) for part in range(4)])
        if sequence:
            x = distribute_tensor(x, mesh, [Shard(0)])
        y = net(x)
        y = y.redistribute(placements=[Replicate()]).to_local() if isinstance(y, DTensor) else y
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_trains_as_one_process(sequence):
    losses, _ = alone()
    for ours in backends.run(2, parallel, sequence):
        close(ours, losses)


def head(_rank, size):
    """Loss parallel: the logits stay sharded by class."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 40)
    x, target = batch(0, 0), torch.arange(8) * 5
    expected = nn.functional.cross_entropy(net(x), target)
    (gradient,) = torch.autograd.grad(expected, [net.weight])
    parallelize_module(net, mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
    return (
        abs(loss.full_tensor().item() - expected.item()),
        (net.weight.grad.full_tensor() - gradient).abs().max().item(),
    )


def test_loss_parallel():
    for loss_error, gradient_error in backends.run(2, head):
        assert loss_error < 1e-6
        assert gradient_error < 1e-6


def pipelined(rank, size, kind):
    stages_here = 2 if kind is ScheduleInterleaved1F1B else 1
    count = size * stages_here
    net = make_net(blocks=4)
    cut = [nn.Sequential(*net[i * 4 // count : (i + 1) * 4 // count]) for i in range(count)]
    mine = range(rank, count, size)
    stages = [PipelineStage(cut[i], i, count, torch.device("cpu")) for i in mine]
    schedule = kind(
        stages if stages_here > 1 else stages[0], n_microbatches=4,
        loss_fn=lambda y, _: y.square().mean(),
    )  # fmt: skip
    parameters = [p for i in mine for p in cut[i].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.cat([batch(step, part) for part in range(4)])
        parts = []
        has_last = count - 1 in mine
        arguments = (x,) if 0 in mine else ()
        if has_last:
            schedule.step(*arguments, target=torch.zeros_like(x), losses=parts)
        else:
            schedule.step(*arguments)
        optimizer.step()
        if has_last:
            losses.append(torch.stack(parts).mean().item())
    return losses


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipelines_train_as_one_process(kind):
    losses, _ = alone()
    results = backends.run(2, pipelined, kind)
    close(results[1], losses)


def redundant(rank, _size, kind):
    net = make_net()
    model = nn.parallel.DistributedDataParallel(net)
    options = {"lr": 0.1}
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options)
    else:
        optimizer = torch.optim.SGD(net.parameters(), **options)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))
    return losses, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["zero", "ddp"])
def test_data_parallel_trains_as_one_process(kind):
    losses, parameters = alone(parts=2)
    for ours, params in backends.run(2, redundant, kind):
        close(ours, losses)
        close(params, parameters)


def saved(rank, _size, folder):
    net = make_net()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    loss_of(net, batch(0, rank)).backward()
    expected = [p.full_tensor().detach().clone() for p in net.parameters()]
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    return all(
        torch.equal(a, b.full_tensor()) for a, b in zip(expected, net.parameters(), strict=True)
    )


def test_checkpoints(tmp_path):
    assert backends.run(2, saved, str(tmp_path)) == [True, True]
