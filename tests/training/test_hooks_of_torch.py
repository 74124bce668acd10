"""Hooks at the signature of torch's own, which get a process group, and inside torch's wrappers."""

import copy
import gc
import io
import os
import signal
import weakref

import ddp
import golden
import helpers
import pytest
import torch
import torch.distributed as dist
from ddp import COMPRESSIONS, LAYOUTS, Reference, Watched
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import pycomm
from pycomm import hooks

STATELESS = {"dense": hooks.all_reduce_hook, "int8": hooks.int8_hook}
WRAPPERS = {
    "fp16": (default_hooks.fp16_compress_wrapper, torch.float16),
    "bf16": (default_hooks.bf16_compress_wrapper, torch.bfloat16),
}
AS_STATE = {
    "none": lambda: None,
    "torch's default": lambda: dist.group.WORLD,
    "another": lambda: dist.new_group([0, 1]),
}


class Stateless(Watched):
    """A model with a hook that gets what torch's hooks get."""

    def __init__(self, module, name, given, layout):
        super().__init__(module, COMPRESSIONS[name], feedback=False, layout=layout)
        self.given, self._hook = given, STATELESS[name]

    def hook(self, state, bucket):
        del state
        return super().hook(self.given, bucket)


def train_stateless(group, name):
    """By process group and layout, the steps; one parameter of the model is never used."""
    seen = {}
    for kind, make in AS_STATE.items():
        given = make()
        for where, layout in LAYOUTS.items() if kind == "none" else [("some buckets", {})]:
            skip = ["line"] if where in ("unused", "static") else []
            watched = Stateless(ddp.Given(), name, given, layout)
            seen[kind, where] = watched.run(group.rank, range(3), skip)
    return seen


@pytest.mark.parametrize("name", STATELESS)
def test_a_process_group_as_the_state(name):
    mine, theirs = helpers.run_group(2, train_stateless, name)
    for case in mine:
        Reference(2, COMPRESSIONS[name], feedback=False).check([mine[case], theirs[case]])


def on_a_part(rank, size, store):
    """Ranks 0 and 2 train on their own; afterwards all three train together."""
    helpers.join_world(rank, size, store)
    part = dist.new_group([0, 2])
    alone, together = None, None
    if rank != 1:
        model = DistributedDataParallel(nn.Linear(200, 30), process_group=part)
        model.register_comm_hook(part, hooks.all_reduce_hook)
        model(torch.full((1, 200), float(rank))).sum().backward()
        alone = model.module.weight.grad.unique().tolist()
        assert pycomm._init._default is None
    model = DistributedDataParallel(nn.Linear(200, 30))
    model.register_comm_hook(None, hooks.all_reduce_hook)
    model(torch.full((1, 200), float(rank + 1))).sum().backward()
    together = model.module.weight.grad.unique().tolist()
    return alone, together


def test_a_part_of_the_ranks_does_not_become_the_default_group():
    assert helpers.run_ranks(3, on_a_part) == [([1.0], [2.0]), (None, [2.0]), ([1.0], [2.0])]


def one_name_twice(rank, size, store):
    """A process group with the name of a destroyed one has a group of its own."""
    made = []
    for number in range(2):
        helpers.join_world(rank, size, f"{store}{number}")
        part = dist.new_group([0, 1])
        model = DistributedDataParallel(nn.Linear(20, 3), process_group=part)
        model.register_comm_hook(part, hooks.all_reduce_hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 20), float(rank))).sum().backward()
            assert (model.module.weight.grad == 0.5).all()
        (known, group), *others = pycomm._init._over.items()
        assert known is part
        assert not others
        for earlier in made:
            with pytest.raises(pycomm.GroupUnusable):
                pycomm.barrier(group=earlier)
        made.append(group)
        del model
        dist.destroy_process_group()


def test_a_process_group_with_the_name_of_an_earlier_one():
    helpers.run_ranks(2, one_name_twice)


def accumulate(group, hook):
    """Gradients of two backwards that are exchanged together, with a frozen parameter."""
    module = ddp.network()
    module[2].weight.requires_grad_(False)
    model = DistributedDataParallel(module, bucket_cap_mb=0.02)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            model(ddp.batch(group.rank, 2 * step)).square().mean().backward()
        model(ddp.batch(group.rank, 2 * step + 1)).square().mean().backward()
    assert module[2].weight.grad is None
    return [p.grad.clone() for p in module.parameters() if p.requires_grad]


