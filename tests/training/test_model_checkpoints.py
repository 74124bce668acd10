"""Checkpoints of models: DistributedDataParallel's, and torch.distributed.checkpoint's."""

import ddp
import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
import wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import pycomm


class Net(nn.Module):
    """Parameters and buffers at every depth, one of them twice, and a child of any name."""

    def __init__(self, child="inner", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("offset", torch.rand(1))
        self.first = nn.Linear(40, 40)
        self.add_module(child, nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)))
        self._child = child
        self.get_submodule(child)[0].bias = self.first.bias

    def forward(self, x):
        return self.scale * self.get_submodule(self._child)(self.first(x)) + self.offset


def names_of(_group):
    model, net = pycomm.DataParallel(Net()), Net()
    assert [*model.state_dict()] == [*net.state_dict()]
    for kind in ("named_parameters", "named_buffers"):
        assert [*dict(getattr(model, kind)())] == [*dict(getattr(net, kind)())]
        assert [*dict(getattr(model, kind)("a."))] == [*dict(getattr(net, kind)("a."))]
        assert not [*getattr(model, kind)(recurse=False)]


def test_names_are_the_modules_own():
    helpers.run_group(1, names_of)


class Parent(nn.Module):
    """Has the wrapped model for a child."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def of_ddp(_group, child):
    """DDP's checkpoints load into a wrapper, alone or as part of a model, by either names."""
    saved = DistributedDataParallel(Net(child, seed=1)).state_dict()
    assert all(name.startswith("module.") for name in saved)
    plain = {name.removeprefix("module."): value for name, value in saved.items()}
    for state_dict in (saved, plain):
        model = pycomm.DataParallel(Net(child))
        assert str(model.load_state_dict(state_dict)) == "<All keys matched successfully>"
        assert wrapped.same(dict(model.state_dict()), plain)
        parent = Parent(pycomm.DataParallel(Net(child)))
        parent.load_state_dict({f"model.{name}": value for name, value in state_dict.items()})
        assert wrapped.same(dict(parent.model.state_dict()), plain)
    assert all(name.startswith("module.") for name in saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.scale": saved["module.scale"]})


@pytest.mark.parametrize("child", ["inner", "module"])
def test_checkpoints_of_ddp_are_loaded(child):
    helpers.run_group(1, of_ddp, child)


def trained(wrap, seed):
    model = wrap(Net(seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(ddp.batch(0, step)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def flat(optimizer):
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def by_torch(_group, folder):
    """Model and optimizer, through files, to models under the wrapper and under DDP."""
    source = trained(pycomm.DataParallel, 0)
    model_state, optimizer_state = get_state_dict(*source)
    assert [*model_state] == [*Net().state_dict()]
    assert {*optimizer_state["state"]} == {*dict(Net().named_parameters())}
    of_ddp = get_state_dict(*trained(DistributedDataParallel, 0))
    assert [*of_ddp[0]] == [*model_state]
    assert of_ddp[1]["state"].keys() == optimizer_state["state"].keys()
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    for wrap in (pycomm.DataParallel, DistributedDataParallel):
        target = trained(wrap, 1)
        assert not torch.equal(next(target[0].parameters()), next(source[0].parameters()))
        model_state, optimizer_state = get_state_dict(*target)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            *target,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        got = [getattr(target[0], "module", target[0]).state_dict(), flat(target[1])]
        assert wrapped.same(dict(got[0]), dict(source[0].state_dict()))
        assert wrapped.same(got[1], flat(source[1]))


def test_distributed_checkpoints(tmp_path):
    helpers.run_group(2, by_torch, tmp_path)


def full(group):
    """From rank 0 to all."""
    options = {"full_state_dict": True, "cpu_offload": True}
    model = pycomm.DataParallel(Net(seed=1))
    state = get_model_state_dict(model, options=StateDictOptions(**options))
    assert [*state] == ([*Net().state_dict()] if group.rank == 0 else [])
    target = pycomm.DataParallel(Net())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, state, options=options)
    assert wrapped.same(dict(target.state_dict()), dict(model.state_dict()))


def test_full_state_dicts():
    helpers.run_group(2, full)


def nested(_group):
    model = Parent(pycomm.DataParallel(Net(seed=1)))
    state = get_model_state_dict(model)
    assert [*state] == [f"model.{name}" for name in Net().state_dict()]
    target = Parent(pycomm.DataParallel(Net()))
    set_model_state_dict(target, state)
    assert wrapped.same(dict(target.state_dict()), dict(model.state_dict()))


def test_distributed_checkpoints_of_a_model_with_a_wrapped_part():
    helpers.run_group(1, nested)
