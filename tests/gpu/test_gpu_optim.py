"""Fused optimizers on a real device: the bits of the CPU, in eager steps and in captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_ranks
import pytest
import sweep
import torch
from optimizing import Case, gradients, parameters, set_gradients

import pycomm.optim as optim

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LARGE = (300, 100 if gpu_ranks.EMULATED else 1000)  # of emulated blocks there are few
SHAPES = ((33, 7), (5000,), (64, 80), (0, 3), (1,), (1024,), LARGE)
NAMES = ("adam", "adamw", "sgd", "lion", "lamb")


def cases() -> Iterator[Case]:
    for name in NAMES:
        for states in ("fp32", "fp16", "bf16", "8bit"):
            yield Case(name, states=states)
            yield Case(name, dtype=F16, master="fp32", states=states)
            yield Case(name, dtype=F16, grad_dtype=F32, states=states)
            for master in (None, "fp32", "remainder"):
                yield Case(name, dtype=BF16, master=master, states=states)
            yield Case(name, dtype=BF16, grad_dtype=F32, master="remainder", states=states)
            yield Case(name, dtype=BF16, states=states, stochastic=True, seed=5)
    yield Case("adamw", {"amsgrad": True}, dtype=BF16, states="8bit")
    yield Case("adam", {"weight_decay": 0.1, "maximize": True})
    yield Case("sgd", {"nesterov": True})
    yield Case("sgd", {"momentum": 0.0}, dtype=BF16, master="remainder")


def moved(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to("cuda")) for param in params]


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(ours: Any, theirs: Any) -> None:
    """Parameters and states of two optimizers, bit for bit."""
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for param, twin in zip(group["params"], other["params"], strict=True):
            assert raw(param) == raw(twin)
            assert ours.state[param].keys() == theirs.state[twin].keys()
            for name, state in ours.state[param].items():
                assert raw(state) == raw(theirs.state[twin][name]), name


def poison() -> None:
    """Fills the memory that the allocator will return next with NaN."""
    torch.full((1 << 22,), float("nan"), device="cuda")


def pair(case: Case, **more: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    params = parameters(case.dtype, shapes=SHAPES)
    twins = moved(params)
    poison()
    return case.make(params, **more), case.make(twins, **more), params, twins


@pytest.mark.parametrize("case", sweep.a_third_of(cases()), ids=str)
def test_bits_of_the_cpu(case: Case) -> None:
    ours, theirs, params, twins = pair(case, max_norm=1.0)
    for step in range(4):
        grads = gradients(params, step, case.grad_dtype)
        if step == 2:
            grads[1][7] = float("nan")  # also through the norm
        set_gradients(params, grads)
        set_gradients(twins, [grad.cuda() for grad in grads])
        for optimizer, device in ((ours, "cpu"), (theirs, "cuda")):
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = None
            optimizer.step()
        assert raw(ours.grad_norm) == raw(theirs.grad_norm)
        assert float(ours.found_inf) == float(theirs.found_inf) == (step == 2)
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "case", sweep.a_third_of(c for c in cases() if c.name in ("adamw", "lamb")), ids=str
)
def test_a_captured_step_replays_what_eager_steps_do(case: Case) -> None:
    """Rates, scales, overflows and gradients change between replays; eager steps come between."""
    rates = [torch.tensor(0.01, dtype=torch.float64, device="cuda") for _ in range(2)]
    eager, params = _capturable(case, rates[0])
    graphed, twins = _capturable(case, rates[1])
    static = [param.grad for param in twins]
    assert_same(eager, graphed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for step in range(12):
        grads = gradients(parameters(case.dtype, shapes=SHAPES), step, case.grad_dtype)
        if step % 4 == 1:
            grads[0].view(-1)[3] = float("inf")
        for rate in rates:
            rate.fill_(0.01 / (step + 1))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.cuda()
        for place, grad in zip(static, grads, strict=True):
            place.copy_(grad)
        for optimizer in (eager, graphed):
            optimizer.grad_scale.fill_(2.0 ** (step % 3))
        _step(eager)
        if step % 5 == 4:  # from gradients elsewhere: the graph's table is its own
            for param, grad in zip(twins, grads, strict=True):
                param.grad = grad.cuda()
            _step(graphed)
        else:
            graph.replay()
        assert_same(eager, graphed)


def _step(optimizer: Any) -> None:
    optimizer.found_inf = None
    optimizer.step()


def _capturable(case: Case, rate: torch.Tensor) -> tuple[Any, list[Any]]:
    """An optimizer after its first step, on a side stream as captures want it."""
    params = moved(parameters(case.dtype, shapes=SHAPES))
    optimizer = case.make(params, max_norm=1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.grad_scale = torch.tensor(1.0, device="cuda")
    optimizer.found_inf = None
    set_gradients(params, [g.cuda() for g in gradients(params_on_cpu(params), 99, case.grad_dtype)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.found_inf = None
    return optimizer, params


def params_on_cpu(params: list[Any]) -> list[Any]:
    return [torch.nn.Parameter(param.detach().cpu()) for param in params]


def test_capturing_the_first_step_is_refused() -> None:
    params = moved(parameters())
    optimizer = optim.FusedAdamW(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="take one step before capturing"),
        torch.cuda.graph(graph),
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("scaler", "case"),
    [
        (optim.GradScaler, Case("adamw", dtype=BF16, master="remainder")),
        (torch.amp.GradScaler, Case("adamw")),  # it takes no bf16 gradients on CUDA
    ],
    ids=("ours", "torch"),
)
def test_scalers_skip_what_overflows(scaler: Any, case: Case) -> None:
    ours, theirs, params, twins = pair(case)
    scalers = [scaler(device, init_scale=2.0**8, growth_interval=2) for device in ("cpu", "cuda")]
    for step in range(8):
        grads = gradients(params, step)
        if step % 3 == 1:
            grads[2].view(-1)[0] = float("inf")
        set_gradients(params, grads)
        set_gradients(twins, [grad.cuda() for grad in grads])
        for optimizer, its in ((ours, scalers[0]), (theirs, scalers[1])):
            its.scale(torch.ones((), device=its._device))
            its.step(optimizer)
            its.update()
        assert_same(ours, theirs)
        assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.parametrize("case", [Case(name, states="8bit") for name in NAMES], ids=str)
def test_a_step_does_not_wait_for_the_device(case: Case) -> None:
    params = moved(parameters(shapes=SHAPES))
    optimizer = case.make(params, max_norm=1.0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device="cuda")
    scaler = optim.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    for param in params:
        param.grad = torch.ones_like(param)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
            for param in params:
                param.grad = torch.ones_like(param)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _kernels(step: Any) -> list[str]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "Synchronize" not in event.name]


@pytest.mark.hardware
@pytest.mark.parametrize(
    ("name", "max_norm", "launches"),
    [("adamw", None, 1), ("adamw", 1.0, 2), ("sgd", 1.0, 2), ("lion", 1.0, 2), ("lamb", 1.0, 3)],
)
def test_launches_for_500_tensors(name: str, max_norm: float | None, launches: int) -> None:
    shapes = [(1000 + 197 * k,) for k in range(500)]
    params = moved(parameters(shapes=shapes))
    optimizer = Case(name).make(params, max_norm=max_norm)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    names = _kernels(optimizer.step)
    assert sum("_kernel" in kernel for kernel in names) == launches, names
    for param in params:
        param.grad = torch.ones_like(param)
    names = _kernels(optimizer.step)  # gradients have moved: one more, which tells where to
    assert sum("_kernel" in kernel for kernel in names) <= launches + 1, names


def test_streams_take_turns() -> None:
    """Each stream has its own table; work is ordered as the caller orders streams."""
    ours, theirs, params, twins = pair(Case("adamw"))
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(9):
        grads = gradients(params, step)
        set_gradients(params, grads)
        stream = streams[step % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            set_gradients(twins, [grad.cuda() for grad in grads])
            theirs.step()
        torch.cuda.current_stream().wait_stream(stream)
        ours.step()
    assert_same(ours, theirs)


def test_checkpoints_cross_devices() -> None:
    ours, theirs, params, twins = pair(Case("adamw", dtype=BF16, master="remainder", states="8bit"))
    for step in range(2):
        grads = gradients(params, step)
        set_gradients(params, grads)
        set_gradients(twins, [grad.cuda() for grad in grads])
        ours.step()
        theirs.step()
    saved = ours.state_dict()
    theirs.load_state_dict(saved)
    assert_same(ours, theirs)
    for number, state in ours.state_dict(format="torch")["state"].items():
        for name, value in theirs.state_dict(format="torch")["state"][number].items():
            assert raw(state[name]) == raw(value)


def test_two_devices_are_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "cuda")]
    with pytest.raises(ValueError, match="one device, got cpu, cuda:0"):
        optim.FusedAdamW(params)


@pytest.mark.hardware
def test_huge_tensors() -> None:
    """More than 2^31 elements need 64-bit indices; the last ones change as the first ones do."""
    count = (1 << 31) + 5000
    param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device="cuda"))
    param.grad = torch.ones(count, dtype=BF16, device="cuda")
    optimizer = optim.FusedSGD([param], lr=0.5, max_norm=1e9)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(count**0.5)
    assert bool((param == 0.5).all())
