"""Hooks, parameter by parameter and bit for bit, against golden models and plain DDP."""

import ddp
import golden
import helpers
import pytest
import torch
import torch.distributed as dist
from ddp import COMPRESSIONS, Reference, Watched
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LAYOUT = {"bucket_cap_mb": 0.05}


def all_of(dtype):
    return dict.fromkeys(ddp.SHAPES, dtype)


def train(group, name, dtype, steps, options):
    watched = Watched(ddp.Given(all_of(dtype)), COMPRESSIONS[name], layout=LAYOUT, **options)
    return watched.run(group.rank, range(steps))


def train_each(group, name):
    return [train(group, name, dtype, 3, {}) for dtype in FLOATS]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_each_parameter_is_what_the_golden_model_says(name):
    for runs in zip(*helpers.run_group(2, train_each, name), strict=True):
        Reference(2, COMPRESSIONS[name]).check(runs)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_three_ranks(name):
    runs = helpers.run_group(3, train, name, torch.float32, 3, {})
    Reference(3, COMPRESSIONS[name]).check(runs)


@pytest.mark.parametrize("name", ["int8", "stochastic"])
def test_without_parameters_there_is_no_feedback(name):
    runs = helpers.run_group(2, train, name, torch.float32, 3, {"feedback": False})
    Reference(2, COMPRESSIONS[name], feedback=False).check(runs)


def only_the_square(name, parameter):
    assert parameter.numel() > 0
    return name != "square"


def nothing(name, parameter):
    del name, parameter
    return False


@pytest.mark.parametrize("exclude", [only_the_square, nothing])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_a_predicate_says_what_is_dense(name, exclude):
    runs = helpers.run_group(2, train, name, torch.float32, 3, {"exclude": exclude})
    Reference(2, COMPRESSIONS[name], exclude=exclude).check(runs)


@pytest.mark.parametrize("name", ["int8", "stochastic", "topk"])
def test_the_first_steps_are_dense(name):
    runs = helpers.run_group(2, train, name, torch.float32, 4, {"warmup_steps": 2})
    Reference(2, COMPRESSIONS[name], warmup_steps=2).check(runs)


def ramping(group):
    """Bytes on the wire, step by step, of a top-k that warms up after a warm-up of the state."""
    compression = pycomm.TopK(0.001, density_steps=3)
    model = DistributedDataParallel(ddp.Given())
    state = hooks.CommState(compression, model.named_parameters(), warmup_steps=2)
    model.register_comm_hook(state, hooks.comm_hook)
    seen = []
    for step in range(7):
        model(ddp.gradients(model, group.rank, step)).backward()
        seen.append(state.stats()["ratio"])
    return seen


def test_a_compressions_warm_up_follows_the_states():
    for ratios in helpers.run_group(2, ramping):
        assert ratios[:2] == [1, 1]
        assert 1 < ratios[2] < ratios[3] < ratios[4] < ratios[5] == pytest.approx(ratios[6], 0.01)


def one_of_each(params, optimizer):
    """States and the hooks that are made for them."""
    named = dict(params)
    return [
        (hooks.AllReduceState(), hooks.all_reduce_hook),
        (hooks.Int8State(named.items(), rounding="stochastic"), hooks.int8_hook),
        (hooks.TopKState(named.items(), density=0.1), hooks.topk_hook),
        (hooks.CommState(pycomm.Cast(), named.items()), hooks.comm_hook),
        (
            hooks.LocalSGDState(named.items(), optimizer, period=2, gradient_steps=1),
            hooks.local_sgd_hook,
        ),
    ]


def in_a_pair_and_registered(group, number):
    """Gradients of a few steps, both ways."""
    seen = []
    for alone in (False, True):
        model = DistributedDataParallel(ddp.Given())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, hook = one_of_each(model.named_parameters(), optimizer)[number]
        if alone:
            state.register(model)
        else:
            model.register_comm_hook(state, hook)
        for step in range(3):
            optimizer.zero_grad()
            model(ddp.gradients(model, group.rank, step)).backward()
            seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            if isinstance(state, hooks.LocalSGDState):
                state.step()
    return seen[:3], seen[3:]


