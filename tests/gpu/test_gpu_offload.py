"""States in pinned host memory: the bits of states beside their parameters, for steps on both."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gpu_ranks
import pytest
import torch
from optimizing import Case, gradients, parameters, set_gradients
from test_gpu_optim import BF16, F16, F32, SHAPES, assert_same, moved, poison, raw
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import pycomm
import pycomm.optim as optim
from pycomm.optim import _offload
from pycomm.optim._offload import Slots

pytestmark = pytest.mark.gpu

IS_FASTER = _offload.is_faster_on_host


def cases() -> Iterator[Case]:
    for name in ("adamw", "sgd", "lion"):
        for states in ("fp32", "fp16", "bf16", "8bit"):
            yield Case(name, states=states)
            yield Case(name, dtype=F16, master="fp32", states=states)
            yield Case(name, dtype=BF16, master="remainder", states=states)
        yield Case(name, dtype=BF16, states="8bit", stochastic=True, seed=5)
    yield Case("adamw", dtype=BF16)
    yield Case("adamw", dtype=BF16, grad_dtype=F32, master="fp32")
    yield Case("adam", {"amsgrad": True}, dtype=BF16, master="fp32", states="8bit")
    yield Case("sgd", {"momentum": 0.0}, dtype=BF16, master="remainder")
    yield Case("sgd", {"momentum": 0.0})  # no states at all


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what this machine is faster at."""
    monkeypatch.setattr(_offload, "is_faster_on_host", lambda *_: False)


@pytest.fixture(params=(False, True), ids=("device", "host"))
def on_host(request: Any, on_device: None, monkeypatch: pytest.MonkeyPatch) -> bool:  # noqa: ARG001
    chosen: bool = request.param
    monkeypatch.setattr(_offload, "is_faster_on_host", lambda *_: chosen)
    return chosen


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in many pieces."""
    monkeypatch.setattr(_offload, "SLOT_BYTES", 32 << 10)


def pair(case: Case, **more: Any) -> tuple[Any, Any]:
    """The optimizer with its states on the device, and with its states on the host."""
    made = parameters(case.dtype, shapes=SHAPES)
    beside, offloaded = (
        case.make(moved(made), offload=offload, **more) for offload in (None, "pinned")
    )
    return beside, offloaded


def params_of(optimizer: Any) -> list[torch.nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def take_step(number: int, case: Case, *optimizers: Any, spoilt: bool = False) -> None:
    for optimizer in optimizers:
        params = params_of(optimizer)
        on_cpu = [param.detach().cpu() for param in params]
        grads = gradients(on_cpu, number, case.grad_dtype)
        if spoilt:
            grads[1][7] = float("nan")
        set_gradients(params, [grad.cuda() for grad in grads])
        optimizer.step()


def host_states(optimizer: Any) -> list[torch.Tensor]:
    states = [
        tensor
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    ]
    assert all(tensor.is_cpu for tensor in states)
    return states


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_bits_are_those_of_states_on_the_device(case: Case, on_host: bool) -> None:
    beside, offloaded = pair(case, max_norm=1.0)
    for step in range(5):
        for optimizer in (beside, offloaded):
            optimizer.grad_scale = torch.tensor(4.0, device="cuda")
            optimizer.found_inf = torch.ones((), device="cuda") if step == 2 else None
        take_step(step, case, beside, offloaded, spoilt=step == 3)
        assert raw(beside.grad_norm) == raw(offloaded.grad_norm)
        assert float(beside.found_inf) == float(offloaded.found_inf) == (step in (2, 3))
    torch.cuda.synchronize()
    assert_same(beside, offloaded)
    host_states(offloaded)
    assert offloaded._on_cuda.on_host == on_host
    if on_host:
        params = params_of(offloaded)
        moved = [param.grad for param in params] + (params if case.master != "fp32" else [])
        copies = [size for piece in offloaded._on_cuda._pieces for _, _, size in piece.ins]
        assert sum(copies) == sum(tensor.nbytes for tensor in moved)


@pytest.mark.usefixtures("on_host", "pieces")
def test_a_scaler_clips_accumulated_gradients() -> None:
    """The second of three steps has an infinite gradient, and is skipped."""
    torch.manual_seed(0)
    weight, batches = torch.randn(70, 60), torch.randn(6, 5, 60)
    batches[3, 0, 0] = float("inf")
    made = []
    for offload in (None, "pinned"):
        layer = torch.nn.Linear(60, 70, bias=False)
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.to("cuda", BF16)
        optimizer = optim.FusedAdamW(
            layer.parameters(),
            lr=torch.tensor(0.1, device="cuda"),
            max_norm=0.5,
            master_weights="fp32",
            offload=offload,
        )
        scaler = optim.GradScaler("cuda", init_scale=8.0)
        for number, batch in enumerate(batches):
            scaler.scale(layer(batch.to("cuda", BF16)).square().mean() / 2).backward()
            if number % 2 == 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
        made.append(optimizer)
    assert_same(*made)
    assert float(made[1].state[params_of(made[1])[0]]["step"]) == 2.0


@pytest.mark.usefixtures("pieces")
def test_the_host_steps_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, copies into slots are made only when the host waits for them."""
    log: list[str] = []
    bring_in, bring_out, step = Slots.bring_in, Slots.bring_out, _offload._C.optimizer_step

    class Arrival:
        def __init__(self, *args: Any) -> None:
            log.append("in")
            self.args = args

        def synchronize(self) -> None:
            log.append("wait")
            bring_in(*self.args).synchronize()

    def out(*args: Any) -> torch.cuda.Event:
        log.append("out")
        return bring_out(*args)

    def noted_step(*args: Any) -> None:
        log.append("step")
        step(*args)

    case = Case("adamw", dtype=BF16, master="remainder", states="8bit")
    beside, offloaded = pair(case)
    take_step(0, case, beside)
    monkeypatch.setattr(_offload, "is_faster_on_host", lambda *_: True)
    monkeypatch.setattr(Slots, "bring_in", lambda *args: Arrival(*args))
    monkeypatch.setattr(Slots, "bring_out", out)
    monkeypatch.setattr(_offload._C, "optimizer_step", noted_step)
    take_step(0, case, offloaded)
    assert_same(beside, offloaded)
    later = len(offloaded._on_cuda._pieces) - _offload.SLOTS
    turn = ["wait", "step", "out"]
    assert later > 0
    assert log == ["in"] * _offload.SLOTS + [*turn, "in"] * later + turn * _offload.SLOTS
    assert {slot.is_cpu for slot in offloaded._offloaded._slots._slots} == {True}


