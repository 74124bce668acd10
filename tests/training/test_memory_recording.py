"""The recording of peaks in each phase of a step, against allocations that others have counted."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import pycomm
import pycomm.optim as optim
from pycomm import memory

PHASES = ("forward", "backward", "step", "other")
WIDTH = 256


class Net(nn.Module):
    """Two blocks, whose second one may compute its activations twice."""

    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.blocks[0](x)
        last = self.blocks[1]
        return checkpoint(last, x, use_reentrant=False) if self.recomputes else last(x)


def run_step(model, optimizer, batch, note=lambda _: None):
    """A step that notes when a phase begins."""
    note("forward")
    loss = model(torch.ones(batch, WIDTH)).square().mean()
    note("backward")
    loss.backward()
    note("step")
    optimizer.step()
    note("other")
    optimizer.zero_grad()


def allocations(model, optimizer, batch):
    """The most bytes that torch's profiler sees allocated in each phase, since the beginning."""
    names = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:

        def note(phase):
            names.append(phase)
            with record_function(f"phase {phase}"):
                pass

        run_step(model, optimizer, batch, note)
    events = profiler.profiler.kineto_results.events()
    held, phase, peaks = 0, None, {}
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name().startswith("phase "):
            phase = event.name().removeprefix("phase ")
            peaks[phase] = held
        elif event.name() == "[memory]":
            held += event.nbytes()
            peaks[phase] = max(peaks[phase], held)
    return peaks


@pytest.mark.parametrize("recomputes", [False, True])
def test_peaks_are_those_of_the_allocator(recomputes):
    model = Net(recomputes)
    optimizer = torch.optim.AdamW(model.parameters())
    run_step(model, optimizer, 512)  # makes the states
    before = memory.report(model, optimizer).total
    expected = allocations(model, optimizer, 512)
    with memory.record(model, optimizer) as recording:
        run_step(model, optimizer, 512)
    for phase in PHASES:
        found = recording.peaks[phase].total - before
        if phase == "backward":
            found = max(found, recording.peaks["exchange"].total - before)
        assert found == pytest.approx(expected[phase], rel=0.01, abs=2048), phase
    assert expected["backward"] > expected["step"] > 0
    assert recording.steps == 1


def test_kinds_of_a_wrapper():
    """Bytes per element by definition: bf16, 16-bit remainders, two fp32 states, and residuals."""

    def body(group):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).bfloat16()
        model = pycomm.DataParallel(net, group=group, compression=pycomm.Int8())
        optimizer = optim.FusedAdamW(model.parameters(), master_weights="remainder")
        x = torch.ones(64, WIDTH, dtype=torch.bfloat16)
        with memory.record(model, optimizer) as recording:
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
        shown = group.report().ranks[group.rank].memory
        assert shown == {phase: peak.total for phase, peak in recording.peaks.items()}
        assert group.stats().memory == recording.peaks
        return recording, group.staging_bytes

    elements = 3 * WIDTH * WIDTH
    with pycomm.LocalWorld(2) as world:
        results = world.run(body)
    for rank, (recording, staging) in enumerate(results):
        assert recording.steps == 2
        assert {peak.rank for peak in recording.peaks.values()} == {rank}
        for phase in ("forward", "backward", "exchange", "step"):
            expected = {
                "parameters": 2 * elements,
                "buffers": 0,
                "gradients": 2 * elements,
                "master weights": 2 * elements,
                "states": 8 * elements,
                "communication": 4 * elements + staging,
            }
            found = dict(recording.peaks[phase].bytes)
            assert found.pop("activations") < 16 * 64 * WIDTH
            assert found == pytest.approx(expected, rel=0.01), phase
        layers = 64 * WIDTH * 2  # each layer's output; the input was there before
        assert recording.peaks["forward"].bytes["activations"] == pytest.approx(
            3 * layers, rel=0.01
        )


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_shards_come_with_their_formula(shard):
    def body(group):
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]
        model = pycomm.DataParallel(nn.Sequential(*layers), group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters())
        with memory.record(model, optimizer) as recording:
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
        return recording

    with pycomm.LocalWorld(2) as world:
        recording = world.run(body)[0]
    gradients = 4 if shard == "optimizer" else 2
    peak, elements = recording.peaks["step"], recording.report.elements
    assert peak.bytes["parameters"] == pytest.approx(4 * elements, rel=0.01)
    assert peak.bytes["gradients"] == pytest.approx(gradients * elements, rel=0.02)
    assert peak.bytes["states"] == pytest.approx(4 * elements, rel=0.02)
    *_, last = str(recording).splitlines()
    expected, measured = last.split("; measured: ")
    assert f"= {8 + gradients} bytes per parameter" in expected
    assert float(measured) == pytest.approx(8 + gradients, rel=0.02)


