"""Sharded steps on a real device: the bits of the CPU, and of the wrapper without shards."""

from __future__ import annotations

from typing import Any

import gpu_ranks
import pytest
import sharded_by_hand
import sweep
import torch
import torch.distributed as dist
from optimizing import Case

import pycomm

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [
    *(Case(name, states=states) for name in ("adam", "lamb") for states in ("fp32", "8bit")),
    *(Case(name, dtype=F16, grad_dtype=F32) for name in ("sgd", "lamb")),
    *(
        Case(name, dtype=BF16, master=master, states=states)
        for name in ("adamw", "sgd", "lion", "lamb")
        for master, states in ((None, "bf16"), ("fp32", "fp32"), ("remainder", "8bit"))
    ),
    Case("adamw", {"amsgrad": True}, dtype=BF16, states="fp16"),
    Case("adamw", dtype=BF16, states="bf16", stochastic=True, seed=5),
    Case("sgd", {"momentum": 0.0}, dtype=BF16, master="remainder"),
]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize(("case", "size"), sweep.a_third_of(CASES, [1, 2, 4]), ids=str)
def test_bits_of_the_cpu(case: Case, size: int) -> None:
    """Ranks are threads that share one launch."""
    with pycomm.LocalWorld(size) as world:
        wanted = world.run(sharded_by_hand.steps, case, "cpu")
        found = world.run(sharded_by_hand.steps, case, "cuda")
    for mine, theirs in zip(found, wanted, strict=True):
        for index, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
            assert ours.dtype == other.dtype
            assert torch.equal(raw(ours), raw(other)), index


def test_threads_on_one_device_are_refused() -> None:
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            with pytest.raises(ValueError, match="must each have a GPU"):
                pycomm.DataParallel(torch.nn.Linear(2, 2).cuda(), group=group, shard="optimizer")

        world.run(body)


def check_gathering_to_one(optimizer: Any) -> None:
    """One rank gets the states that all get, also through messages."""
    whole, one = optimizer.state_dict()["state"], optimizer.state_dict(to=1)["state"]
    assert one.keys() == (whole.keys() if dist.get_rank() == 1 else set())
    for number, state in one.items():
        for name, tensor in state.items():
            assert tensor.device == whole[number][name].device
            assert torch.equal(raw(tensor), raw(whole[number][name])), name


def train(shard: str | None, steps: int = 4) -> list[torch.Tensor]:
    """Parameters after steps of a small model, with a skipped one and accumulation."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 9))
    model: Any = pycomm.DataParallel(net.cuda().bfloat16(), shard=shard, bucket_cap_mb=0.01)
    optimizer = pycomm.optim.FusedAdamW(
        model.parameters(), master_weights="remainder", states="8bit", max_norm=1.0
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        for _ in range(1 + step % 2):
            x = torch.randn(16, 64, generator=generator).cuda().bfloat16()
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if shard is not None:
        check_gathering_to_one(optimizer)
    return [parameter.detach().cpu() for parameter in net.parameters()]


def shard_like_a_whole_model(group: pycomm.Group) -> None:
    if group.explain(4, device="cuda").path == gpu_ranks.PINNED:
        with pytest.raises(ValueError, match="access to each other's memory"):
            train("optimizer")
        return
    whole = train(None)
    for shard in ("optimizer", "gradients"):
        for ours, wanted in zip(train(shard), whole, strict=True):
            assert torch.equal(ours, wanted), shard


@pytest.mark.parametrize("layout", [gpu_ranks.PEER, gpu_ranks.PINNED])
def test_processes(layout: str) -> None:
    gpu_ranks.run(2, layout, shard_like_a_whole_model, cuda_heap_bytes=64 << 20)
