"""pycomm.DataParallel among the threads of one process."""

import copy
import threading

import ddp
import helpers
import pytest
import torch
import wrapped
from ddp import COMPRESSIONS, Reference
from torch.utils.checkpoint import checkpoint
from wrapped import TINY, Wrapped

import pycomm


def given_steps(group, name):
    wrapper = Wrapped(ddp.Given(), COMPRESSIONS[name], bucket_cap_mb=TINY, group=group)
    return wrapper.run(group.rank, range(3))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["dense", "int8", "momentum"])
def test_each_parameter_is_what_the_golden_model_says(world, name, size):
    Reference(size, COMPRESSIONS[name]).check(world(size).run(given_steps, name))


NETWORK = ddp.network()  # drawn by one thread, as the random numbers are everyone's


def trained(group, name):
    options = {"compression": COMPRESSIONS[name], "bucket_cap_mb": 0.02, "group": group}
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), **options)
    return wrapped.train(model, group.rank, range(4))


@pytest.mark.parametrize("name", ["dense", "stochastic", "topk"])
def test_threads_train_to_the_bits_of_processes(world, name):
    runs = world(2).run(trained, name) + helpers.run_group(2, trained, name)
    for run in runs[1:]:
        assert all(wrapped.same(a, b) for a, b in zip(run, runs[0], strict=True))


def with_own_parameters(group):
    module = copy.deepcopy(NETWORK)
    with torch.no_grad():
        module[0].weight.fill_(group.rank + 1)
    model = pycomm.DataParallel(module, group=group)
    return model.module[0].weight.unique().item()


def test_all_begin_with_the_first_ranks_parameters(world):
    assert world(3).run(with_own_parameters) == [1, 1, 1]


def checkpointed_loss(module, rank, step):
    x = ddp.batch(rank, step).requires_grad_()
    return checkpoint(module, x, use_reentrant=True, preserve_rng_state=False).square().mean()


def in_all_ways(group):
    """Weights, accumulation, checkpoints, and different numbers of batches, in one go."""
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), bucket_cap_mb=TINY, group=group)
    checkpointed_loss(model, group.rank, 0).backward()
    gradients = wrapped.gradients_of(model)
    with model.join():
        for step in range(2 * group.rank):
            model.zero_grad()
            with model.no_sync():
                wrapped.batch_loss(model, group.rank, step).backward()
            model(ddp.batch(group.rank, step), weight=step + 1).square().mean().backward()
    return gradients, wrapped.parameters_of(model)


def test_everything_together(world):
    seen = world(4).run(in_all_ways)
    expected = wrapped.mean_gradients(copy.deepcopy(NETWORK), 4, 0)
    for gradients, parameters in seen:
        assert wrapped.same(gradients, expected)
        assert wrapped.same(parameters, seen[0][1])


class OwnError(Exception):
    pass


def raise_own(*details):
    raise OwnError(len(details))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_one_rank_stops_the_others(world, place):
    seen = {}
    done = threading.Barrier(3)

    def body(group):
        model = pycomm.DataParallel(copy.deepcopy(NETWORK), bucket_cap_mb=TINY, group=group)
        wrapped.batch_loss(model, group.rank, 0).backward()
        done.wait()  # or the error could end the first backward of a rank that is late
        if group.rank == 1 and place == "forward":
            model.module[2].register_forward_hook(raise_own)
        elif group.rank == 1:
            model.module[2].register_full_backward_hook(raise_own)
        try:
            wrapped.batch_loss(model, group.rank, 1).backward()
        except pycomm.PycommError as error:
            seen[group.rank] = error
            raise

    with pytest.raises(OwnError):
        world(3).run(body)
    assert sorted(seen) == [0, 2]
    for error in seen.values():
        assert type(error) is pycomm.PeerDied
        assert error.rank == 1


def test_one_rank_is_a_group_too(world):
    (group,) = world(1)
    model = pycomm.DataParallel(copy.deepcopy(NETWORK), bucket_cap_mb=TINY, group=group)
    for got, expected in zip(
        wrapped.train(model, 0, range(3)),
        wrapped.train(copy.deepcopy(NETWORK), 0, range(3)),
        strict=True,
    ):
        assert wrapped.same(got, expected)