@pytest.mark.parametrize("number", range(5))
def test_register_is_the_same_as_the_pair(number):
    runs = helpers.run_group(2, in_a_pair_and_registered, number)
    for paired, registered in runs:
        for pair in zip(paired, registered, strict=True):
            assert all(golden.same_bits(a, b) for a, b in zip(*pair, strict=True))
    mine, theirs = (paired[0] for paired, _ in runs)  # the first step exchanges in all of them
    assert all(golden.same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def as_single_calls(group, name):
    """The hook, and the public operation for each of its parameters."""
    compression = COMPRESSIONS[name]
    watched = Watched(ddp.Given(), compression, layout=LAYOUT)
    residuals = {n: torch.zeros_like(r) for n, r in watched.residuals().items()}
    first = ddp.first_elements(watched.model)
    for number, step in enumerate(watched.run(group.rank, range(3))):
        for one, residual in residuals.items():
            mean = pycomm.compressed_all_reduce(
                step.local[one], compression, residual=residual, step=number,
                offset=first[one], group=group,
            )  # fmt: skip
            assert golden.same_bits(mean, step.result[one])
            assert golden.same_bits(residual, step.residuals[one])


@pytest.mark.parametrize("name", ["int8", "stochastic", "topk"])
def test_same_as_a_compressed_all_reduce_of_each_parameter(name):
    helpers.run_group(2, as_single_calls, name)


def beside_plain_ddp(group):
    """Trains both for a few steps; parameters in the end."""
    made = []
    for hooked in (False, True):
        model = DistributedDataParallel(ddp.network(), bucket_cap_mb=0.02)
        if hooked:
            model.register_comm_hook(hooks.AllReduceState(), hooks.all_reduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(ddp.batch(group.rank, step)).square().mean().backward()
            optimizer.step()
        made.append([p.detach() for p in model.parameters()])
    return made


def test_two_ranks_train_to_the_bits_of_plain_ddp():
    """Halving before or after the addition of two numbers is the same."""
    for plain, hooked in helpers.run_group(2, beside_plain_ddp):
        assert all(golden.same_bits(a, b) for a, b in zip(plain, hooked, strict=True))


def in_place(group, name):
    """The futures hold the buckets' own memory, and gradients stay views of it."""
    layout = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05}
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=layout)
    for step in range(3):
        watched.run(group.rank, [step])
        assert all(future.value().data_ptr() == b.data_ptr() for b, future in watched.exchanges)
        buckets = {buffer.untyped_storage().data_ptr() for buffer, _ in watched.exchanges}
        grads = {p.grad.untyped_storage().data_ptr() for p in watched.model.parameters()}
        assert grads == buckets


@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_results_are_written_where_the_gradients_were(name):
    helpers.run_group(2, in_place, name)


def two_models(group, together):
    """A dense and a compressed one, a small and a large one; in one backward or in two."""
    models = [
        Watched(ddp.Given(), COMPRESSIONS["int8"], layout=LAYOUT),
        Watched(ddp.Given(), COMPRESSIONS["topk"], layout={"bucket_cap_mb": 0.01}),
        Watched(ddp.Given(), None, layout=LAYOUT),
    ]
    seen = [[] for _ in models]
    for step in range(3):
        losses = []
        for number, watched in enumerate(models):
            watched.model.zero_grad()
            given = ddp.gradients(watched.model, group.rank, step + 100 * number)
            losses.append(watched.model(given))
        if together:
            for watched in models:
                watched.begin()
            sum(losses).backward()
        for watched, loss, steps in zip(models, losses, seen, strict=True):
            steps.append(watched.end() if together else watched.backward(loss))
    return seen


@pytest.mark.parametrize("together", [True, False])
def test_several_models_at_once(together):
    runs = helpers.run_group(2, two_models, together)
    for number, name in enumerate(("int8", "topk", "dense")):
        Reference(2, COMPRESSIONS[name]).check([run[number] for run in runs])


def in_a_subgroup(rank, size, store):
    helpers.join_world(rank, size, store)
    part = dist.new_group([0, 2])
    dist.barrier()  # rank 1 must not end while others still connect to it
    if rank == 1:
        return []
    with pycomm.init(part) as group:
        layout = {"process_group": part, "bucket_cap_mb": 0.05}
        watched = Watched(ddp.Given(), COMPRESSIONS["int8"], layout=layout, group=group)
        pycomm.set_default_group(None)
        return watched.run(group.rank, range(3))


def test_a_subgroup():
    runs = helpers.run_ranks(3, in_a_subgroup)
    Reference(2, COMPRESSIONS["int8"]).check([runs[0], runs[2]])


class Signalling(Watched):
    """Leaves a file once the last hook of a step has returned."""

    def hook(self, state, bucket):
        future = super().hook(state, bucket)
        if bucket.is_last():
            self.returned.touch()
        return future


def with_a_late_peer(group, name, folder):
    """Rank 1 begins its backward when all of rank 0's hooks have returned."""
    watched = Signalling(ddp.Given(), COMPRESSIONS[name], layout={"bucket_cap_mb": 0.01})
    seen = []
    for step in range(3):
        watched.model.zero_grad()
        loss = watched.model(ddp.gradients(watched.model, group.rank, step))
        watched.returned = folder / f"step {step}, rank {group.rank}"
        if group.rank == 1:
            helpers.wait_until((folder / f"step {step}, rank 0").exists)
        seen.append(watched.backward(loss))
    return seen


@pytest.mark.parametrize("name", ["dense", "int8", "topk"])
def test_hooks_return_before_a_late_peer_has_begun(name, tmp_path):
    runs = helpers.run_group(2, with_a_late_peer, name, tmp_path)
    Reference(2, COMPRESSIONS[name]).check(runs)
