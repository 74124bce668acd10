"""Flattened and sharded models, saved and shared with what others use."""

import copy
import io

import pytest
import torch
from torch import nn

import pycomm
from pycomm import optim

SHARDS = ("optimizer", "gradients")


def make_model():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 40), nn.Linear(40, 4)).bfloat16()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def flattened(_group):
    model = make_model()
    optim.flatten(model.parameters())
    return model


def sharded(shard):
    def make(group):
        return pycomm.DataParallel(make_model(), group=group, shard=shard)

    return make


MODELS = {"flat": flattened} | {shard: sharded(shard) for shard in SHARDS}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def size_of(thing):
    written = io.BytesIO()
    torch.save(thing, written)
    return written.tell()


@each_model
def test_a_part_is_saved_without_the_rest(world, make):
    (group,) = world(1)
    model, alone = make(group), make_model()
    bias = model.state_dict()["2.bias"]
    assert bias.untyped_storage().nbytes() == bias.nbytes
    assert size_of({"bias": bias}) == size_of({"bias": alone[2].bias.detach()})
    assert size_of(model.state_dict()) < size_of(alone.state_dict()) + 2000


@each_model
def test_copies_of_a_state_dict_are_as_large_as_the_model(world, make):
    (group,) = world(1)
    state = copy.deepcopy(make(group).state_dict())
    storages = {value.untyped_storage().data_ptr(): value for value in state.values()}
    held = sum(value.untyped_storage().nbytes() for value in storages.values())
    assert held == sum(parameter.nbytes for parameter in make_model().parameters())


@each_model
def test_safetensors(world, make, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    (group,) = world(1)
    model = make(group)
    safetensors.save_file(model.state_dict(), tmp_path / "dict")
    safetensors.save_model(getattr(model, "module", model), tmp_path / "model")
    for name in ("dict", "model"):
        saved = safetensors.load_file(tmp_path / name)
        for key, value in make_model().state_dict().items():
            assert torch.equal(saved[key], value), (name, key)


@each_model
def test_accelerate(world, make, tmp_path):
    """It left out all tensors of a storage but one, with a warning."""
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    (group,) = world(1)
    accelerate.Accelerator(cpu=True).save_model(make(group), str(tmp_path))
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {key: value.tolist() for key, value in saved.items()} == {
        key: value.tolist() for key, value in make_model().state_dict().items()
    }


@pytest.mark.parametrize("shard", SHARDS)
def test_a_parameter_that_left_the_memory_is_named_on_all_ranks(world, shard):
    """As by share_memory() or a multiprocessing queue."""

    def body(group):
        model = pycomm.DataParallel(make_model(), group=group, shard=shard)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        batch = torch.ones(2, 8, dtype=torch.bfloat16)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if group.rank == 1:
            model.module[1].weight.share_memory_()
        named = r"\(here 1\.weight\) " if group.rank == 1 else ""
        with pytest.raises(RuntimeError, match=rf"on ranks \[1\] of 2 {named}have left the memory"):
            model(batch).sum().backward()
        pycomm.all_reduce(torch.ones(1), group=group)  # the group lives

    world(2).run(body)