def test_the_largest_peaks_of_all_ranks():
    def body(group):
        model = pycomm.DataParallel(Net(recomputes=False), group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        with memory.record(model, optimizer) as recording:
            run_step(model, optimizer, [64, 256, 128][group.rank])
        return recording, recording.over_ranks(group)

    with pycomm.LocalWorld(3) as world:
        own, largest = zip(*world.run(body), strict=True)
    assert largest[0].peaks == largest[1].peaks == largest[2].peaks
    for phase in ("forward", "backward"):
        assert largest[0].peaks[phase].rank == 1
        assert largest[0].peaks[phase] == own[1].peaks[phase]
        row = next(line for line in str(largest[0]).splitlines() if line.startswith(phase))
        assert row.split()[-1] == "1"


def test_a_recording_that_an_exception_ends(caplog):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    hook = model.register_forward_hook(lambda *_: torch.empty(1 << 60))
    with (
        pytest.raises(RuntimeError, match="allocate"),
        memory.record(model, optimizer) as recording,
    ):
        run_step(model, optimizer, 16)
    assert recording.ended_in == "forward"
    assert recording.peaks["forward"].bytes["activations"] == 2 * 4 * 16 * WIDTH
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("pycomm.memory", logging.ERROR)
    assert told.getMessage() == str(recording)
    assert "in this phase: forward" in str(recording)
    assert len(model._forward_pre_hooks) == 0
    assert model.weight._backward_hooks in (None, {})
    hook.remove()
    run_step(model, optimizer, 16)
    assert recording.steps == 0


def test_the_state_of_a_hook():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Linear(WIDTH, WIDTH, bias=False)
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        state = pycomm.hooks.Int8State(model.named_parameters())
        state.register(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with memory.record(model, optimizer, state) as recording:
            run_step(model, optimizer, 16)
        staging = state.group.staging_bytes
        state.group.close()
    finally:
        dist.destroy_process_group()
    residual = 4 * WIDTH * WIDTH
    assert recording.peaks["step"].bytes["communication"] == pytest.approx(residual + staging)


def test_the_resident_memory_of_a_phase():
    """A peak that is gone at the phase's end belongs to this phase alone."""
    model, size = nn.Linear(4, 4), 64 << 20
    optimizer = torch.optim.SGD(model.parameters())
    model.register_forward_hook(lambda *_: torch.ones(size, dtype=torch.uint8).sum() and None)
    with memory.record(model, optimizer) as recording:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    resident = {phase: peak.gauges["resident"] for phase, peak in recording.peaks.items()}
    assert resident["forward"] - resident["step"] > size // 2
    assert recording.peaks["forward"].bytes["activations"] >= size


def test_the_model_must_lie_on_one_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters())
    recording = memory.record(model, optimizer)
    with (
        pytest.raises(ValueError, match=r"model must have .* one device, got cpu, meta"),
        recording,
    ):
        pass


def test_the_report_has_its_old_name_too():
    assert pycomm.memory_report is memory.report
    assert pycomm.memory is memory


def test_a_compiled_model_is_compiled_in_a_recording():
    """Otherwise torch would never compile a function that has first run in a recording."""
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    fast = torch.compile(model, backend=backend)
    with memory.record(fast, optimizer) as recording:
        fast(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert len(compiled) == 1
    assert recording.peaks["step"].bytes["gradients"] == 80