# The host steps a parameter in the time in which the link moves `cost` bytes. With fp32 moments and
# masters, AdamW moves 12 bytes of a bf16 parameter each way to step on the device, otherwise 2.
@pytest.mark.parametrize(
    ("case", "cost", "way"),
    [
        (Case("adamw", dtype=BF16, master="fp32"), 11, "host"),
        (Case("adamw", dtype=BF16, master="fp32"), 13, "device"),
        (Case("adamw", dtype=BF16, grad_dtype=F32, master="fp32"), 1, "host"),
        (Case("adamw", dtype=BF16, master="remainder", states="8bit"), 3, "host"),  # 4 to 4.03
        (Case("adamw", dtype=BF16, states="8bit"), 1, "device"),  # 2.03 each way, or 4 and 2
        (Case("adamw"), 1, "device"),  # 8 each way, or 8 and 4
    ],
    ids=str,
)
def test_the_faster_way_is_taken(
    case: Case,
    cost: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_offload, "is_faster_on_host", IS_FASTER)
    monkeypatch.setattr(_offload, "link_rate", lambda _: 1e9)
    monkeypatch.setattr(_offload, "host_rate", lambda *_: 1e9 / cost)
    beside, offloaded = pair(case)
    with caplog.at_level("INFO", "pycomm.optim"):
        for step in range(3):
            take_step(step, case, beside, offloaded)
    assert_same(beside, offloaded)
    assert offloaded._on_cuda.on_host == (way == "host")
    (message,) = caplog.messages  # of the first step
    assert f"steps on the {way}" in message


