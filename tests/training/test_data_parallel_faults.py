"""pycomm.DataParallel when things go wrong: errors in backward, death, and its end."""

import functools
import gc
import os
import signal
import time
import weakref

import ddp
import golden
import helpers
import pytest
import torch
import wrapped
from torch import nn
from wrapped import TINY

import pycomm


class OwnError(Exception):
    def __init__(self, number):
        super().__init__(number)
        self.number = number


class Fragile(nn.Module):
    """Calls something in the middle of backward."""

    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
        self.norm = nn.BatchNorm1d(40) if norm else nn.Identity()

    def forward(self, x, call=None):
        x = self.norm(self.layers[:3](x))
        if call is not None:
            x.register_hook(call)
        return self.layers[3:](x)


def raise_own(gradient):
    raise OwnError(gradient.dim())


def check_steps(group, model, steps, set_to_none=True):
    alone = Fragile()
    for step in steps:
        loss = wrapped.batch_loss(model, group.rank, step)
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        expected = wrapped.mean_gradients(alone, group.size, step)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def fail(model, rank, step):
    """A backward that raises."""
    with pytest.raises(OwnError) as caught:
        model(ddp.batch(rank, step), raise_own).sum().backward()
    assert caught.value.number == 2


def all_raise(group, set_to_none):
    """All ranks raise in the first step and in a later one; later steps are not affected."""
    model = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY)
    fail(model, group.rank, 0)
    check_steps(group, model, range(2), set_to_none)
    fail(model, group.rank, 0)
    fail(model, group.rank, 1)
    model.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(2, 3))
    check_steps(group, model, range(2), set_to_none)


def one_raises(group, set_to_none):
    """The other rank raises in the same step, and no gradient is left; then both go on."""
    model = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY)
    for turn in range(3):
        model.zero_grad(set_to_none=set_to_none)
        if group.rank == turn % group.size:
            fail(model, group.rank, turn)
        else:
            loss = wrapped.batch_loss(model, group.rank, turn)
            with pytest.raises(RuntimeError, match=rf"raised on ranks \[{turn % group.size}\]"):
                loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        check_steps(group, model, range(2), set_to_none)
    assert model.comm_state.step == 9


def raising_before_accumulation(group, set_to_none):
    """Gradients accumulated after the error count; those before it do not."""
    model, alone = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY), Fragile()

    def loss(module, rank, step):
        return wrapped.batch_loss(module, rank, step) + wrapped.batch_loss(module, rank, step + 1)

    fail(model, group.rank, 0)
    model.zero_grad(set_to_none=set_to_none)
    with model.no_sync():
        wrapped.batch_loss(model, group.rank, 0).backward()
    wrapped.batch_loss(model, group.rank, 1).backward()
    expected = wrapped.mean_gradients(alone, group.size, 0, loss)
    for name, got in wrapped.gradients_of(model).items():
        torch.testing.assert_close(got, expected[name])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("body", [all_raise, one_raises, raising_before_accumulation])
def test_an_error_in_backward_leaves_the_wrapper_usable(body, set_to_none):
    helpers.run_group(2, body, set_to_none)


def raise_in_forward(*_details):
    raise OwnError(2)


def spoiled_loss(model, rank, step, place):
    """A loss that raises somewhere."""
    if place == "middle":
        return model(ddp.batch(rank, step), raise_own).sum()
    if place == "forward":
        handle = model.module.layers[2].register_forward_pre_hook(raise_in_forward)
        try:
            return model(ddp.batch(rank, step))
        finally:
            handle.remove()
    loss = wrapped.batch_loss(model, rank, step) + 1
    loss.register_hook(raise_own)
    return loss


def skipping(group, place, norm):
    """A loop that skips batches with errors: ranks skip the same batches, and stay in step."""
    module, alone = Fragile(norm), Fragile(norm)
    model = pycomm.DataParallel(module, bucket_cap_mb=TINY)
    errors = []
    for step in range(9):
        spoiled_by = {1: [0], 3: [1], 4: [1], 6: [0, 1]}.get(step, [])
        model.zero_grad()
        try:
            spoiled = group.rank in spoiled_by
            loss = (
                spoiled_loss(model, group.rank, step, place)
                if spoiled
                else wrapped.batch_loss(model, group.rank, step)
            )
            loss.backward()
        except (OwnError, RuntimeError) as error:
            errors.append((step, type(error)))
            continue
        expected = wrapped.mean_gradients(alone, group.size, step)
        assert wrapped.same(wrapped.gradients_of(model), expected)
    return errors


PLACES = ["loss", "middle", "forward"]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with buffers"])
@pytest.mark.parametrize("place", PLACES)
def test_a_loop_that_skips_what_raises_stays_in_step(place, norm):
    """The error may be in the loss, in the module's backward, or in its forward."""
    errors = helpers.run_group(2, skipping, place, norm)
    for rank, others in enumerate(errors):
        kinds = [OwnError if rank in by else RuntimeError for by in ([0], [1], [1], [0, 1])]
        assert others == list(zip([1, 3, 4, 6], kinds, strict=True))


