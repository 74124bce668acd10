"""Code that takes a torch.optim.Optimizer takes these optimizers, with the results of torch's."""

import copy
import inspect
import io
import pickle

import golden
import helpers
import pytest
import torch
import torch.distributed as dist
from optimizing import OPTIMIZERS, Case, gradients, parameters, set_gradients
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

import pycomm.optim as optim

BF16 = torch.bfloat16
PAIRS = {
    "adam": (torch.optim.Adam, optim.FusedAdam),
    "adamw": (torch.optim.AdamW, optim.FusedAdamW),
    "sgd": (torch.optim.SGD, optim.FusedSGD),
}


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def advance(optimizer, params, steps):
    for step in steps:
        set_gradients(params, gradients(params, step))
        optimizer.step()


# Learning rates.

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 1 - 0.01 * n),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, power=2),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 3, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.01, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


def test_all_schedulers_are_here():
    classes = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, schedulers.LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedulers(kind, name, tensor_lr):
    """Rates and momenta change as torch's do, and the steps that they are made for follow."""
    seen = []
    for optimizer_class in PAIRS[name]:
        params = parameters(seed=4, shapes=((5, 3), (40,)))
        options = {"momentum": 0.9} if name == "sgd" else {}
        rate = torch.tensor(1e-2) if tensor_lr else 1e-2
        optimizer = optimizer_class(params, lr=rate, **options)
        scheduler, trajectory = SCHEDULERS[kind](optimizer), []
        for step in range(10):
            advance(optimizer, params, [step])
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            group = optimizer.param_groups[0]
            trajectory.append((float(group["lr"]), group.get("momentum"), group.get("betas")))
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == (
            tensor_lr and isinstance(seen[0][2], torch.Tensor)
            if seen
            else isinstance(group["lr"], torch.Tensor)
        )
        seen.append((trajectory, params, group["lr"]))
    (theirs, their_params, _), (ours, our_params, _) = seen
    assert ours == theirs
    assert len({rate for rate, *_ in ours}) > 1
    close(our_params, their_params)


# What optimizers are asked for.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks(name):
    """Around steps, states and loading; each may replace what it is given."""
    params = parameters()
    optimizer = Case(name).make(params)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    advance(optimizer, params, [0])
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["before", "after", "saving", "loaded"]


