"""How long flat buffers live, and what happens where there is no memory for them."""

import gc
import weakref

import ddp
import pytest
import wrapped

import pycomm
import pycomm.optim as optim
from pycomm._flat import home_of


def test_buffers_die_with_their_parameters():
    """At once: no cycle waits for the collector."""
    gc.collect()
    gc.disable()
    try:
        model = ddp.network()
        flat = optim.flatten(model.parameters())
        optimizer = optim.FusedAdamW(model.parameters())
        wrapped.batch_loss(model, 0, 0).backward()
        optimizer.step()
        pieces = [weakref.ref(home_of(p).piece) for p in model.parameters()]
        del flat, optimizer, model
        assert not any(piece() for piece in pieces)
    finally:
        gc.enable()


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
    """Unless parameters are flat, whose buffers it is then."""
    (group,) = world(1)
    gc.collect()
    gc.disable()
    try:
        for flat in (False, True):
            model = pycomm.DataParallel(ddp.network(), group=group)
            buffers = optim.flatten(model.parameters()) if flat else None
            pieces = [weakref.ref(piece) for piece in model._slab._layout.pieces]
            wrapped.batch_loss(model, 0, 0).backward()
            module = model.module
            del model, buffers
            assert [piece() is not None for piece in pieces] == [flat]
            del module
            assert not any(piece() for piece in pieces)
    finally:
        gc.enable()
