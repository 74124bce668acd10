"""accelerate saves and loads residuals, and whole models of divided states."""

import sys
from pathlib import Path

import golden
import helpers
import pytest
import torch

import pycomm
from pycomm import optim
from pycomm.integrations.accelerate import Gathered

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parents[2] / "examples/frameworks"))


def resumed(rank, size, store):
    from with_accelerate import train

    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    whole = train(f"{store}.whole", 0, 8)
    train(f"{store}.half", 0, 4)
    return whole, train(f"{store}.half", 4, 8)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped():
    (whole, rest), (other, _) = helpers.run_ranks(2, resumed)
    assert golden.same_bits(whole, other)
    assert golden.same_bits(whole, rest)


def saved_shards(rank, size, store):
    """A model that accelerate has saved, with its optimizer, after a step with divided states."""
    import accelerate
    from safetensors.torch import load_file

    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    accelerator = accelerate.Accelerator(cpu=True)
    model = pycomm.DataParallel(torch.nn.Linear(64, 80), shard="optimizer")
    optimizer = accelerator.prepare(optim.FusedAdamW(model.parameters(), lr=0.1))
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    accelerator.backward(model(torch.full((4, 64), rank + 1.0)).square().mean())
    optimizer.step()
    accelerator.save_model(model, f"{store}.model")
    accelerator.save_state(f"{store}.state")
    accelerator.wait_for_everyone()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    saved = load_file(f"{store}.model/model.safetensors")
    moments = [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(f"{store}.state")
    loaded = [parameter.detach().clone() for parameter in model.parameters()]
    again = [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
    return [expected, list(saved.values()), loaded], [moments, again]


def test_models_with_divided_states_are_saved_whole():
    for models, moments in helpers.run_ranks(2, saved_shards):
        by_size = [sorted(model, key=torch.Tensor.numel) for model in models]
        for one in by_size[1:]:
            assert all(golden.same_bits(a, b) for a, b in zip(by_size[0], one, strict=True))
        assert [moment.shape for moment in moments[0]] == [(80, 64), (80,)]
        assert all(golden.same_bits(a, b) for a, b in zip(*moments, strict=True))


def test_only_states_are_gathered():
    with pytest.raises(TypeError, match=r"state must be a state of pycomm\.hooks, got 3"):
        Gathered(3)
