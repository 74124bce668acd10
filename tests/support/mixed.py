"""Training in mixed precision, on every front."""

import ddp
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks, optim

STEPS = 8
OVERFLOW = (2, 1)  # the step and rank whose loss becomes infinite
SCALE = {"init_scale": 2.0**12, "growth_interval": 3}
SGD = {"lr": 0.1, "momentum": 0.9}
KINDS = [torch.bfloat16, torch.float16]
EXACT = ("dense hook", "no state", "wrapper")  # the arithmetic of torch's DDP, so its bits
SHARDS = {"optimizer shards": "optimizer", "gradient shards": "gradients"}
FRONTS = (*EXACT, "int8 hook", "int8 wrapper", *SHARDS)


def make(front, module, scaler):
    """A data-parallel model and its optimizer."""
    if front in SHARDS:
        model = pycomm.DataParallel(module, shard=SHARDS[front])
        return model, optim.FusedSGD(module.parameters(), **SGD)
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    if front.endswith("wrapper"):
        options = {}
        if front == "int8 wrapper":
            options = {"compression": pycomm.Int8(), "grad_scaler": scaler}
        return pycomm.DataParallel(module, **options), optimizer
    model = DistributedDataParallel(module)
    if front == "dense hook":
        hooks.AllReduceState().register(model)
    elif front == "no state":
        model.register_comm_hook(None, hooks.all_reduce_hook)
    elif front == "int8 hook":
        hooks.Int8State(module.named_parameters(), grad_scaler=scaler).register(model)
    return model, optimizer


def loss_of(model, rank, step, kind, device="cpu"):
    """A rank's loss under autocast; infinite in one step of one rank."""
    with torch.autocast(device, kind):
        loss = model(ddp.batch(rank, step).to(device)).float().square().mean()
    return loss * torch.inf if (step, rank) == OVERFLOW else loss


def take_steps(optimizer, scaler, loss, values, after=lambda: None):
    """Takes the steps with a loss for each; the scale and copies of `values()` after each step."""
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        after()
        seen.append((scaler.get_scale(), [value.detach().cpu().clone() for value in values()]))
    return seen


def train(group, front, kind, device="cpu"):
    """The scale and the parameters after each step."""
    module = ddp.network().to(device)
    make_scaler = optim.GradScaler if front in SHARDS else torch.amp.GradScaler
    scaler = make_scaler(device, **SCALE)
    model, optimizer = make(front, module, scaler)

    def loss(step):
        return loss_of(model, group.rank, step, kind, device)

    return take_steps(optimizer, scaler, loss, module.parameters)
