"""pycomm.DataParallel: gradients and parameters, bit for bit, in every way of running backward."""

import contextlib
import copy

import ddp
import helpers
import pytest
import torch
import wrapped
from ddp import COMPRESSIONS, Reference
from torch.nn.parallel import DistributedDataParallel
from wrapped import TINY, Wrapped

import pycomm
from pycomm import hooks
from pycomm._runtime.rendezvous import slice_bytes

LAYOUTS = (TINY, 0.05, 25)  # MiB


def given_steps(group, name, dtypes, options):
    wrapper = Wrapped(ddp.Given(dtypes), COMPRESSIONS[name], **options)
    return wrapper.run(group.rank, range(3))


def in_every_layout(group, name, dtypes):
    return [given_steps(group, name, dtypes, {"bucket_cap_mb": layout}) for layout in LAYOUTS]


MIXED = {"wide": torch.bfloat16, "small": torch.float16, "bias": torch.bfloat16}


@pytest.mark.parametrize("dtypes", [{}, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_each_parameter_is_what_the_golden_model_says(name, dtypes):
    """Golden models know nothing of buckets, so all layouts give the same."""
    runs = helpers.run_group(2, in_every_layout, name, dtypes)
    for index in range(len(LAYOUTS)):
        Reference(2, COMPRESSIONS[name]).check([run[index] for run in runs])


def only_the_square(name, parameter):
    del parameter
    return name != "square"


OPTIONS = {
    "no feedback": {"feedback": False},
    "excluded": {"exclude": only_the_square},
    "warm-up": {"warmup_steps": 2},
}


@pytest.mark.parametrize("which", OPTIONS)
def test_options_of_the_state(which):
    runs = helpers.run_group(3, given_steps, "topk", {}, OPTIONS[which])
    Reference(3, COMPRESSIONS["topk"], **OPTIONS[which]).check(runs)


def beside_ddp(group, compression):
    """Parameters after every step, of DDP under the hook and of the wrapper with either bucket."""
    model = DistributedDataParallel(ddp.network(), bucket_cap_mb=0.02)
    state = hooks.CommState(compression, model.named_parameters())
    model.register_comm_hook(state, hooks.comm_hook)
    expected = wrapped.train(model, group.rank, range(5))
    for bucket_cap_mb in (TINY, 0.02, 25):
        model = pycomm.DataParallel(
            ddp.network(), compression=compression, bucket_cap_mb=bucket_cap_mb
        )
        for got, step in zip(wrapped.train(model, group.rank, range(5)), expected, strict=True):
            assert wrapped.same(got, step)
    return expected[-1]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "compression", [None, pycomm.Int8(), pycomm.TopK(0.05), pycomm.Cast(torch.bfloat16)], ids=repr
)
def test_trains_to_the_bits_of_ddp_under_the_hook(compression, size):
    ends = helpers.run_group(size, beside_ddp, compression)
    assert all(wrapped.same(end, ends[0]) for end in ends)


def beside_plain_ddp(group):
    expected = wrapped.train(DistributedDataParallel(ddp.network()), group.rank, range(4))
    for set_to_none in (True, False):
        model = pycomm.DataParallel(ddp.network(), bucket_cap_mb=0.02)
        got = wrapped.train(model, group.rank, range(4), set_to_none=set_to_none)
        assert all(wrapped.same(a, b) for a, b in zip(got, expected, strict=True))


def test_two_ranks_train_to_the_bits_of_plain_ddp():
    helpers.run_group(2, beside_plain_ddp)


def mean_of_three(group):
    model = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY)
    for step in range(3):
        model.zero_grad()
        wrapped.batch_loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(ddp.network(), group.size, step)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def test_gradients_are_the_mean_in_rank_order():
    helpers.run_group(3, mean_of_three)


def test_the_norm_is_that_of_the_gradients_that_a_step_takes(world):
    """Also if some elements have been changed in a way that torch does not count."""

    def run(group):
        net = torch.nn.Sequential(torch.nn.Linear(90, 70), torch.nn.Linear(70, 3))
        model = pycomm.DataParallel(net, group=group)
        optimizer = pycomm.optim.FusedSGD(model.parameters(), lr=0.0, max_norm=1.0)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 90), group.rank + step + 1.0)).sum().backward()
            if step % 2:
                net[0].weight.grad.data.view(-1)[3000] = 1e4
            optimizer.step()
            squares = [p.grad.double().square().sum() for p in model.parameters()]
            assert float(optimizer.grad_norm) == pytest.approx(
                float(sum(squares).sqrt()), rel=1e-12
            )

    world(2).run(run)


