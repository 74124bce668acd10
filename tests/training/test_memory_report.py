"""The memory report: its counts and its output."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import pycomm
import pycomm.optim as optim
from pycomm.memory import plot_reports


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 0, 2, 0, 8]),
        ({"master_weights": "fp32"}, [2, 0, 2, 4, 8]),
        ({"master_weights": "remainder", "states": "bf16"}, [2, 0, 2, 2, 4]),
        ({"master_weights": "remainder", "states": "8bit"}, [2, 0, 2, 2, 2 + 8 / 256]),
    ],
)
def test_memory_report(options, expected, tmp_path):
    model = torch.nn.Linear(256, 64, bias=False).bfloat16()
    optimizer = optim.FusedAdamW(model.parameters(), **options)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    residual = torch.zeros(64, 256)
    report = pycomm.memory_report(model, optimizer, [residual])
    found = [report.per_parameter(kind) for kind in report.bytes]
    step = 4 / model.weight.numel()
    assert found == pytest.approx([*expected[:4], expected[4] + step, 4])
    assert report.total == sum(report.bytes.values())
    assert str(report).splitlines()[-1].split()[0] == "total"
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_memory_report_of_a_wrapper(world):
    (group,) = world(1, staging_bytes=1 << 20)
    module = nn.Linear(256, 256, bias=False)
    model = pycomm.DataParallel(module, group=group, compression=pycomm.TopK(0.1, momentum=0.5))
    optimizer = optim.FusedAdamW(model.parameters())
    count = module.weight.numel()
    expected = {
        "parameters": 4 * count,
        "buffers": 0,
        "gradients": 4 * count,
        "master weights": 0,
        "states": 0,
        "communication": 2 * 4 * count + (1 << 20),  # residuals and velocities
    }
    assert pycomm.memory_report(model, optimizer).bytes == expected
    step = model(torch.ones(2, 256)).sum()
    step.backward()
    optimizer.step()
    expected["states"] = 8 * count + 4
    assert pycomm.memory_report(nn.Sequential(model), optimizer).bytes == expected
    optim.flatten(model.parameters())
    optimizer.zero_grad()
    assert pycomm.memory_report(model, optimizer).bytes == expected
    extra = pycomm.memory_report(model, optimizer, model.comm_state.tensors())
    assert extra.bytes == expected


def test_memory_report_counts_buffers_of_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    report = pycomm.memory_report(model, torch.optim.SGD(model.parameters()))
    assert report.bytes["buffers"] == 2 * 8 * 4 + 8  # mean, variance and a counter


def test_memory_report_of_a_history():
    """LBFGS keeps lists of tensors."""
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=10)

    def closure():
        optimizer.zero_grad()
        loss = (model.weight - torch.linspace(-1, 1, 1000)).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[model.weight]
    history = len(state["old_dirs"]) + len(state["old_stps"])
    assert history >= 10
    assert pycomm.memory_report(model, optimizer).per_parameter("states") > 4 * (history + 1)


def test_memory_report_of_an_optimizer_in_another():
    """As torch's ZeroRedundancyOptimizer, and wrappers of it, keep theirs."""
    model = nn.Linear(64, 64, bias=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    assert pycomm.memory_report(model, optimizer).per_parameter("states") == 8 + 4 / 64**2


REMAINDER_8BIT = {"master_weights": "remainder", "states": "8bit"}


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "options", "item", "states"),
    [
        (torch.float32, {}, 4, 8),
        (torch.bfloat16, REMAINDER_8BIT, 2, 2 + 2 * (1 + 4 / 256)),
    ],
)
def test_memory_report_of_shards(shard, ranks, dtype, options, item, states):
    """Each rank holds p + g + K/n bytes per parameter, or p + (g + K)/n and three buckets."""

    def report(group):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 1024)) for _ in range(4)]
        net = nn.Sequential(*layers).to(dtype)
        model = pycomm.DataParallel(net, group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), max_norm=1.0, **options)
        model(torch.ones(2, 1024, dtype=dtype)).sum().backward()
        optimizer.step()
        return pycomm.memory_report(model, optimizer), group.staging_bytes

    gradients = item if shard == "optimizer" else item / ranks
    expected = item + gradients + states / ranks
    with pycomm.LocalWorld(ranks) as world:
        reports = world.run(report)
    for found, staging in reports:
        assert found.per_parameter("parameters") == pytest.approx(item, rel=0.005)
        assert found.per_parameter("gradients") == pytest.approx(gradients, rel=0.02)
        slots = 3 * max(2**20, found.bytes["parameters"] / 16) if shard == "gradients" else 0
        others = found.bytes["communication"] - staging - slots
        assert 0 <= others <= 0.02 * found.bytes["parameters"]
        held = found.total - found.bytes["communication"]
        assert held / found.elements == pytest.approx(expected, rel=0.02)
        assert found.formula.per_parameter == pytest.approx(expected, rel=0.02)
        assert found.formula.ranks == ranks
        assert f"/{ranks} = " in str(found).splitlines()[-1]


def test_memory_report_without_shards_has_no_formula():
    model = nn.Linear(8, 8)
    report = pycomm.memory_report(model, torch.optim.SGD(model.parameters()))
    assert report.formula is None
    assert "K/n" not in str(report)


def test_reports_side_by_side(tmp_path):
    model = nn.Linear(8, 8)
    report = pycomm.memory_report(model, torch.optim.SGD(model.parameters()))
    plot_reports({"one": report, "another": report}, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
