"""The lifetime of flat buffers, and errors if there is no memory for them."""

import gc
import weakref

import ddp
import pytest
import torch
import wrapped

import pycomm
import pycomm.optim as optim
from pycomm._training.flat import home_of

STATES = ("exp_avg", "exp_avg_sq")


def pieces_of_a_model():
    """Weak references to the pieces of a model that has made a step and is gone."""
    model = ddp.network()
    flat = optim.flatten(model.parameters())
    optimizer = optim.FusedAdamW(model.parameters())
    wrapped.batch_loss(model, 0, 0).backward()
    optimizer.step()
    pieces = [weakref.ref(home_of(p).piece) for p in model.parameters()]
    del flat
    return pieces


def test_buffers_die_with_their_parameters():
    """The memory is freed at once: no reference cycle waits for the garbage collector."""
    pieces_of_a_model()  # what torch imports at a first step keeps its frames
    gc.collect()
    gc.disable()
    try:
        assert not any(piece() for piece in pieces_of_a_model())
    finally:
        gc.enable()


def test_buffers_of_states_die_with_the_places_they_are_for():
    """A model that is moved and flattened again and again needs no more memory."""
    model = ddp.network()
    optimizer = optim.FusedAdamW(model.parameters(), master_weights="fp32")
    for dtype in (torch.bfloat16, torch.float32) * 3:
        model.to(dtype)
        optim.flatten(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # into places of the new buffers
    gc.collect()
    assert len(optimizer._buffers) == 1
    assert sum(len(own) for own in optimizer._buffers.values()) == 2
    held = {tensor.data_ptr() for own in optimizer._buffers.values() for tensor in own.values()}
    used = {s[n].untyped_storage().data_ptr() for s in optimizer.state.values() for n in STATES}
    assert used == held


def test_without_memory_nothing_has_moved(world, monkeypatch):
    (group,) = world(1)
    module = ddp.network()
    flat = optim.flatten(module.parameters())
    before = [b.data_ptr() for b in flat.parameters + flat.gradients]

    def exhausted(*_args, **_options):
        raise MemoryError("the window is full")

    with monkeypatch.context() as patch:
        patch.setattr(pycomm.Group, "empty", exhausted)
        with pytest.raises(MemoryError):
            pycomm.DataParallel(module, group=group)
    assert before == [b.data_ptr() for b in flat.parameters + flat.gradients]
    wrapped.batch_loss(pycomm.DataParallel(module, group=group), 0, 0).backward()
    assert before[:1] == [b.data_ptr() for b in flat.parameters]


def test_window_memory_dies_with_the_wrapper(world):
    """Flat parameters keep the memory alive, as it is their gradients' buffer."""
    (group,) = world(1)
    gc.collect()
    gc.disable()
    try:
        for flat in (False, True):
            model = pycomm.DataParallel(ddp.network(), group=group)
            buffers = optim.flatten(model.parameters()) if flat else None
            pieces = [weakref.ref(piece) for piece in model._exchange._slab._layout.pieces]
            wrapped.batch_loss(model, 0, 0).backward()
            module = model.module
            del model, buffers
            assert [piece() is not None for piece in pieces] == [flat]
            del module
            assert not any(piece() for piece in pieces)
    finally:
        gc.enable()
