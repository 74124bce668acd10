"""Errors come out of backward with their type; bad arguments are refused at once."""

import os
import signal
import time

import ddp
import helpers
import pytest
import torch
from ddp import COMPRESSIONS, Watched
from golden import same_tensors
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

TINY = {"bucket_cap_mb": 0.001}


class Dying(Watched):
    """Rank 1 kills itself in a hook in mid-backward; the others dawdle before their last one."""

    def prepare(self, rank, pause):
        self.rank, self.pause, self.armed = rank, pause, False

    def hook(self, state, bucket):
        if self.armed and self.rank == 1 and bucket.index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.armed and bucket.is_last():
            time.sleep(self.pause)
        return super().hook(state, bucket)


def until_a_peer_is_gone(group, name, pause):
    """The error of backward, and the group's behaviour afterwards."""
    watched = Dying(ddp.Given(), COMPRESSIONS[name], layout=TINY)
    watched.prepare(group.rank, pause)
    watched.run(group.rank, range(2))
    loss = watched.model(ddp.gradients(watched.model, group.rank, 2))
    watched.armed = True
    with pytest.raises(pycomm.PeerDied) as caught:
        watched.backward(loss)
    with pytest.raises(pycomm.GroupUnusable, match="died"):
        pycomm.all_reduce(torch.ones(9), group=group)
    return caught.value.rank, caught.value.pid, caught.value.operation


@pytest.mark.parametrize("pause", [0, 0.5])
@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_a_peers_death_in_mid_backward_keeps_its_name(name, pause):
    """It is noticed at the end of backward or, after a pause, when a hook hands over a bucket."""
    arguments = (until_a_peer_is_gone, {"timeout": 30}, name, pause)
    with helpers.Ranks(3, helpers.in_group, *arguments) as ranks:
        victim = ranks.pids[1]
        survivors = ranks.wait_for([0, 2])
    for outcome in survivors:
        assert outcome.error is None, outcome.trace
        assert outcome.value == (1, victim, "all_reduce")


def in_a_static_graphs_first_iteration(group):
    watched = Watched(ddp.Given(), pycomm.Int8(), layout={"static_graph": True})
    loss = watched.model(ddp.gradients(watched.model, group.rank, 0))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerDied) as caught:
        watched.backward(loss)
    return caught.value.rank


def test_a_peers_death_where_ddp_has_delayed_all_hooks():
    arguments = (in_a_static_graphs_first_iteration, {"timeout": 30})
    with helpers.Ranks(2, helpers.in_group, *arguments) as ranks:
        (survivor,) = ranks.wait_for([0])
    assert survivor.error is None, survivor.trace
    assert survivor.value == 1


def raised_by_backward(group, watched, kind):
    """The error of the first step."""
    loss = watched.model(ddp.gradients(watched.model, group.rank, 0))
    with pytest.raises(kind) as caught:
        watched.backward(loss)
    return caught.value


def with_an_absent_peer(group, folder):
    watched = Watched(ddp.Given(), None, layout=TINY)
    if group.rank == 1:
        helpers.wait_until((folder / "noticed").exists)
        return None
    error = raised_by_backward(group, watched, pycomm.Timeout)
    (folder / "noticed").touch()
    return error.rank


def test_a_peer_that_does_not_come_is_a_timeout(tmp_path):
    assert helpers.run_group(2, with_an_absent_peer, tmp_path, timeout=3)[0] == 1


def with_states_that_differ(group, names):
    watched = Watched(ddp.Given(), COMPRESSIONS[names[group.rank]])
    return str(raised_by_backward(group, watched, pycomm.Mismatch))


@pytest.mark.parametrize("names", [("int8", "topk"), ("int8", "stochastic"), ("dense", "int8")])
def test_ranks_whose_states_differ_are_a_mismatch(names):
    for message in helpers.run_group(2, with_states_that_differ, names):
        assert "rank 0" in message
        assert "rank 1" in message


def register(model, state, hook):
    ddp_model = DistributedDataParallel(model)
    ddp_model.register_comm_hook(state, hook)
    return ddp_model