def test_the_way_is_chosen_again_for_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third step, a parameter whose moments are in 8 bits gets its first gradient."""
    choices = [True, False]
    monkeypatch.setattr(_offload, "is_faster_on_host", lambda *_: choices.pop())
    case = Case("adamw", dtype=BF16, master="remainder", states="8bit")
    beside, offloaded = optimizers = [
        case.make(moved(parameters(BF16, shapes=[(33, 7), (3900,), (5000,)])), offload=offload)
        for offload in (None, "pinned")
    ]
    ways = []
    for step in range(4):
        for optimizer in optimizers:
            for param in params_of(optimizer)[: 2 if step < 2 else 3]:
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
        assert_same(beside, offloaded)
        slots = offloaded._offloaded._slots._slots
        ways.append((offloaded._on_cuda.on_host, {slot.is_cpu for slot in slots}))
    assert ways == [(False, {False})] * 2 + [(True, {True})] * 2


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        # Moments of small parameters are in fp32.
        (Case("adamw", {"amsgrad": True}, dtype=BF16, master="remainder", states="8bit"), 3),
        (Case("sgd", {"momentum": 0.0}), 2),
    ],
    ids=str,
)
def test_rates_are_measured(case: Case, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, offloaded = pair(case)
    rates = []
    for name in ("link_rate", "host_rate"):
        measure = getattr(_offload, name)
        monkeypatch.setattr(
            _offload, name, lambda *of, measure=measure: rates.append(measure(*of)) or rates[-1]
        )
    monkeypatch.setattr(_offload, "is_faster_on_host", IS_FASTER)
    take_step(0, case, offloaded)
    assert len(rates) == measured
    assert all(1e3 < rate < 1e15 for rate in rates)


def test_pieces_cut_large_parameters_and_join_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30,000 elements with 8 bytes each, a slot of 32 KiB holds 3 or 4 times 1,024."""
    monkeypatch.setattr(_offload, "SLOT_BYTES", 32 << 10)
    _, offloaded = pair(Case("adamw"))
    take_step(0, Case("adamw"), offloaded)
    pieces = offloaded._on_cuda._pieces
    rows = [len(piece.words) // _offload._WORDS for piece in pieces]
    assert len(pieces) >= sum(tensor.nbytes for tensor in host_states(offloaded)) // (32 << 10)
    assert max(piece.used for piece in pieces) <= 32 << 10
    assert max(rows) > 1
    assert any(piece.counted for piece in pieces)
    monkeypatch.undo()
    take_step(1, Case("adamw"), offloaded)
    (piece,) = offloaded._on_cuda._pieces
    assert len(piece.ins) == len(piece.outs) == 1  # all states lie side by side


def test_a_step_leaves_only_slots_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_offload, "SLOT_BYTES", 32 << 10)
    case = Case("adamw")
    _, offloaded = pair(case)
    take_step(0, case, offloaded)
    before = torch.cuda.memory_allocated() if not gpu_ranks.EMULATED else None
    states = sum(tensor.nbytes for tensor in host_states(offloaded))
    slots = sum(slot.numel() for slot in offloaded._offloaded._slots._slots)
    assert slots <= _offload.SLOTS * (32 << 10) < states
    take_step(1, case, offloaded)
    if before is not None:
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.skipif(not gpu_ranks.EMULATED, reason="reads what the stand-in of CUDA has pinned")
def test_memory_is_exact_and_goes_with_the_optimizer() -> None:
    runtime: Any = torch.cuda.cudart()
    gc.collect()
    before = dict(runtime.pinned)
    case = Case("adamw", dtype=BF16, master="fp32")
    _, offloaded = pair(case)
    take_step(0, case, offloaded)
    pinned = {key: size for key, size in runtime.pinned.items() if key not in before}
    needed = [tensor.nbytes for tensor in host_states(offloaded)]
    assert len(pinned) == 1
    assert sum(needed) <= sum(pinned.values()) <= sum(needed) + 256 * len(needed)
    one = host_states(offloaded)[0]
    del offloaded
    gc.collect()
    assert runtime.pinned.keys() - before.keys() == pinned.keys()  # a state is still there
    del one
    gc.collect()
    assert runtime.pinned.keys() == before.keys()


@pytest.mark.skipif(not gpu_ranks.EMULATED, reason="reads what the stand-in of CUDA has pinned")
def test_a_recording_counts_what_is_pinned() -> None:
    runtime: Any = torch.cuda.cudart()
    model = torch.nn.Linear(300, 200, device="cuda")
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.1, offload="pinned")
    with pycomm.memory.record(model, optimizer) as recording:
        model(torch.ones(2, 300, device="cuda")).sum().backward()
        optimizer.step()
    pinned = recording.peaks["step"].gauges["pinned"]
    assert pinned == sum(runtime.pinned.values()) > 8 * 300 * 200


def test_states_outlive_the_optimizer() -> None:
    """The last copies to the host may be under way when the device's slots are freed."""
    case = Case("adamw")
    beside, offloaded = pair(case)
    take_step(0, case, beside, offloaded)
    states = {number: offloaded.state[param] for number, param in enumerate(params_of(offloaded))}
    del offloaded
    gc.collect()
    poison()
    torch.cuda.synchronize()
    for number, param in enumerate(params_of(beside)):
        for name, tensor in states[number].items():
            assert raw(tensor) == raw(beside.state[param][name])


