"""Hooks, the wrapper and the scaler on real devices: the same bits as on the CPU.

Gradients are given, so that they do not depend on a device's matrix products.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import compressing
import ddp
import gpu_nodes
import gpu_ranks
import mixed
import pytest
import sweep
import torch

import pycomm
from pycomm import hooks, optim

pytestmark = pytest.mark.gpu

FRONTS = ("hooks", "wrapper")
STEPS = 4
UNUSED = 1  # the step in which the gradient of a parameter is zero on all ranks
OVERFLOW = 2  # the step in which a gradient of one rank is infinite


def train(group: pycomm.Group, device: str, front: str, name: str) -> list[torch.Tensor]:
    """Gradients, weights and the scale after each step, and residuals after the last."""
    module = ddp.Given().to(device)
    compression = ddp.COMPRESSIONS[name]
    if front == "hooks":
        model = ddp.Watched(module, compression, layout={"bucket_cap_mb": 0.05}, group=group).model
    else:
        model = pycomm.DataParallel(
            module, compression=compression, bucket_cap_mb=0.05, group=group
        )
    optimizer = optim.FusedAdamW(module.parameters(), max_norm=1.0)
    scaler = optim.GradScaler(device, init_scale=4.0)
    seen = []
    for step in range(STEPS):
        given = ddp.gradients(model, group.rank, step)
        if step == UNUSED:
            given["wide"].zero_()
        if step == OVERFLOW and group.rank == 1:
            given["square"][3, 3] = float("inf")
        optimizer.zero_grad()
        loss = model({name: gradient.to(device) for name, gradient in given.items()})
        scaler.scale(loss).backward()
        seen += [parameter.grad.cpu().clone() for parameter in module.parameters()]
        scaler.step(optimizer)
        scaler.update()
        seen += [parameter.detach().cpu().clone() for parameter in module.parameters()]
        seen.append(torch.tensor(scaler.get_scale()))
    if front == "wrapper":  # rank 0 has the residuals of all ranks
        for dump in model.comm_state.state_dict(gathered=True).get("gathered", ()):
            seen += [part.cpu() for parts in dump.values() for part in parts.values()]
    return seen


def on_both(group: pycomm.Group, train: Callable[..., list[torch.Tensor]], *args: str) -> None:
    """Compares a GPU with the CPU."""
    seen, wanted = (train(group, device, *args) for device in ("cuda", "cpu"))
    for ours, other in zip(seen, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize(
    ("layout", "front", "name"),
    sweep.a_third_of(gpu_ranks.LAYOUTS, FRONTS, ddp.COMPRESSIONS),
)
def test_bits_of_the_cpu(layout: str, front: str, name: str) -> None:
    gpu_ranks.run(2, layout, on_both, train, front, name)


@gpu_nodes.needs_gpus
@pytest.mark.parametrize(("front", "name"), sweep.half_of(FRONTS, ddp.COMPRESSIONS))
def test_bits_of_the_cpu_between_nodes(front: str, name: str) -> None:
    gpu_nodes.run([2, 1], on_both, train, front, name)


def on_devices(group: pycomm.Group, *devices: str) -> list[torch.Tensor]:
    """Averages of a gradient that lies on one device after the other."""
    weights = torch.nn.Parameter(torch.zeros(5000))
    state = hooks.Int8State([("weights", weights)], exclude=lambda *_: False, group=group)
    seen = []
    for step, device in enumerate(devices):
        gradient = compressing.gradient(torch.float32, 5000, group.rank, step).to(device)
        state.start(gradient, [weights])
        state.finish()
        assert state.residual("weights").device == gradient.device
        seen.append(gradient.cpu())
    return seen


def test_residuals_follow_the_gradients_to_another_device() -> None:
    with pycomm.LocalWorld(2) as world:
        found = world.run(on_devices, "cuda", "cpu", "cuda")
        wanted = world.run(on_devices, "cpu", "cpu", "cpu")
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_compressed_gradients_on_two_devices_are_refused() -> None:
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            first, second = (torch.nn.Parameter(torch.zeros(300)) for _ in range(2))
            named = [("first", first), ("second", second)]
            state = hooks.Int8State(named, exclude=lambda *_: False, group=group)
            state.start(torch.ones(300, device="cuda"), [first])
            with pytest.raises(ValueError, match="second is on cpu, residual on cuda:0"):
                state.start(torch.ones(300), [second])
            state.finish()

        world.run(body)


def test_no_step_waits_for_the_exchange_before() -> None:
    """Not even to know how long that one took; the emulated device refuses to wait."""

    def steps(group: pycomm.Group) -> hooks.AllReduceState:
        weights, gradient = torch.nn.Parameter(torch.zeros(9)), torch.ones(9, device="cuda")
        state = hooks.AllReduceState(group=group)
        for _ in range(3):
            state.start(gradient, [weights])
            state.finish()
        return state

    with pycomm.LocalWorld(2) as world:
        world.run(steps)  # connects
        torch.cuda.set_sync_debug_mode("error")
        try:
            states = world.run(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for stats in (state.stats() for state in states):
            assert 0 <= stats["exposed_ms"] <= stats["exposed_ms_total"]
            assert stats["exposed_ms_mean"] == pytest.approx(stats["exposed_ms_total"] / 3)


def train_locally(group: pycomm.Group, device: str, name: str) -> list[torch.Tensor]:
    """Weights after each step of local SGD."""
    module = ddp.Given().to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = hooks.LocalSGDState(
        module.named_parameters(), optimizer, period=2, compression=ddp.COMPRESSIONS[name],
        outer_lr=0.7, outer_momentum=0.9, group=group,
    )  # fmt: skip
    model = pycomm.DataParallel(module, state=state)
    seen = []
    for step in range(STEPS):
        given = ddp.gradients(model, group.rank, step)
        optimizer.zero_grad()
        model({key: gradient.to(device) for key, gradient in given.items()}).backward()
        optimizer.step()
        state.step()
        seen += [parameter.detach().cpu().clone() for parameter in module.parameters()]
    return seen


@gpu_nodes.needs_gpus
@pytest.mark.parametrize(
    ("nodes", "name"), sweep.half_of([[1, 1], [2, 1]], ["dense", "int8", "topk"]), ids=str
)
def test_local_sgd_between_nodes(nodes: list[int], name: str) -> None:
    gpu_nodes.run(nodes, on_both, train_locally, name)


def train_under_autocast(group: pycomm.Group, kind: torch.dtype) -> None:
    """Every front on a GPU, beside torch's own DistributedDataParallel on the CPU."""
    expected = mixed.train(group, "torch", kind)
    for front in mixed.FRONTS:
        seen = mixed.train(group, front, kind, "cuda")
        for (scale, mine), (wanted_scale, wanted) in zip(seen, expected, strict=True):
            assert scale == wanted_scale, front
            for one, other in zip(mine, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=5e-3, msg=front)