def with_a_stranger(group):
    """The state knows another model's parameters, or not all of them."""
    model = ddp.network()
    first = dict(model[0].named_parameters())
    for params in (ddp.network().named_parameters(), first.items()):
        hooked = register(model, hooks.TopKState(params), hooks.topk_hook)
        with pytest.raises(ValueError, match="params must name every parameter"):
            hooked(ddp.batch(group.rank, 0)).sum().backward()


def with_a_wrong_state(group):
    model = ddp.network()
    int8, dense = hooks.Int8State(), hooks.AllReduceState()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = hooks.LocalSGDState(model.named_parameters(), optimizer, period=2)
    wrong = [
        (int8, hooks.topk_hook, "TopKState for topk_hook, got Int8State"),
        (dense, hooks.int8_hook, "Int8State for int8_hook, got AllReduceState"),
        (int8, hooks.all_reduce_hook, "AllReduceState for all_reduce_hook, got Int8State"),
        (local, hooks.all_reduce_hook, "AllReduceState for all_reduce_hook, got LocalSGDState"),
        (dense, hooks.local_sgd_hook, "LocalSGDState for local_sgd_hook, got AllReduceState"),
        ("int8", hooks.int8_hook, "Int8State for int8_hook, got str"),
    ]
    for state, hook, message in wrong:
        hooked = register(model, state, hook)
        with pytest.raises(TypeError, match=f"state must be a pycomm.hooks.{message}"):
            hooked(ddp.batch(group.rank, 0)).sum().backward()
    hooked = register(model, None, hooks.comm_hook)
    with pytest.raises(TypeError, match=r"one of pycomm\.hooks, got NoneType"):
        hooked(ddp.batch(group.rank, 0)).sum().backward()


def registered_on_what_is_no_ddp_model(group):
    del group
    net = ddp.network()
    state = hooks.AllReduceState()
    for model in (net, pycomm.DataParallel(net), None):
        with pytest.raises(TypeError, match=f"DataParallel, got {type(model).__name__}"):
            state.register(model)


def registered_twice(group):
    """The first hook stays registered."""
    state = hooks.AllReduceState()
    model = DistributedDataParallel(ddp.network())
    state.register(model)
    for again in (state, hooks.Int8State()):
        with pytest.raises(RuntimeError, match="can only be called once"):
            again.register(model)
    model(ddp.batch(group.rank, 0)).sum().backward()
    assert state.step == 1


@pytest.mark.parametrize("body", [registered_on_what_is_no_ddp_model, registered_twice])
def test_states_are_registered_on_a_ddp_model_without_a_hook(body):
    helpers.run_group(1, body)


def with_a_wrong_dtype(group):
    model = ddp.network().double()
    hooked = register(model, hooks.AllReduceState(), hooks.all_reduce_hook)
    hooked(ddp.batch(group.rank, 0).double()).sum().backward()
    hooked = register(model, hooks.Int8State(model.named_parameters()), hooks.int8_hook)
    with pytest.raises(ValueError, match=r"0\.weight must have one of the dtypes"):
        hooked(ddp.batch(group.rank, 0).double()).sum().backward()


def with_a_density_that_does_not_pay(group):
    model = ddp.network().bfloat16()
    state = hooks.TopKState(model.named_parameters(), density=0.5, values=torch.float32)
    hooked = register(model, state, hooks.topk_hook)
    with pytest.raises(ValueError, match="would send"):
        hooked(ddp.batch(group.rank, 0).bfloat16()).sum().backward()


def with_sparse_gradients(group):
    for state, hook in (
        (hooks.AllReduceState(), hooks.all_reduce_hook),
        (hooks.Int8State(), hooks.int8_hook),
    ):
        hooked = register(nn.Embedding(1000, 64, sparse=True), state, hook)
        with pytest.raises(ValueError, match="dense"):
            hooked(torch.tensor([1, 2, 3 + group.rank])).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        with_a_stranger,
        with_a_wrong_state,
        with_a_wrong_dtype,
        with_a_density_that_does_not_pay,
        with_sparse_gradients,
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_backward(body):
    helpers.run_group(2, body)