def test_accumulated_gradients_of_a_model_with_a_frozen_parameter():
    """As torch's DDP without a hook averages them; int8 loses at most 2 A/254."""
    plain = helpers.run_group(2, accumulate, None)
    for hook, lost in ((hooks.all_reduce_hook, 0), (hooks.int8_hook, 2 / 254)):
        mine, theirs = helpers.run_group(2, accumulate, hook)
        for one, other, expected in zip(mine, theirs, plain[0], strict=True):
            assert golden.same_bits(one, other)
            error = lost * 1.5 * expected.abs().max()  # of a mean, whose parts may be larger
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=max(float(error), 1e-7))


class InWrapper(Watched):
    """A hook in one of torch's wrappers, with a state or without one."""

    def __init__(self, module, name, wrapper, stateless, layout):
        self.wrapper, self.stateless = wrapper, stateless
        super().__init__(module, COMPRESSIONS[name], feedback=not stateless, layout=layout)

    def hook(self, state, bucket):
        def inner(state, bucket):
            return super(InWrapper, self).hook(None if self.stateless else state, bucket)

        return self.wrapper(inner)(state, bucket)

    def end(self):
        """Results in 16 bits, which they have gone through."""
        seen = super().end()
        for name, result in seen.result.items():
            if result is not None:
                assert result.dtype == torch.float32
                seen.result[name] = result.to(seen.local[name].dtype)
                assert torch.equal(seen.result[name].float(), result)
        return seen


def in_a_wrapper(group, name, wrapper, stateless):
    runs = {}
    for where, layout in LAYOUTS.items():
        skip = ["line"] if where in ("unused", "static") else []
        watched = InWrapper(ddp.Given(), name, WRAPPERS[wrapper][0], stateless, layout)
        runs[where] = watched.run(group.rank, range(3), skip)
        halves = {tensor.dtype for step in runs[where] for tensor in step.local.values()}
        assert halves == {WRAPPERS[wrapper][1]}
    return runs


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("name", "stateless"),
    [("dense", True), ("dense", False), ("int8", True), ("int8", False), ("topk", False)],
)
def test_in_torchs_wrappers(name, stateless, wrapper):
    mine, theirs = helpers.run_group(2, in_a_wrapper, name, wrapper, stateless)
    for where in mine:
        reference = Reference(2, COMPRESSIONS[name], feedback=not stateless)
        reference.check([mine[where], theirs[where]])


def spoil(group, stateless, infinite):
    """A gradient that 16 bits cannot hold, on one rank."""
    watched = InWrapper(ddp.Given(), "int8", WRAPPERS["fp16"][0], stateless, {})
    watched.run(group.rank, range(1))
    watched.model.zero_grad()
    given = ddp.gradients(watched.model, group.rank, 1)
    given["wide"][3, 3] = infinite if group.rank == 1 else 0.0
    watched.model(given).backward()
    return watched.model.module.wide.grad.isfinite().all().item()


@pytest.mark.parametrize("stateless", [True, False])
def test_an_overflow_in_a_wrapper_reaches_every_rank(stateless):
    assert helpers.run_group(2, spoil, stateless, 1e6) == [False, False]
    assert helpers.run_group(2, spoil, stateless, 1e3) == [True, True]


def until_a_peer_is_gone(group, wrapped):
    model = DistributedDataParallel(ddp.Given(), bucket_cap_mb=0.001)
    hook, number = hooks.int8_hook, 0
    if wrapped:
        hook = default_hooks.fp16_compress_wrapper(hook)

    def dying(state, bucket):
        if group.rank == 1 and number == 1 and bucket.index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return hook(state, bucket)

    model.register_comm_hook(None, dying)
    model(ddp.gradients(model, group.rank, 0)).backward()
    number = 1
    loss = model(ddp.gradients(model, group.rank, 1))
    with pytest.raises(pycomm.PeerDied) as caught:
        loss.backward()
    return caught.value.rank


@pytest.mark.parametrize("wrapped", [False, True])
def test_backward_raises_a_peers_death(wrapped):
    arguments = (until_a_peer_is_gone, {"timeout": 30}, wrapped)
    with helpers.Ranks(2, helpers.in_group, *arguments) as ranks:
        (survivor,) = ranks.wait_for([0])
    assert survivor.error is None, survivor.trace
    assert survivor.value == 1


def with_hooks_that_differ(group):
    model = DistributedDataParallel(ddp.Given())
    model.register_comm_hook(None, [hooks.all_reduce_hook, hooks.int8_hook][group.rank])
    with pytest.raises(pycomm.Mismatch):
        model(ddp.gradients(model, group.rank, 0)).backward()


def without_residuals(group):
    """What needs a state says so."""
    wrong = [
        (hooks.topk_hook, "TopKState for topk_hook"),
        (hooks.local_sgd_hook, "LocalSGDState for local_sgd_hook"),
    ]
    for hook, message in wrong:
        for given, kind in ((None, "NoneType"), (dist.group.WORLD, "ProcessGroup")):
            model = DistributedDataParallel(ddp.network())
            model.register_comm_hook(given, hook)
            with pytest.raises(TypeError, match=f"{message}, got {kind}: only all_reduce_hook and"):
                model(ddp.batch(group.rank, 0)).sum().backward()