def in_the_window(group, name):
    """The offsets of gradients in this rank's slice, for every step."""
    model = pycomm.DataParallel(ddp.network(), compression=COMPRESSIONS[name], bucket_cap_mb=0.02)
    places = []
    for step in range(4):
        model.zero_grad(set_to_none=step == 3)
        wrapped.batch_loss(model, group.rank, step).backward()
        places.append([group._core.offset_of(p.grad.data_ptr()) for p in model.parameters()])
    return places


@pytest.mark.parametrize("name", ["dense", "int8"])
def test_gradients_lie_in_the_shared_window(name):
    for places in helpers.run_group(2, in_the_window, name):
        assert all(0 <= place < slice_bytes() for place in places[0])
        assert all(place == places[0] for place in places)


def read_directly(group):
    """The traffic for a bucket, and for as much memory outside of the window."""
    model = pycomm.DataParallel(torch.nn.Linear(400, 400, bias=False))
    model(torch.ones(2, 400)).sum().backward()
    flat = model.module.weight.grad.view(-1)
    pycomm.all_reduce(flat, "avg", group=group)
    zero_copy = group.traffic()
    pycomm.all_reduce(flat.clone(), "avg", group=group)
    return zero_copy, group.traffic()


def test_buckets_are_reduced_where_they_are():
    for zero_copy, staged in helpers.run_group(2, read_directly):
        assert zero_copy[0] < staged[0]  # fewer signals: nothing is staged tile by tile


@contextlib.contextmanager
def flag(model):
    """Sets the attribute as some training scripts do instead of no_sync."""
    model.require_backward_grad_sync = False
    yield
    model.require_backward_grad_sync = True


def accumulated(group, name, set_to_none, adding_up):
    """Three backwards, of which the last one exchanges."""
    wrapper = Wrapped(ddp.Given(), COMPRESSIONS[name], bucket_cap_mb=TINY)
    model, seen = wrapper.model, []
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        parts = [ddp.gradients(model, group.rank, 3 * step + i) for i in range(3)]
        with adding_up(model):
            for part in parts[:-1]:
                model(part).backward()
        total = {n: parts[0][n] + parts[1][n] + parts[2][n] for n in parts[0]}
        seen.append(wrapper.backward(model(parts[-1]), **total))
        assert wrapper.state.step == step + 1
    return seen


@pytest.mark.parametrize("adding_up", [pycomm.DataParallel.no_sync, flag])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_accumulated_gradients_are_exchanged_once(name, set_to_none, adding_up):
    runs = helpers.run_group(2, accumulated, name, set_to_none, adding_up)
    Reference(2, COMPRESSIONS[name]).check(runs)


def without_no_sync(group):
    """Every backward exchanges the gradients accumulated so far."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=0.02), ddp.network()
    wrapped.batch_loss(model, group.rank, 0).backward()
    first = wrapped.gradients_of(model)
    wrapped.batch_loss(model, group.rank, 1).backward()

    def added(module, rank, step):
        for name, parameter in module.named_parameters():
            parameter.grad = first[name].clone()
        return wrapped.batch_loss(module, rank, step)

    assert wrapped.same(first, wrapped.mean_gradients(alone, group.size, 0))
    expected = wrapped.mean_gradients(alone, group.size, 1, added)
    assert wrapped.same(wrapped.gradients_of(model), expected)


def across_no_sync(group):
    """Only the place of the backward decides whether it exchanges, not the place of its forward."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=0.02), ddp.network()
    loss = wrapped.batch_loss(model, group.rank, 0)
    with model.no_sync():
        loss.backward()
        loss = wrapped.batch_loss(model, group.rank, 1)
    assert model.comm_state.step == 0
    loss.backward()

    def added_up(module, rank, step):
        wrapped.batch_loss(module, rank, step).backward()
        return wrapped.batch_loss(module, rank, step + 1)

    expected = wrapped.mean_gradients(alone, group.size, 0, added_up)
    assert wrapped.same(wrapped.gradients_of(model), expected)