class Failing(torch.autograd.Function):
    """Raises in the middle of backward."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        del ctx, gradient
        raise KeyError("the user's own")


def with_a_failing_backward(group):
    """All ranks fail after their first bucket, give up that DDP model, and go on with another."""
    first, second = nn.Linear(100, 100), nn.Linear(100, 100)
    module = nn.Sequential(first, second)
    state = hooks.Int8State(module.named_parameters())
    seen = []
    for fails in (False, False, True, False, False):
        if len(seen) in (0, 2):
            hooked = register(module, state, hooks.int8_hook)
        x = torch.full((3, 100), 1.0 + group.rank)
        hooked.zero_grad()
        output = hooked(x)
        if fails:
            output = second(Failing.apply(first(x)))
            with pytest.raises(KeyError, match="own"):
                output.sum().backward()
        else:
            output.sum().backward()
            seen.append(first.weight.grad.clone())
    return seen


def test_a_state_outlives_a_backward_that_failed():
    mine, others = helpers.run_group(2, with_a_failing_backward)
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert all(gradient.isfinite().all() for gradient in mine)


class OwnError(Exception):
    """Not pycomm's, nor torch's."""


def raise_own(_gradient):
    raise OwnError


class Backwards(ddp.Given):
    """Its gradients come in the order of its parameters: another one than DDP expects at first."""

    def forward(self, gradients):
        named = reversed(list(self.named_parameters()))
        return torch.stack([(p * gradients[name]).sum() for name, p in named]).sum()


def spoil(watched, loss, name):
    """A backward that raises at a parameter's gradient; reports the buckets that it has sent."""
    handle = watched.model.module.get_parameter(name).register_hook(raise_own)
    watched.begin()
    with pytest.raises(OwnError):
        loss.backward()
    handle.remove()
    return list(watched.seen.local)


def with_dropped_means(group, name, scale):
    """Residuals after backwards that raised; and in a model that nothing has happened to."""
    pairs = []
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        watched = Watched(Backwards(), COMPRESSIONS[name], layout=TINY, grad_scaler=scaler)
        pairs.append((watched, scaler))

    def loss(watched, scaler, step):
        watched.model.zero_grad()
        return scaler.scale(watched.model(ddp.gradients(watched.model, group.rank, step)))

    (spoilt, spoilt_scaler), (good, good_scaler) = pairs
    for watched, scaler in pairs:
        for step in range(2):
            before = watched.backward(loss(watched, scaler, step), scale)
    sent = spoil(spoilt, loss(spoilt, spoilt_scaler, 2), "small")
    assert sent == ["wide", "square"]
    step = good.backward(loss(good, good_scaler, 2), scale)
    after = spoilt.residuals()
    for one in sent:
        assert step.result[one].any()
        assert not torch.equal(step.residuals[one], before.residuals[one])
        expected = step.residuals[one] + step.result[one] / scale
        assert torch.equal(after[one], expected), one
    for one in after.keys() - sent:
        assert torch.equal(after[one], before.residuals[one])
    assert same_tensors(after, spoilt.residuals())  # only once
    if COMPRESSIONS[name].momentum:
        ours, theirs = (w.state.state_dict()["kept"][str(group.rank)] for w in (spoilt, good))
        assert all(same_tensors(ours["velocity"][one], theirs["velocity"][one]) for one in sent)
    if scale != 1:  # a step that overflows puts back what has been given back, too
        spoilt.wrap_anew(TINY)
        given = ddp.gradients(spoilt.model, group.rank, 3)
        given["bias"][0] = float("inf")
        spoilt.backward(spoilt_scaler.scale(spoilt.model(given)), scale)
        assert not same_tensors(after, spoilt.residuals())
        spoilt_scaler.update(scale / 2)
        assert same_tensors(after, spoilt.residuals())


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("name", ["int8", "stochastic", "topk", "momentum"])
def test_means_that_a_backward_drops_go_back_into_residuals(name, scale):
    helpers.run_group(2, with_dropped_means, name, scale)