def leave_nothing(group):
    """When the model is gone, no hook keeps its parameters or buckets."""
    kept = []

    def remembered(state, bucket):
        kept.append(weakref.ref(bucket.buffer().untyped_storage()))
        kept.append(weakref.ref(bucket.parameters()[0]))
        return hooks.int8_hook(state, bucket)

    model = DistributedDataParallel(ddp.network())
    model.register_comm_hook(None, remembered)
    model(ddp.batch(group.rank, 0)).sum().backward()
    assert any(reference() is not None for reference in kept)
    del model
    gc.collect()
    assert len(kept) >= 2
    assert all(reference() is None for reference in kept)


def default_group_of_a_part(rank, size, store):
    """The first group of pycomm has one rank, and torch's default process group has all."""
    helpers.join_world(rank, size, store)
    parts = [dist.new_group([each]) for each in range(size)]
    pycomm.init(parts[rank])
    model = DistributedDataParallel(nn.Linear(200, 30))
    model.register_comm_hook(dist.group.WORLD, hooks.all_reduce_hook)
    model(torch.full((1, 200), float(rank))).sum().backward()
    return model.module.weight.grad.unique().tolist()


def test_the_default_process_group_is_all_ranks_where_the_default_group_is_not():
    assert helpers.run_ranks(2, default_group_of_a_part) == [[0.5], [0.5]]


def copied_and_pickled(group):
    """As with torch's own hooks: None can be pickled, a process group cannot."""
    model = DistributedDataParallel(ddp.network())
    model.register_comm_hook(None, hooks.int8_hook)
    torch.save(model, io.BytesIO())
    copied = DistributedDataParallel(copy.deepcopy(model).module)
    copied.register_comm_hook(dist.group.WORLD, hooks.int8_hook)
    copied(ddp.batch(group.rank, 0)).sum().backward()
    with pytest.raises(TypeError, match="cannot pickle"):
        torch.save(copied, io.BytesIO())


def slots_that_torch_takes(group):
    """These keep the one hook for themselves, so torch refuses another one."""
    mixed = _MixedPrecision(param_dtype=torch.bfloat16)
    model = DistributedDataParallel(nn.Linear(3, 3), mixed_precision=mixed)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, hooks.int8_hook)

    module = nn.Linear(3, 3)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, hooks.int8_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model(torch.ones(1, 3))
    del group


def names_that_torch_refuses(group):
    """On the CPU; a function of another name that calls the wrapped hook is not refused."""
    wrapped = default_hooks.bf16_compress_wrapper(hooks.int8_hook)
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="BF16"):
        model.register_comm_hook(None, wrapped)
    model.register_comm_hook(None, lambda state, bucket: wrapped(state, bucket))
    model(torch.full((1, 3), group.rank + 1.0)).sum().backward()
    assert (model.module.weight.grad == 1.5).all()


@pytest.mark.parametrize(
    "body",
    [
        with_hooks_that_differ,
        without_residuals,
        leave_nothing,
        copied_and_pickled,
        slots_that_torch_takes,
        names_that_torch_refuses,
    ],
)
def test_under_torchs_rules(body):
    helpers.run_group(2, body)


def compiled(group, name):
    """Steps of a compiled DistributedDataParallel."""
    watched = Stateless(ddp.network(), name, None, {})
    run = torch.compile(watched.model, backend="aot_eager")
    seen = []
    for step in range(3):
        watched.model.zero_grad()
        seen.append(watched.backward(run(ddp.batch(group.rank, step)).square().mean()))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", STATELESS)
def test_a_compiled_model(name):
    runs = helpers.run_group(2, compiled, name)
    Reference(2, COMPRESSIONS[name], feedback=False).check(runs)


def with_the_reducer_in_python(group):
    """It passes hooks a pair of gradient and parameter."""
    torch._dynamo.config.optimize_ddp = "python_reducer"
    for state, hook in ((None, hooks.int8_hook), (hooks.AllReduceState(), hooks.all_reduce_hook)):
        torch._dynamo.reset()
        model = DistributedDataParallel(ddp.network())
        model.register_comm_hook(state, hook)
        run = torch.compile(model, backend="aot_eager")
        with pytest.raises(TypeError, match=r"GradBucket, got tuple: hooks need"):
            run(ddp.batch(group.rank, 0)).square().mean().backward()


def test_the_reducer_in_python_is_refused():
    helpers.run_group(1, with_the_reducer_in_python)
