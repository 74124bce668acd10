"""Checkpoints of models: DistributedDataParallel's, and torch.distributed.checkpoint's."""

import copy
import pickle

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


class Parent(nn.Module):
    """Has the wrapped model for a child."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def names(model):
    """All names that a module tells."""
    return {
        "states": [*model.state_dict()],
        "modules": [name for name, _ in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
        **{
            f"{kind}, {recurse}": [name for name, _ in getattr(model, kind)("a", recurse=recurse)]
            for kind in ("named_parameters", "named_buffers")
            for recurse in (True, False)
        },
    }


def decayed(model):
    """The rule of minGPT: weights of some kinds of modules decay."""
    return {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
        if own == "weight" and isinstance(module, nn.Linear)
    }


def placed(where, model):
    """The model, alone or as part of another one, or a copy."""
    changed = {
        "alone": lambda: model,
        "part": lambda: Parent(model),
        "copied": lambda: copy.deepcopy(model),
        "copied part": lambda: copy.deepcopy(Parent(model)),
        "pickled": lambda: pickle.loads(pickle.dumps(model)),
    }
    return changed[where]()


def has_names_of_its_own(group, where):
    model = placed(where, pycomm.DataParallel(Net(), group=group))
    plain = placed(where, Net())
    assert names(model) == names(plain)
    assert decayed(model) == decayed(plain) != set()
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    for name, module in model.named_modules():
        assert model.get_submodule(name) is module
    wrapper = getattr(model, "model", model)
    for (_, one), (_, other) in zip(
        wrapper.named_parameters(), wrapper.module.named_parameters(), strict=True
    ):
        assert one is other


@pytest.mark.parametrize("where", ["alone", "part", "copied", "copied part", "pickled"])
def test_names_are_the_modules_own(where):
    with pycomm.LocalWorld(1) as ranks:
        ranks.run(has_names_of_its_own, where)


@pytest.mark.parametrize("where", ["alone", "part"])
def test_functional_calls(where):
    """Parameters given by name are used, and do not stay."""

    def body(group):
        model = placed(where, pycomm.DataParallel(Net(), group=group)).eval()
        plain = placed(where, Net()).eval()
        other = placed(where, Net(seed=5)).eval()
        given = {name: p.detach() for name, p in other.named_parameters()}
        given |= {name: b.clone() for name, b in other.named_buffers()}
        x = ddp.batch(0, 0)
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(model, given, x), other(x))
            assert torch.equal(model(x), plain(x))

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("where", ["alone", "part"])
def test_exported_names(where):
    def body(group):
        model = placed(where, pycomm.DataParallel(Net(), group=group)).eval()
        with torch.no_grad():
            program = torch.export.export(model, (ddp.batch(0, 0),), strict=False)
        assert {*program.state_dict} == {*placed(where, Net()).state_dict()}

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


class Frozen(nn.Sequential):
    """Keeps its statistics, and counts what is called."""

    calls = 0

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self

    def _apply(self, *args, **kwargs):
        self.calls += 1
        return super()._apply(*args, **kwargs)


def test_what_a_module_overrides_is_called():
    def body(group):
        model = pycomm.DataParallel(Frozen(nn.Linear(2, 3), nn.BatchNorm1d(3)), group=group)
        assert model.training
        assert model.train() is model
        assert (model.module.training, *(m.training for m in model.children())) == (
            True,
            True,
            False,
        )
        assert model.eval() is model
        assert not any(each.training for each in (model, model.module, model.module[0]))
        assert model.double() is model
        assert model.module.calls == 1
        assert (
            model.module[0].weight.dtype == model.get_parameter("0.weight").dtype == torch.float64
        )
        seen = []
        assert model.apply(seen.append) is model
        assert seen == [*model.module.children(), model.module]
        for module in model.modules():
            module.training = True
        assert model.module.training
        model.module.eval()
        assert not model.training
        model.compile()
        assert pickle.loads(pickle.dumps(model)).module.training is False

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


def test_new_children_are_the_modules():
    def body(group):
        model = pycomm.DataParallel(nn.Sequential(nn.Linear(2, 3)), group=group)
        model.add_module("1", nn.ReLU())
        assert len(model.module) == 2
        model.module[1] = nn.Tanh()
        assert isinstance(model.get_submodule("1"), nn.Tanh)
        model.module.append(nn.Linear(3, 3))
        del model.module[1]
        assert names(model) == names(model.module)
        model.module = nn.Sequential(nn.Linear(5, 2))
        assert model.get_parameter("0.weight").shape == (2, 5)
        with pytest.raises(ValueError, match="wrapped with"):
            model(torch.ones(1, 5))

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


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


def test_hooks_after_loading_are_called():
    """The module's own, also where a model loads all its parts."""

    def body(group):
        called = []
        module = nn.Linear(2, 2)
        module.register_load_state_dict_post_hook(lambda own, _keys: called.append(own))
        parent = Parent(pycomm.DataParallel(module, group=group))
        parent.load_state_dict(parent.state_dict())
        parent.model.load_state_dict(parent.model.state_dict())
        assert called == [module, module]

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


def test_distributed_checkpoints_of_a_child_named_module():
    def body(group):
        model = pycomm.DataParallel(Net("module"), group=group)
        assert {*get_model_state_dict(model)} == {*Net("module").state_dict()}

    with pycomm.LocalWorld(1) as ranks:
        ranks.run(body)


def nested(_group):
    source = trained(lambda net: Parent(pycomm.DataParallel(net)), 1)
    model_state, optimizer_state = get_state_dict(*source)
    assert [*model_state] == [f"model.{name}" for name in Net().state_dict()]
    assert {*optimizer_state["state"]} == {f"model.{name}" for name, _ in Net().named_parameters()}
    target = trained(lambda net: Parent(pycomm.DataParallel(net)), 0)
    assert not torch.equal(target[0].model.module.scale, source[0].model.module.scale)
    set_state_dict(*target, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert wrapped.same(dict(target[0].state_dict()), dict(source[0].state_dict()))
    assert wrapped.same(flat(target[1]), flat(source[1]))


def test_distributed_checkpoints_of_a_model_with_a_wrapped_part():
    helpers.run_group(1, nested)