def several_forwards(group):
    """Before one backward, on all ranks alike, whether it raises or not."""
    model, alone = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY), Fragile()

    def loss(module, rank, step):
        return wrapped.batch_loss(module, rank, step) + wrapped.batch_loss(module, rank, step + 9)

    for step in range(5):
        model.zero_grad()
        total = loss(model, group.rank, step)
        if step % 2 and group.rank == 0:
            total.register_hook(raise_own)
        if step % 2:
            with pytest.raises(OwnError if group.rank == 0 else RuntimeError):
                total.backward()
        else:
            total.backward()
            expected = wrapped.mean_gradients(alone, group.size, step, loss)
            assert wrapped.same(wrapped.gradients_of(model), expected)


def test_an_error_after_several_forwards():
    helpers.run_group(2, several_forwards)


def penalty(model, rank, step):
    """The gradient of the output becomes part of the loss."""
    x = ddp.batch(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    if step == 1 and rank == 0:
        raise OwnError(2)
    slope.square().sum().backward()


def twice(model, rank, step):
    """Two forwards, then two backwards."""
    first, second = (wrapped.batch_loss(model, rank, step + more) for more in (0, 9))
    first.backward()
    if step == 1 and rank == 0:
        raise OwnError(2)
    second.backward()


def accumulating(model, rank, step):
    with model.no_sync():
        wrapped.batch_loss(model, rank, step).backward()
        if step == 1 and rank == 0:
            raise OwnError(2)
    wrapped.batch_loss(model, rank, step + 9).backward()


def in_step(group, body):
    """Gradients of steps after an error on one rank, and those of a model without one."""
    model, other = (pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY) for _ in range(2))
    for step in range(5):
        model.zero_grad()
        other.zero_grad()
        if step == 1:
            with pytest.raises(OwnError if group.rank == 0 else RuntimeError):
                body(model, group.rank, step)
            continue
        body(model, group.rank, step)
        body(other, group.rank, step)
        assert wrapped.same(wrapped.gradients_of(model), wrapped.gradients_of(other))


@pytest.mark.parametrize("body", [penalty, twice, accumulating])
def test_an_error_on_one_rank_between(body):
    helpers.run_group(2, in_step, body)


class Spoilt(ddp.Given):
    """Calls something before the gradient of its first parameter, which comes last."""

    def forward(self, gradients, call=None):
        gradients = dict(gradients)
        wide = (self.wide * gradients.pop("wide")).sum()
        if call is not None:
            wide.register_hook(call)
        return wide + super().forward(gradients)


def balance(group, compression, scaler):
    """Sums of inputs, and of results plus residuals; most steps raise on one rank or both."""
    options = {"compression": compression, "grad_scaler": scaler}
    model = pycomm.DataParallel(Spoilt(), bucket_cap_mb=TINY, **options)
    scale = scaler.scale(torch.ones(())) if scaler else 1.0
    names = ["wide", "square"]
    given, found = ({name: torch.zeros(ddp.SHAPES[name]) for name in names} for _ in range(2))
    for step in range(9):
        model.zero_grad()
        spoiled_by = [[], [0], [1], [0, 1]][step % 4]
        everyones = [ddp.gradients(model, rank, step) for rank in range(group.size)]
        for rank, gradients in enumerate(everyones):
            for name in names if rank not in spoiled_by else ["square"]:
                given[name] += gradients[name]
        call = raise_own if group.rank in spoiled_by else None
        loss = scale * model(everyones[group.rank], call)
        if spoiled_by:
            with pytest.raises(OwnError if call else RuntimeError):
                loss.backward()
        else:
            loss.backward()
            for name in names:
                found[name] += group.size * model.module.get_parameter(name).grad / scale
    for name in names:
        waiting = model.comm_state.residual(name).clone()
        found[name] += pycomm.all_reduce(waiting, group=group)
    return given, found


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("compression", [pycomm.Int8(), pycomm.TopK(0.05)], ids=repr)
def test_an_error_in_backward_loses_nothing_that_waits(compression, scaled):
    """Means that are dropped go back into residuals."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    for given, found in helpers.run_group(2, balance, compression, scaler):
        for name in given:
            torch.testing.assert_close(found[name], given[name], rtol=1e-4, atol=1e-3)


def sparse(group):
    torch.manual_seed(0)
    model = pycomm.DataParallel(nn.Embedding(50, 8))
    model.module.sparse = True
    with pytest.raises(ValueError, match=r"must be dense, got one of layout torch.sparse_coo"):
        model(torch.tensor([1, 2])).sum().backward()
    model.module.sparse = False
    model.zero_grad()
    model(torch.tensor([group.rank, 2])).sum().backward()
    assert model.module.weight.grad[:3, 0].tolist() == [0.5, 0.5, 1]


def test_sparse_gradients_are_refused():
    helpers.run_group(2, sparse)


def dying(group, place, compression):
    """Rank 1 dies during backward; returns rank 0's error and its time."""
    model = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY, compression=compression)
    for step in range(2):
        wrapped.batch_loss(model, group.rank, step).backward()

    def meet(gradient):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == "middle":
            time.sleep(0.3)  # the exchanges so far have failed before the next is begun
        del gradient

    with pytest.raises(pycomm.PeerDied) as caught:
        model(ddp.batch(group.rank, 2), meet).sum().backward()
    with pytest.raises(pycomm.PycommError, match="died"):
        model(ddp.batch(group.rank, 3)).sum().backward()
    return caught.value.rank, caught.value.operation


