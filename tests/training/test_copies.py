"""Copies of models under the wrapper, or under DDP with a hook: by deepcopy, and by pickle."""

import copy
import io
import pickle

import ddp
import helpers
import pytest
import torch
import wrapped
from ddp import COMPRESSIONS
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from wrapped import TINY
from wrapping import data_parallel

import pycomm
from pycomm import hooks


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, by_pickle, by_torch_save]


def wrapper(name, **options):
    options["exclude"] = lambda _, parameter: parameter.dim() <= 1  # which no pickle can hold
    return data_parallel(ddp.network(), compression=COMPRESSIONS[name], **options)


def same_states(one, other):
    (one,), (other,) = ([*state.state_dict()["kept"].values()] for state in (one, other))
    assert one.keys() == other.keys()
    return all(wrapped.same(one[kind], other[kind]) for kind in one)


def goes_on_alike(group, name, way):
    """A copy of a model trains like the model, and neither changes the other."""
    model = wrapper(name, bucket_cap_mb=TINY, group=group)
    wrapped.train(model, group.rank, range(2))
    copied = way(model)
    seen = [wrapped.train(each, group.rank, range(2, 4)) for each in (copied, model)]
    assert all(wrapped.same(a, b) for a, b in zip(*seen, strict=True))
    assert same_states(copied.comm_state, model.comm_state)
    assert copied.comm_state.step == 4
    assert copied.comm_state.group is group


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["dense", "momentum", "int8"])
def test_a_copy_of_the_wrapper_goes_on_alike(name, way):
    helpers.run_group(2, goes_on_alike, name, way)


def test_a_deep_copy_stays_in_its_group():
    with pycomm.LocalWorld(2) as world:
        world.run(goes_on_alike, "topk", copy.deepcopy)


def averages(group):
    """On one rank alone, without shared memory."""
    model = wrapper("topk")
    if group.rank == 0:
        averaged = AveragedModel(model)
        first = wrapped.parameters_of(model.module)
    wrapped.train(model, group.rank, range(2))
    if group.rank == 0:
        averaged.update_parameters(model)
        averaged.update_parameters(model)
        last = wrapped.parameters_of(model.module)
        for name, mean in wrapped.parameters_of(averaged.module.module).items():
            torch.testing.assert_close(mean, last[name])
            assert not torch.equal(mean, first[name])
        averaged.eval()
        with torch.no_grad():
            averaged(ddp.batch(0, 0))
        assert averaged.module._own_exchange is None


def test_averaged_model():
    helpers.run_group(2, averages)


def saved_by_rank_0(group):
    """A pickle of rank 0's model; with compression its residuals are rank 0's."""
    model = wrapper("int8" if group.size == 2 else "dense")
    wrapped.train(model, group.rank, range(1))
    return pickle.dumps(model)


def loaded_by_all(group, data, refused):
    model = pickle.loads(data)
    with torch.no_grad():
        model(ddp.batch(0, 0))
    if refused:
        with pytest.raises(ValueError, match="they belong to rank 0 of 2, this is rank 1 of 2"):
            wrapped.batch_loss(model, group.rank, 0)
    else:
        wrapped.batch_loss(model, group.rank, 0).backward()


def test_residuals_of_another_rank_are_refused():
    compressed, _ = helpers.run_group(2, saved_by_rank_0)
    (dense,) = helpers.run_group(1, saved_by_rank_0)
    helpers.run_group(2, loaded_by_all, dense, False)
    with pycomm.LocalWorld(2) as world:
        pycomm.set_default_group(world.groups[1])
        try:
            loaded_by_all(world.groups[1], compressed, True)
        finally:
            pycomm.set_default_group(None)


def test_a_wrapper_is_loaded_and_evaluated_without_a_group():
    data, _ = helpers.run_group(2, saved_by_rank_0)
    with torch.no_grad():
        out = pickle.loads(data)(ddp.batch(0, 0))
    assert out.isfinite().all()


def under_a_hook(group, way):
    """torch does not register hooks of copies, so only states are compared."""
    net = ddp.network()
    model = DistributedDataParallel(net)
    state = hooks.TopKState(net.named_parameters(), density=0.1)
    model.register_comm_hook(state, hooks.topk_hook)
    wrapped.train(model, group.rank, range(2))
    copied = way(model)
    ((hook, kept),) = copied._comm_hooks
    assert same_states(kept, state)
    again = DistributedDataParallel(copied.module)
    again.register_comm_hook(kept, hook)
    seen = [wrapped.train(each, group.rank, range(2, 4)) for each in (again, model)]
    assert all(wrapped.same(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_model_under_a_hook(way):
    helpers.run_group(2, under_a_hook, way)


def local_steps(model, optimizer, local, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        wrapped.batch_loss(model, rank, step).backward()
        optimizer.step()
        local.step()
    return wrapped.parameters_of(model)


def under_local_sgd(group, way):
    net = ddp.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    local = hooks.LocalSGDState(
        net.named_parameters(), optimizer, period=2, compression=pycomm.Int8(), gradient_steps=1
    )
    model = pycomm.DataParallel(net, state=local)
    local_steps(model, optimizer, local, group.rank, range(4))
    copied, optimizer_of_copy = way((model, optimizer))
    of_copy = copied.comm_state
    assert of_copy._optimizers._optimizers == [optimizer_of_copy]
    seen = [
        local_steps(copied, optimizer_of_copy, of_copy, group.rank, range(4, 8)),
        local_steps(model, optimizer, local, group.rank, range(4, 8)),
    ]
    assert wrapped.same(*seen)
    optimizer_of_copy.step()
    with pytest.raises(RuntimeError, match="must be called after every step of the optimizer"):
        optimizer_of_copy.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_under_local_sgd(way):
    helpers.run_group(2, under_local_sgd, way)


def with_inner_group(group):
    net = ddp.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"period": 2, "inner_group": group}
    local = hooks.LocalSGDState(net.named_parameters(), optimizer, **options)
    with pytest.raises(TypeError, match="with inner_group cannot be pickled or copied"):
        pickle.dumps(local)


def test_inner_groups_are_not_pickled():
    helpers.run_group(1, with_inner_group)