@pytest.mark.parametrize("kind", mixed.KINDS, ids=str)
def test_autocast_and_a_scaler(kind: torch.dtype) -> None:
    """An infinity on one rank skips the step on all ranks, on the device as on the CPU."""
    gpu_ranks.run(2, gpu_ranks.PEER, train_under_autocast, kind, cuda_heap_bytes=16 << 20)


def train_beside_torch(group: pycomm.Group, kind: torch.dtype) -> None:
    expected = mixed.train(group, "torch", kind, "cuda")
    for front in mixed.EXACT:
        seen = mixed.train(group, front, kind, "cuda")
        for (scale, mine), (wanted_scale, wanted) in zip(seen, expected, strict=True):
            assert scale == wanted_scale, front
            assert all(map(torch.equal, mine, wanted)), front


@pytest.mark.hardware
@pytest.mark.parametrize("kind", mixed.KINDS, ids=str)
def test_autocast_has_the_bits_of_torchs_own_exchange(kind: torch.dtype) -> None:
    """Torch's own goes over Gloo, which takes tensors of real devices only."""
    gpu_ranks.run(2, gpu_ranks.PEER, train_beside_torch, kind)


SLOWLY_RELEASED = """
import os, time, torch, pycomm._runtime.cuda
from torch.autograd import Variable

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # so that autograd's thread lags behind

class Callback:
    def __call__(self):
        pass
    def __del__(self):
        time.sleep(0.3)

x = torch.ones(4, device="cuda", requires_grad=True)
x.register_hook(lambda _: Variable._execution_engine.queue_callback(Callback()))
(x * 2).sum().backward()
"""


def test_a_process_that_ends_right_after_backward_ends_well():
    """Autograd's thread may still hold Python objects of the backward."""
    done = subprocess.run(
        [sys.executable, "-c", SLOWLY_RELEASED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