def balance(group, name, layout):
    """Sums of inputs, and of results plus residuals; each error needs a new DDP."""
    watched = Watched(Backwards(), COMPRESSIONS[name], layout=TINY)
    names = watched.residuals()
    given, found = ({name: torch.zeros(ddp.SHAPES[name]) for name in names} for _ in range(2))
    steps = 0
    for step in range(9):
        watched.model.zero_grad()
        loss = watched.model(ddp.gradients(watched.model, group.rank, step))
        if step % 3 == 2:
            spoil(watched, loss, "small")
            with pytest.raises(RuntimeError, match="finished reduction"):
                watched.model(ddp.gradients(watched.model, group.rank, step))
            watched.wrap_anew(layout if step == 2 else TINY)
        else:
            result = watched.backward(loss).result
            for name in names:
                found[name] += group.size * result[name]
        for name in names & watched.seen.local.keys():
            given[name] += pycomm.all_reduce(watched.seen.local[name], group=group)
        steps += bool(watched.seen.local)
    assert watched.state.step == steps
    for name in names:
        found[name] += pycomm.all_reduce(watched.residuals()[name], group=group)
        torch.testing.assert_close(found[name], given[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", ["tiny buckets", "unused"])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_backwards_that_failed_lose_nothing_that_was_sent(name, layout):
    """The next backward begins with the same parameters or, in the second layout, others."""
    helpers.run_group(2, balance, name, ddp.LAYOUTS[layout])


NAMED = [("weight", nn.Parameter(torch.zeros(100, 100)))]
BAD = {
    "a module": (TypeError, "params", lambda: hooks.Int8State(nn.Linear(3, 3))),
    "bare parameters": (TypeError, "params", lambda: hooks.Int8State(nn.Linear(3, 3).parameters())),
    "no parameters": (ValueError, "params", lambda: hooks.Int8State([])),
    "names twice": (ValueError, "params", lambda: hooks.Int8State([*NAMED, *NAMED])),
    "no params": (TypeError, "params", lambda: hooks.TopKState(None)),
    "exclude": (TypeError, "exclude", lambda: hooks.Int8State(NAMED, exclude="bias")),
    "group": (TypeError, "group", lambda: hooks.AllReduceState(group="gloo")),
    "scaler": (TypeError, "grad_scaler", lambda: hooks.Int8State(NAMED, grad_scaler=2.0)),
    "warm-up": (ValueError, "warmup_steps", lambda: hooks.Int8State(NAMED, warmup_steps=-1)),
    "warm-up of 1.5": (TypeError, "warmup_steps", lambda: hooks.Int8State(warmup_steps=1.5)),
    "block": (ValueError, "block", lambda: hooks.Int8State(block=100)),
    "rounding": (ValueError, "rounding", lambda: hooks.Int8State(rounding="up")),
    "density": (ValueError, "density", lambda: hooks.TopKState(NAMED, density=0)),
    "values": (ValueError, "values", lambda: hooks.TopKState(NAMED, values=torch.float64)),
    "momentum": (ValueError, "momentum", lambda: hooks.TopKState(NAMED, momentum=1.0)),
    "compression": (TypeError, "compression", lambda: hooks.CommState("int8")),
    "option": (TypeError, "feed", lambda: hooks.Int8State(NAMED, feed=True)),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_at_once(what):
    error, names, make = BAD[what]
    with pytest.raises(error, match=names):
        make()


def test_frozen_parameters_may_be_of_any_kind(world):
    frozen = nn.Parameter(torch.zeros(100, device="meta"), requires_grad=False)
    hooks.Int8State([*NAMED, ("frozen", frozen)], group=world(1).groups[0])


def test_a_residual_that_is_not_kept_is_a_clear_error(world):
    named = [*NAMED, ("bias", nn.Parameter(torch.zeros(100)))]
    state = hooks.Int8State(named, group=world(1).groups[0])
    assert state.residual("weight").shape == (100, 100)
    for name in ("bias", "unknown"):
        with pytest.raises(ValueError, match=f"weight.*{name}"):
            state.residual(name)