@pytest.mark.skipif(not gpu_ranks.EMULATED, reason="sets a limit in the stand-in of CUDA")
def test_too_little_memory_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed, and a later step succeeds."""
    case = Case("adamw")
    beside, offloaded = pair(case)
    before = [raw(param) for param in params_of(offloaded)]
    runtime: Any = torch.cuda.cudart()
    with monkeypatch.context() as limited:
        limited.setattr(type(runtime), "most_pinned", 1000)
        with pytest.raises(RuntimeError, match=r"cannot pin [\d,]+ bytes .* \(ulimit -l\)"):
            take_step(0, case, offloaded)
    assert [raw(param) for param in params_of(offloaded)] == before
    take_step(0, case, beside, offloaded)
    assert_same(beside, offloaded)


def test_a_failure_to_pin_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gives the error of a call to the next launch of a kernel, too."""
    failed: list[str] = []

    def register(*_: int) -> int:
        failed.append("out of memory")
        return 2

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if failed:
                raise RuntimeError(failed.pop())
            return func(*args, **(kwargs or {}))

    _, offloaded = pair(Case("adamw"))
    monkeypatch.setattr(_offload, "_runtime", lambda: SimpleNamespace(cudaHostRegister=register))
    with Launches():
        with pytest.raises(RuntimeError, match="cannot pin"):
            take_step(0, Case("adamw"), offloaded)
        torch.zeros(1, device="cuda")


@pytest.mark.usefixtures("on_host", "pieces")
@pytest.mark.parametrize("format", ["pycomm", "torch"])
def test_checkpoints_cross(format: str) -> None:  # noqa: A002
    """Both load what either has saved, through a file, and go on with the same bits."""
    case = Case("adamw", dtype=BF16, master="remainder", states="bf16")
    beside, offloaded = pair(case)
    for step in range(2):
        take_step(step, case, beside, offloaded)
    saved = []
    for optimizer in (beside, offloaded):
        on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict(format=format))
        file = io.BytesIO()
        torch.save(on_cpu, file)
        file.seek(0)
        saved.append(torch.load(file, weights_only=True))
    beside.load_state_dict(saved[1])
    offloaded.load_state_dict(saved[0])
    host_states(offloaded)
    for step in range(2, 4):
        take_step(step, case, beside, offloaded)
    assert_same(beside, offloaded)


@pytest.mark.parametrize("flat", [False, True], ids=("separate", "flat"))
@pytest.mark.parametrize("master", [None, "fp32"])
def test_loading_takes_the_device_memory_of_one_parameter(flat: bool, master: str | None) -> None:
    case = Case("adamw", dtype=BF16, master=master)
    params = moved(parameters(BF16, shapes=[(1 << 16,)] * 8))
    if flat:
        optim.flatten(params)
    optimizer = case.make(params, offload="pinned")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict())
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    optimizer.load_state_dict(saved)
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] <= before + (1 << 16)
    of_one = 32 * (1 << 16)  # its states, weights, and what conversions need
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] <= before + of_one


def test_states_that_come_one_by_one_share_blocks() -> None:
    """Each block is registered, and no copy goes through two."""
    params = moved(parameters(shapes=[(300,)] * 50))
    optimizer = Case("adamw").make(params, offload="pinned")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    (piece,) = optimizer._on_cuda._pieces  # type: ignore[union-attr]
    assert len(piece.ins) == len(piece.outs) == 1


def test_entries_of_a_program_stay_where_they_are() -> None:
    case = Case("adamw")
    beside, offloaded = pair(case)
    take_step(0, case, beside, offloaded)
    own = {"average": torch.ones(3, device="cuda"), "count": 3, "note": None}
    for param in params_of(offloaded):
        offloaded.state[param].update(own)
    take_step(1, case, beside, offloaded)
    for param in params_of(offloaded):
        assert all(offloaded.state[param].pop(name) is value for name, value in own.items())
    assert_same(beside, offloaded)


def test_states_that_a_program_has_put_elsewhere_come_back() -> None:
    case = Case("adamw")
    beside, offloaded = pair(case)
    take_step(0, case, beside, offloaded)
    for where, param in zip(("cpu", "cuda", "cpu"), params_of(offloaded), strict=False):
        state = offloaded.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(where, copy=True)
    take_step(1, case, beside, offloaded)
    assert_same(beside, offloaded)
    assert all(map(offloaded._offloaded._memory.holds, host_states(offloaded)))


@pytest.mark.hardware  # the stand-in of CUDA cannot copy parameters so
def test_a_copied_optimizer_goes_on() -> None:
    case = Case("adamw")
    beside, offloaded = pair(case)
    take_step(0, case, beside, offloaded)
    twin = copy.deepcopy(offloaded)
    assert twin.offload == "pinned"
    take_step(1, case, beside, offloaded, twin)
    assert_same(beside, twin)
    assert_same(beside, offloaded)


