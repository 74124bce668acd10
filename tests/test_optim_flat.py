"""Flat buffers change where things lie and nothing else; the memory report counts them."""

import copy

import golden
import pytest
import torch
from optimizing import gradients

import pycomm
import pycomm.optim as optim


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(70, 100), torch.nn.Linear(100, 65, bias=False)]
    model = torch.nn.Sequential(*layers).bfloat16()
    return model.append(torch.nn.LayerNorm(65))  # fp32


def test_steps_over_flat_buffers_give_the_same_bits():
    plain, flat = network(), network()
    buffers = optim.flatten(flat.parameters())
    made = []
    for model in (plain, flat):
        optimizer = optim.FusedAdamW(model.parameters(), states="8bit", master_weights="remainder")
        for step in range(3):
            params = list(model.parameters())
            for param, grad in zip(params, gradients(params, step), strict=True):
                if model is flat:
                    param.grad.copy_(grad)
                else:
                    param.grad = grad
            optimizer.step()
        made.append(optimizer)
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert golden.same_bits(one, other)
        ours, theirs = made[0].state[one], made[1].state[other]
        assert all(golden.same_bits(ours[key], theirs[key]) for key in ours)
        base = buffers.parameters[other.dtype].data_ptr()
        offset = (other.data_ptr() - base) // other.element_size()
        assert other.grad.data_ptr() == buffers.gradients[other.dtype][offset:].data_ptr()
        assert theirs["exp_avg"].storage_offset() == offset
    loaded = optim.FusedAdamW(flat.parameters(), states="8bit", master_weights="remainder")
    loaded.load_state_dict(copy.deepcopy(made[1].state_dict()))
    for param in flat.parameters():
        for key, tensor in made[1].state[param].items():
            again = loaded.state[param][key]
            assert golden.same_bits(again, tensor)
            assert key == "step" or again.data_ptr() != tensor.data_ptr()
            assert again.storage_offset() == tensor.storage_offset()


def test_model_and_gradients_follow_the_buffers():
    model = network()
    before = copy.deepcopy(model.state_dict())
    flat = optim.flatten(model.parameters())
    assert 0 < flat.padding < 0.01
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    flat.parameters[torch.float32].zero_()
    assert not model[2].weight.any()
    flat.zero_grad()
    model[2](model[1](model[0](torch.ones(1, 70).bfloat16())).float()).sum().backward()
    assert flat.gradients[torch.float32].any()
    model.zero_grad(set_to_none=True)
    flat.zero_grad()
    assert not flat.gradients[torch.float32].any()
    assert model[2].bias.grad.untyped_storage().data_ptr() == (
        flat.gradients[torch.float32].untyped_storage().data_ptr()
    )
    with pytest.raises(ValueError, match="has been flattened before"):
        optim.flatten(model.parameters())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 2, 0, 8]),
        ({"master_weights": "fp32"}, [2, 2, 4, 8]),
        ({"master_weights": "remainder", "states": "bf16"}, [2, 2, 2, 4]),
        ({"master_weights": "remainder", "states": "8bit"}, [2, 2, 2, 2 + 8 / 256]),
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
    assert found == pytest.approx([*expected[:3], expected[3] + step, 4])
    assert report.total == sum(report.bytes.values())
    assert str(report).splitlines()[-1].split()[0] == "total"
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000
