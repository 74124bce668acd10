"""Flattened and sharded models, saved and shared with what others use."""

import copy
import io
import multiprocessing
import os
import threading
import traceback

import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from wrapping import data_parallel

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


def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_copy(model):
    """The optimizer, and what is to be found in a checkpoint after a step."""
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return optimizer, {key: value.tolist() for key, value in model.state_dict().items()}


def in_lists(state):
    return {key: value.tolist() for key, value in state.items()}


def loaded(folder):
    """The values that torch.distributed.checkpoint has saved of a model."""
    state = make_model().state_dict()
    dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
    return in_lists(state)


@each_model
def test_distributed_checkpoints(world, make, tmp_path):
    (group,) = world(1)
    model = make(group)
    _, expected = train_and_copy(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    assert loaded(tmp_path) == expected


class Late(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, folder):
        super().__init__(folder)
        self.may_write = threading.Event()

    def write_data(self, *args):
        assert self.may_write.wait(60)
        return super().write_data(*args)


@each_model
def test_asynchronous_distributed_checkpoints(world, make, tmp_path):
    """They have the model at the call, although they are written after later steps."""
    (group,) = world(1)
    model, writer = make(group), Late(tmp_path)
    optimizer, expected = train_and_copy(model)
    saving = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, no_dist=True)
    train(model, optimizer, 2)
    writer.may_write.set()
    saving.result()
    assert loaded(tmp_path) == expected
    assert in_lists(model.state_dict()) != expected


def save_in_a_process(rank, size, store, shard):
    multiprocessing.current_process()._config["daemon"] = False  # it has a child
    folder = f"{store}.checkpoint"
    helpers.join_world(rank, size, store)
    model = pycomm.DataParallel(make_model(), group=pycomm.init(timeout=60), shard=shard)
    optimizer, expected = train_and_copy(model)
    kind = AsyncCheckpointerType.PROCESS
    saving = dcp.async_save(
        {"model": model.state_dict()}, checkpoint_id=folder, async_checkpointer_type=kind
    )
    train(model, optimizer, 2)
    saving.result()
    return loaded(folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_distributed_checkpoints_that_a_process_writes(shard):
    assert helpers.run_ranks(2, save_in_a_process, shard) == [True] * 2


def save_and_scribble(model, optimizer, file):
    torch.save([model.state_dict(), list(optimizer.state.values())], file)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.fill_(7)
    for parameter in model.parameters():
        parameter.detach().fill_(7)
        if parameter.grad is not None:
            parameter.grad.fill_(7)


class Saving:
    """A forked child that saves when it is told to, and then writes to all that it has."""

    def __init__(self, model, optimizer, file):
        ready, self._ready = os.pipe()
        self._file, self._pid = file, os.fork()
        if self._pid > 0:
            os.close(ready)
            return
        code = 1
        try:
            os.close(self._ready)
            os.read(ready, 1)
            save_and_scribble(model, optimizer, file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def result(self):
        os.close(self._ready)
        assert os.waitpid(self._pid, 0)[1] == 0
        model, states = torch.load(self._file)
        return in_lists(model), list(map(in_lists, states))


def save_in_forks(rank, size, store, options):
    """Saves two steps late; returns what trainings with and without forks have in the end."""
    helpers.join_world(rank, size, store)
    group, ends = pycomm.init(timeout=60), []
    for forks in (True, False):
        model = flattened(group)
        if options is not None:
            model = data_parallel(make_model(), group=group, **options)
        optimizer, expected = train_and_copy(model)
        states = list(map(in_lists, optimizer.state.values()))
        saving = Saving(model, optimizer, f"{store}.{rank}") if forks else None
        train(model, optimizer, 2)
        assert in_lists(model.state_dict()) != expected
        if saving is not None:
            assert saving.result() == (expected, states)
        train(model, optimizer)
        ends.append((in_lists(model.state_dict()), list(map(in_lists, optimizer.state.values()))))
    return ends


@pytest.mark.parametrize(
    "options",
    [None, {}, *({"shard": shard} for shard in SHARDS), {"shard": "optimizer", "replicas": 2}],
    ids=["flat", "wrapped", *SHARDS, "replicas"],
)
def test_a_forked_writer_has_the_model_and_the_states_at_the_fork(options):
    """Its own writes do not reach its parent."""
    for forking, other in helpers.run_ranks(2, save_in_forks, options):
        assert forking == other


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
