"""Tensors of other memory than the group's: host memory stands in, the bits are the same.

On the CPU, groups are told to stage all tensors; the last tests use a device.
"""

from __future__ import annotations

import ddp
import golden
import helpers
import pytest
import spanning
import torch

import pycomm

HOSTS = [2, 1]


@pytest.fixture
def staging(monkeypatch):
    """Makes every group stage, as of now."""

    def stage():
        monkeypatch.setattr(pycomm.Group, "_stages", lambda *_: True)
        monkeypatch.setattr(pycomm.Group, "_short_way", helpers.NO_SHORT_WAY, raising=False)

    return stage


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + count)
    return (50 * torch.randn(count, generator=generator)).to(dtype)


def collectives(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """One of each; sync and async, dense and strided."""
    x, size = values(group.rank, 10_001).to(device), group.size
    blocks = values(group.rank, 7 * size, torch.bfloat16).to(device)
    strided = torch.zeros(10_001, 2, device=device)[:, 0]
    out, mine, every = torch.empty_like(x), torch.empty_like(blocks[:7]), torch.empty_like(blocks)
    works = [
        pycomm.all_reduce(x.clone(), "avg", out=strided, group=group, async_op=True),
        pycomm.all_reduce(x, "max", out=out, group=group, async_op=True),
        pycomm.reduce_scatter(mine, blocks, group=group, async_op=True),
        pycomm.all_gather(every, blocks[:7], group=group, async_op=True),
    ]
    in_place = pycomm.all_reduce(x[::2].clone(), group=group)
    sent = pycomm.broadcast(values(group.rank, 9).to(device)[::2], size - 1, group=group)
    for work in works:
        work.wait()
    return [t.cpu().clone() for t in (strided, out, mine, every, in_place, sent)]


COMPRESSIONS = [
    pycomm.Int8(rounding="stochastic", seed=4),
    pycomm.TopK(0.02, momentum=0.5),
    pycomm.Cast(),
]


def compressed(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """Steps with residuals and velocities, and one with an infinity."""
    made = []
    for compression in COMPRESSIONS:
        state = {"residual": torch.zeros(70_001, device=device)}
        if compression.momentum:
            state["velocity"] = torch.zeros(70_001, device=device)
        for step in range(4):
            x = values(group.rank, 70_001 + step)[:70_001].to(device)
            x[9] = float("inf") if step == 2 else 1
            options = {"step": step, "group": group, **state}
            work = pycomm.compressed_all_reduce(x, compression, async_op=True, **options)
            assert work.nonfinite == (step == 2)
            made += [t.cpu().clone() for t in (x, *state.values())]
    y = torch.full((9, 2), float("nan"), device=device).T
    with pytest.raises(pycomm.NonFinite):
        pycomm.compressed_all_reduce(y, pycomm.Int8(), strict=True, group=group)
    return made


@pytest.mark.parametrize("function", [collectives, compressed])
def test_the_same_bits(world, staging, function):
    wanted = world(3, nodes=HOSTS).run(function, "cpu")
    staging()
    for got in zip(world(3, nodes=HOSTS).run(function, "cpu"), wanted, strict=True):
        assert golden.same_tensors(*got)


def test_results_come_with_the_wait(world, staging):
    """Only the tensor's own stream changes the tensor."""
    staging()

    def body(group):
        x = torch.ones(1000)
        work = pycomm.all_reduce(x, group=group, async_op=True)
        helpers.wait_until(work.is_completed)
        assert x.eq(1).all()
        work.wait()
        assert x.eq(3).all()

    world(3, nodes=HOSTS).run(body)


def train(group: pycomm.Group, name: str, staged: bool, device: str, wrapped: bool):
    """Gradients and residuals of steps that overflow now and then, with a scaler."""
    if staged and device == "cpu":
        pycomm.Group._stages = lambda *_: True
        pycomm.Group._short_way = helpers.NO_SHORT_WAY
    scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)
    module = ddp.Given().to(device)
    if wrapped:
        model = pycomm.DataParallel(
            module, compression=ddp.COMPRESSIONS[name], grad_scaler=scaler, group=group
        )
        state = model.comm_state
    else:
        model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.05)
        options = {"grad_scaler": scaler, "group": group}
        state, hook = ddp.make_state(ddp.COMPRESSIONS[name], model.named_parameters(), **options)
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        given = {n: g.to(device) for n, g in ddp.gradients(model, group.rank, step).items()}
        if step == 2 and group.rank == 1:
            given["wide"][3] = float("inf")
        scaler.scale(model(given)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [p.detach().cpu().clone() for p in model.parameters()]
        seen += [state.residual(n).cpu().clone() for n in ("wide", "square")]
    return seen


@pytest.mark.parametrize("name", ["int8", "topk"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["hook", "wrapper"])
def test_training(name, wrapped):
    wanted = spanning.run(HOSTS, train, name, False, "cpu", wrapped)
    got = spanning.run(HOSTS, train, name, True, "cpu", wrapped)
    assert golden.same_tensors(got, wanted)
    assert any(residual.any() for residual in got[0][-2:])


@pytest.mark.gpu
@pytest.mark.parametrize("function", [collectives, compressed])
def test_cuda_tensors(world, function):
    wanted = world(3, nodes=HOSTS).run(function, "cpu")
    for got in zip(world(3, nodes=HOSTS).run(function, "cuda"), wanted, strict=True):
        assert golden.same_tensors(*got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8", "topk"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["hook", "wrapper"])
def test_training_on_cuda(name, wrapped):
    wanted = spanning.run(HOSTS, train, name, False, "cpu", wrapped)
    assert golden.same_tensors(spanning.run(HOSTS, train, name, True, "cuda", wrapped), wanted)


@pytest.mark.gpu
def test_after_what_is_queued_and_before_what_comes(world):
    """On a stream of the rank's own, in turns with another one that only sees events."""

    def body(group):
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        for turn in range(10):
            with torch.cuda.stream((one, other)[turn % 2]):
                x += 1
                work = pycomm.all_reduce(x, "avg", group=group, async_op=True)
            with torch.cuda.stream((other, one)[turn % 2]):
                work.wait()
                x += 1
        torch.cuda.synchronize()
        assert x.eq(20).all()

    world(2, nodes=[1, 1]).run(body)