def test_hooks_of_all_optimizers():
    seen = []
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        params = parameters()
        advance(Case("lion").make(params), params, [0, 1])
    finally:
        hook.remove()
    assert len(seen) == 2


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_go_on_alike(name, way):
    """With parameters, schedulers' patches and all."""
    params = parameters(BF16)
    optimizer = Case(name, dtype=BF16, master="remainder", states="8bit").make(params, max_norm=2.0)
    schedulers.StepLR(optimizer, 2)
    advance(optimizer, params, range(2))
    if way == "deepcopy":
        again, copied = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        again, copied = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        again, copied = torch.load(file, weights_only=False)
    assert copied.max_norm == 2.0
    advance(optimizer, params, range(2, 4))
    advance(copied, again, range(2, 4))
    for one, other in zip(params, again, strict=True):
        assert one is not other
        assert golden.same_bits(one.detach(), other.detach())
    assert copied.grad_norm == optimizer.grad_norm


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_grad(name):
    params = parameters()
    optimizer = Case(name).make(params)
    advance(optimizer, params, [0])
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(map(torch.equal, before, params))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures(name):
    """Called once, with gradients enabled, whatever surrounds the step; the loss is returned."""
    params = parameters()
    optimizer = Case(name).make(params)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        return loss

    before = sum((param.detach() ** 2).sum() for param in params)
    with torch.no_grad():
        loss = optimizer.step(closure)
        optimizer.step(closure=closure)
    assert calls == [True, True]
    assert torch.equal(loss, before)
    assert params[1].grad is not None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups(name):
    """Options by group, and groups that are added later; missing options are the defaults."""
    first, second = parameters(shapes=((7,), (9,)))
    optimizer = Case(name).make([{"params": [first], "lr": 0.5}])
    optimizer.add_param_group({"params": second, "states": "bf16"})
    advance(optimizer, [first, second], [0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, optimizer.defaults["lr"]]
    kinds = [
        {t.dtype for k, t in optimizer.state[p].items() if k != "step"} for p in (first, second)
    ]
    assert kinds == [{torch.float32}, {BF16}]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [first]})
    named = Case(name).make([("weight", first), ("bias", second)])
    assert named.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models(average):
    """torch.optim.swa_utils beside both."""
    seen = []
    for optimizer_class in PAIRS["adamw"]:
        torch.manual_seed(0)
        model = torch.nn.Linear(9, 4)
        multi = swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=multi)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        for step in range(6):
            advance(optimizer, list(model.parameters()), [step])
            averaged.update_parameters(model)
        seen.append(list(averaged.parameters()))
        assert not torch.equal(seen[-1][0], model.weight)
    close(*reversed(seen))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_steps(name, backend):
    """Compiled around the optimizer, and the step alone; both break the graph and no more."""

    def train(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = Case(name).make(model.parameters(), max_norm=1.0)

        def whole(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        if compiled:
            whole = torch.compile(whole, backend=backend)
        for step in range(3):
            whole(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        (torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step)()
        return list(model.parameters()), [optimizer.state[p]["step"] for p in model.parameters()]

    torch._dynamo.reset()
    ours, plain = train(True), train(False)
    assert ours[1] == plain[1] == [4, 4]
    close(ours[0], plain[0])


# Distributed.


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", [Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "8bit"),
                                  Case("sgd"), Case("lion", dtype=BF16)], ids=str)  # fmt: skip
def test_helpers_of_distributed_checkpoints(case, flat):
    """By names of parameters, into a model that has not stepped yet."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(70, 80), torch.nn.LayerNorm(80)).to(case.dtype)
        return model, case.make(model.parameters())

    (model, optimizer), (other, resumed) = make(0), make(1)
    advance(optimizer, list(model.parameters()), range(3))
    saved = dcp.get_state_dict(model, optimizer, options=options)
    before = [param.detach().clone() for param in other.parameters()]
    dcp.get_optimizer_state_dict(other, resumed, options=options)  # makes states, moves nothing
    assert all(map(torch.equal, before, other.parameters()))
    model_state, optimizer_state = copy.deepcopy(saved)
    dcp.set_state_dict(
        other,
        resumed,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    for one, again in ((model, optimizer), (other, resumed)):
        advance(again, list(one.parameters()), range(3, 5))
    for one, again in zip(model.parameters(), other.parameters(), strict=True):
        assert golden.same_bits(one.detach(), again.detach())
        for key, value in optimizer.state[one].items():
            assert golden.same_bits(value, resumed.state[again][key]), key


def shard(rank, size, store, states):
    """Trains with ZeroRedundancyOptimizer; returns the weights and the gathered states."""
    with helpers.member(rank, size, store):
        params = parameters(shapes=((33, 7), (5000,), (64,), (1,)))
        options = {"lr": 1e-2, "states": states, "max_norm": None}
        optimizer = ZeroRedundancyOptimizer(params, optim.FusedLion, **options)
        advance(optimizer, params, range(3))
        optimizer.consolidate_state_dict(0)
        saved = optimizer.state_dict() if rank == 0 else None
        dist.barrier()
        return [param.detach().clone() for param in params], saved


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_zero_redundancy_optimizer(states):
    """Sharded by torch over two ranks.

    The bits are those of one rank, unless random ones round: a rank numbers its parameters anew.
    """
    (ours, saved), (others, _) = helpers.run_ranks(2, shard, states)
    params = parameters(shapes=((33, 7), (5000,), (64,), (1,)))
    whole = optim.FusedLion(params, lr=1e-2, states=states)
    advance(whole, params, range(3))
    exact = states == "fp32"
    for number, (param, one, other) in enumerate(zip(params, ours, others, strict=True)):
        assert golden.same_bits(one, other)
        moments = saved["state"][number]["exp_avg"], whole.state[param]["exp_avg"]
        assert golden.same_bits(param.detach(), one) or not exact
        assert golden.same_bits(*moments) or not exact
        assert torch.allclose(*moments, rtol=3 * 2.0**-7, atol=1e-3)