def several_forwards(group):
    """Two forwards before one backward, and the same graph twice."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=0.02), ddp.network()

    def both(module, rank, step):
        return wrapped.batch_loss(module, rank, step) + wrapped.batch_loss(module, rank, step + 9)

    for step in range(2):
        model.zero_grad()
        both(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, both)
        assert wrapped.same(wrapped.gradients_of(model), expected)
    model.zero_grad()
    loss = both(model, group.rank, 5)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        expected = wrapped.mean_gradients(alone, group.size, 5, both)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def a_graph_of_the_backward(group):
    """create_graph, and torch.autograd.grad, which leaves no gradients and exchanges nothing."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=0.02), ddp.network()

    def penalised(module, rank, step):
        x = ddp.batch(rank, step).requires_grad_()
        out = module(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return slope.square().mean() + out.square().mean()

    for step in range(2):
        model.zero_grad()
        penalised(model, group.rank, step).backward()
        assert model.comm_state.step == step + 1
        expected = wrapped.mean_gradients(alone, group.size, step, penalised)
        assert wrapped.same(wrapped.gradients_of(model), expected)
    if group.rank == 0:  # on one rank alone
        x = ddp.batch(0, 0)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model.zero_grad()
    wrapped.batch_loss(model, group.rank, 7).backward(create_graph=True)
    expected = wrapped.mean_gradients(alone, group.size, 7)
    assert wrapped.same(wrapped.gradients_of(model), expected)
    assert not any(p.grad.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "body", [without_no_sync, across_no_sync, several_forwards, a_graph_of_the_backward]
)
def test_ways_of_running_backward(body):
    helpers.run_group(2, body)


HERE_AND_THERE = [
    ([], []),
    (["wide", "bias"], []),
    (["square"], ["square", "wide", "line"]),
    (["wide", "square", "small"], ["wide", "square", "small"]),
    ([], ["wide"]),
]


def with_unused(group, name, bucket_cap_mb, set_to_none):
    """Each step with its own parameters left out, on each rank."""
    wrapper = Wrapped(ddp.Given(), COMPRESSIONS[name], bucket_cap_mb=bucket_cap_mb)
    seen = []
    for step, skip in enumerate(HERE_AND_THERE):
        wrapper.model.zero_grad(set_to_none=set_to_none)
        given = ddp.gradients(wrapper.model, group.rank, step, skip[group.rank])
        seen.append(wrapper.backward(wrapper.model(given), **given))
    return seen


@pytest.mark.parametrize(
    ("bucket_cap_mb", "set_to_none"), [(TINY, True), (25, True), (TINY, False)]
)
@pytest.mark.parametrize("name", ["dense", "int8", "momentum"])
def test_parameters_unused_on_one_rank_or_on_all(name, bucket_cap_mb, set_to_none):
    """Unused on one rank: like a gradient of zeros. On all ranks: no gradient, same residual."""
    runs = helpers.run_group(2, with_unused, name, bucket_cap_mb, set_to_none)
    Reference(2, COMPRESSIONS[name]).check(runs)
    for run in runs:
        unused = [n for n, result in run[3].result.items() if result is None]
        assert unused == (["wide", "square", "small"] if set_to_none else [])


class Crossroads(torch.nn.Module):
    """Runs its layers in the order that it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(30, 30) for _ in range(5)])

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def in_other_orders(group, plan):
    """Which layers' weights fill the buckets, after every step."""
    model, alone = pycomm.DataParallel(Crossroads(), bucket_cap_mb=TINY), Crossroads()

    def loss(module, rank, step):
        return module(ddp.batch(rank, step)[:, :30], plan[step][rank]).square().mean()

    orders = []
    for step in range(len(plan)):
        model.zero_grad()
        loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, loss)
        assert wrapped.same(wrapped.gradients_of(model), expected)
        names = {id(p): name.split(".") for name, p in model.module.named_parameters()}
        buckets = [names[id(p)] for bucket in model._exchange._buckets for p in bucket.parameters]
        orders.append([int(name[1]) for name in buckets if name[2] == "weight"])
    return orders


def test_buckets_follow_the_first_backward():
    plan = [[[0, 3, 1, 4, 2]] * 2, [[4, 3, 2, 1, 0]] * 2, [[2, 0], [1]]]
    for orders in helpers.run_group(2, in_other_orders, plan):
        assert orders == [[2, 4, 1, 3, 0]] * 3


def test_ranks_agree_though_their_orders_differ():
    plan = [[[0, 1, 2], [4, 3, 2, 1, 0]], [[4, 1, 2], [1, 2]], [[3, 0, 3], [0, 3, 0]]]
    for orders in helpers.run_group(2, in_other_orders, plan):
        assert orders == [[2, 1, 0, 4, 3]] * 3


def stepping(group, name, bucket_cap_mb, steps, saved=None):
    """Trains; parameters in the end, and all that is to be saved."""
    compression = COMPRESSIONS[name]
    model = pycomm.DataParallel(ddp.network(), compression=compression, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "comm": model.comm_state}
    if saved is not None:
        for key, part in parts.items():
            part.load_state_dict(saved[key])
    for step in steps:
        optimizer.zero_grad()
        wrapped.batch_loss(model, group.rank, step).backward()
        optimizer.step()
    states = {key: copy.deepcopy(part.state_dict()) for key, part in parts.items()}
    return wrapped.parameters_of(model), states


def resumed(group, name):
    """A whole run, and a run resumed at half from a checkpoint, in other buckets."""
    whole, _ = stepping(group, name, 0.02, range(6))
    _, saved = stepping(group, name, 0.02, range(3))
    again, _ = stepping(group, name, TINY, range(3, 6), saved)
    return whole, again


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_resumed_run_is_the_same_to_the_bit(name):
    for whole, again in helpers.run_group(2, resumed, name):
        assert wrapped.same(whole, again)