@pytest.mark.parametrize("compression", [None, pycomm.Int8()], ids=repr)
@pytest.mark.parametrize("place", ["end", "middle"])
def test_death_of_a_peer_comes_out_of_backward_as_what_it_is(place, compression):
    arguments = (dying, {"timeout": 30}, place, compression)
    with helpers.Ranks(2, helpers.in_group, *arguments) as ranks:
        (outcome,) = ranks.wait_for([0])
    assert outcome.error is None, outcome.trace
    assert outcome.value == (1, "all_reduce")


class Shortcut(nn.Module):
    """Two layers of one size, of which the first may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(40, 40, bias=False) for _ in range(2))

    def forward(self, x, skip):
        return self.second(x if skip else self.first(x))


def crossing(group, apart):
    """Two models in one backward; on rank 0, one sends its missing gradients after the other."""
    groups = group, pycomm.init() if apart else group
    models = [pycomm.DataParallel(Shortcut(), bucket_cap_mb=TINY, group=g) for g in groups]

    def loss(both, rank, step):
        x = both[0](ddp.batch(rank, step), skip=False)
        return both[1](x, skip=rank == 0).square().mean()

    if not apart:
        # The other model's next exchange may find the group failed already, and quote the failure.
        refused = (pycomm.Mismatch, pycomm.GroupUnusable)
        loss(models, group.rank, 0).backward()  # the first one sends everything in its end
        with pytest.raises(refused, match=r"rank 0 called all_reduce.*, rank 1 called all_reduce"):
            loss(models, group.rank, 1).backward()
        return
    for step in range(3):
        for model in models:
            model.zero_grad()
        loss(models, group.rank, step).backward()
        expected = wrapped.mean_gradients(nn.ModuleList([Shortcut(), Shortcut()]), 2, step, loss)
        for index, model in enumerate(models):
            for name, got in wrapped.gradients_of(model).items():
                assert golden.same_bits(got, expected[f"{index}.{name}"])


@pytest.mark.parametrize("apart", [True, False], ids=["two groups", "one group"])
def test_two_models_whose_exchanges_cross(apart):
    """On one group, even equal models are distinguished; with a group for each, they work."""
    helpers.run_group(2, crossing, apart)


def dropped(group):
    """Its module lives on by itself, and may be wrapped again."""
    module, alone = Fragile(), Fragile()
    for step in range(2):
        model = pycomm.DataParallel(module, bucket_cap_mb=TINY)
        wrapped.batch_loss(model, group.rank, step).backward()
        loss = wrapped.batch_loss(model, group.rank, step)  # its outputs live on, too
        died = weakref.ref(model)
        del model
        gc.collect()
        assert died() is None
        module.zero_grad()
        if group.rank == 0:
            loss.backward()
            wrapped.batch_loss(module, 0, step).backward()
            alone.zero_grad()
            for _ in range(2):
                wrapped.batch_loss(alone, 0, step).backward()
            assert wrapped.same(wrapped.gradients_of(module), wrapped.gradients_of(alone))
            module.zero_grad()
    model = pycomm.DataParallel(module, bucket_cap_mb=TINY)
    check_steps(group, model, range(2))


def test_a_wrapper_that_is_gone_does_nothing():
    helpers.run_group(2, dropped)


def in_flight_when_dropped(group, leave):
    """Memory that an exchange uses is not given back; a wrapper may be gone on one rank only."""
    alive = []
    for step in range(5):
        model = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY)
        check_steps(group, model, range(1))  # the first backward sends everything in its end
        leave(model, group.rank, step)
        if group.rank == 0:  # as a cycle of references does until the garbage collector runs
            alive.append(model)
        del model
        gc.collect()
    check_steps(group, pycomm.DataParallel(Fragile()), range(1))


def only_forward(model, rank, step):
    """A forward that gets no backward."""
    model(ddp.batch(rank, step))


@pytest.mark.parametrize("leave", [fail, only_forward])
def test_dropping_a_wrapper_with_exchanges_under_way(leave):
    helpers.run_group(2, in_flight_when_dropped, leave)


def pass_by(marker, gradient):
    del marker, gradient


def forgetful(group):
    """The wrapper does not keep graphs alive, whether their backward ran or not."""
    model = pycomm.DataParallel(Fragile(), bucket_cap_mb=TINY)
    for run in (True, False):
        marker = OwnError(0)
        out = model(ddp.batch(group.rank, 0), functools.partial(pass_by, marker))
        alive = weakref.ref(marker)
        del marker
        assert alive() is not None
        if run:
            out.sum().backward()
        del out
        assert alive() is None


def test_graphs_are_not_kept():
    helpers.run_group(2, forgetful)