@pytest.mark.usefixtures("on_host")
def test_parameters_that_come_later() -> None:
    """Some have no gradient at first, and a group is added."""
    case = Case("lion")
    beside, offloaded = pair(case)
    for step, used in enumerate((2, 5, 7)):
        for optimizer in (beside, offloaded):
            take_step(step, case)  # nobody: it makes gradients for all
            params = params_of(optimizer)
            on_cpu = [param.detach().cpu() for param in params]
            grads = [grad.cuda() for grad in gradients(on_cpu, step)]
            for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = grad if number < used else None
            optimizer.step()
    for optimizer in (beside, offloaded):
        new = torch.nn.Parameter(torch.full((3000,), 0.5, device="cuda"))
        optimizer.add_param_group({"params": [new], "lr": 0.5})
        new.grad = torch.ones_like(new)
        optimizer.step()
    assert_same(beside, offloaded)


def test_a_first_group_without_parameters() -> None:
    optimizer = optim.FusedAdamW([{"params": []}], offload="pinned")
    optimizer.step()
    (param,) = moved(parameters(shapes=[(5,)]))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones_like(param)
    optimizer.step()
    host_states(optimizer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="moves a model between devices")
@pytest.mark.parametrize("loads", [False, True], ids=("moved", "moved and loaded"))
def test_states_follow_the_model_to_another_device(loads: bool) -> None:
    case = Case("adamw", dtype=BF16, master="fp32", states="8bit")
    beside, offloaded = pair(case)
    take_step(0, case, beside, offloaded)
    torch.cuda.synchronize()
    there = torch.device("cuda", 1)
    for optimizer in (beside, offloaded):
        for param in params_of(optimizer):
            param.data = param.data.to(there)
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
    with torch.cuda.device(there):
        for step in (1, 2):
            take_step(step, case, beside, offloaded)
        torch.cuda.synchronize()
    assert_same(beside, offloaded)
    assert {slot.device for slot in offloaded._offloaded._slots._slots} == {there}
    assert beside._on_cuda._device == offloaded._on_cuda._device == there


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_writes_to_parameters_between_steps(master: str) -> None:
    case = Case("adamw", dtype=BF16, master=master)
    beside, offloaded = pair(case)
    for step in range(3):
        take_step(step, case, beside, offloaded)
        for optimizer in (beside, offloaded):
            with torch.no_grad():
                params_of(optimizer)[1][:100].mul_(3)
            weights = optimizer.full_weights(params_of(optimizer)[2])
            optimizer.set_full_weights(params_of(optimizer)[2], weights * 0.5)
    assert_same(beside, offloaded)
    for one, other in zip(params_of(beside), params_of(offloaded), strict=True):
        assert raw(beside.full_weights(one)) == raw(offloaded.full_weights(other))


@pytest.mark.usefixtures("on_host")
def test_streams_take_turns() -> None:
    case = Case("adamw")
    beside, offloaded = pair(case)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(6):
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            take_step(step, case, offloaded)
        torch.cuda.current_stream().wait_stream(stream)
        take_step(step, case, beside)
    assert_same(beside, offloaded)


def test_parameters_on_the_cpu_are_left_alone() -> None:
    case = Case("adamw")
    params, twins = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    ours, theirs = case.make(params), case.make(twins, offload="pinned")
    for step in range(2):
        grads = gradients(params, step)
        for optimizer, of in ((ours, params), (theirs, twins)):
            set_gradients(of, grads)
            optimizer.step()
    assert_same(ours, theirs)


def test_what_is_refused() -> None:
    params = moved(parameters(shapes=SHAPES))
    with pytest.raises(ValueError, match="offload must be None or 'pinned', got 'cpu'"):
        optim.FusedAdamW(params, offload="cpu")
    with pytest.raises(ValueError, match="FusedLAMB takes no offload='pinned'"):
        optim.FusedLAMB(params, offload="pinned")
    optimizer = optim.FusedAdamW(params, offload="pinned")
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        optimizer.step()


def test_sharded_parameters_are_refused() -> None:
    def run(group: pycomm.Group) -> str:
        device = torch.device("cuda", group.rank)
        model = torch.nn.Linear(64, 64, device=device)
        wrapper = pycomm.DataParallel(model, group=group, shard="optimizer")
        optimizer = optim.FusedAdamW(wrapper.parameters(), offload="pinned")
        wrapper(torch.ones(2, 64, device=device)).sum().backward()
        with pytest.raises(ValueError, match="takes no sharded parameters") as error:
            optimizer.step()
        return str(error.value)

    with pycomm.LocalWorld(2) as world:
        assert len(world.run(run)) == 2
