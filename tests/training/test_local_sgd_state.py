"""LocalSGDState saves and restores its state, refuses wrong ones, and raises if misused."""

import copy

import averaging
import ddp
import golden
import helpers
import pytest
import torch
import wrapped
from averaging import DILOCO, Trainee
from golden import same_tensors
from test_hook_state import saved
from torch import nn

import pycomm
from pycomm import hooks

OPTIONS = {"period": 3, "compression": pycomm.TopK(0.05), **DILOCO}


def go_on(group, steps, start, options, make=dict, gathered=False):
    """Goes on from `start`, every rank's dicts; returns the same, after all weights."""
    trainee = Trainee(group, options=options, **make())
    if start is not None:
        kept = saved(start[0 if gathered else group.rank])
        trainee.model.load_state_dict(kept["model"])
        trainee.optimizer.load_state_dict(kept["optimizer"])
        trainee.state.load_state_dict(kept["comm"])
    weights = [moment.after for moment in trainee.run(steps)]
    kept = {"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}
    return weights, {**kept, "comm": trainee.state.state_dict(gathered)}


def with_remainders():
    return averaging.in_bf16(master_weights="remainder")


@pytest.mark.parametrize(
    ("at", "make", "more"),
    [
        *((at, dict, {}) for at in (0, 1, 3, 5)),
        (5, with_remainders, {}),
        (1, dict, {"gradient_steps": 2}),
        (4, dict, {"gradient_steps": 2}),
        (5, with_remainders, {"local_residuals": True}),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(world, at, make, more):
    options = {**OPTIONS, **more}
    through = world(2).run(go_on, range(8), None, options, make)
    first = world(2).run(go_on, range(at), None, options, make)
    rest = world(2).run(go_on, range(at, 8), [kept for _, kept in first], options, make)
    for (whole, end), (begin, _), (weights, other_end) in zip(through, first, rest, strict=True):
        assert all(map(wrapped.same, whole, [*begin, *weights]))
        assert same_tensors(end, other_end)


def test_an_exchange_may_come_at_once_after_a_resume(world):
    def body(group):
        trainee, resumed = (Trainee(group, options=OPTIONS) for _ in range(2))
        trainee.run(range(4))
        resumed.module.load_state_dict(trainee.module.state_dict())
        resumed.state.load_state_dict(trainee.state.state_dict())
        assert trainee.state.exchange()
        assert resumed.state.exchange()
        return wrapped.same(trainee.weights(), resumed.weights())

    assert all(world(2).run(body))


def without_momentum():
    return {"make_optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}


def test_after_an_exchange_one_rank_can_save_for_all(world):
    """This holds if the optimizer has no states."""
    options = (OPTIONS, without_momentum, True)
    through = world(3).run(go_on, range(9), None, *options)
    first = world(3).run(go_on, range(6), None, *options)
    assert not first[1][1]["comm"]
    rest = world(3).run(go_on, range(6, 9), [first[0][1]], *options)
    for (whole, _), (weights, _) in zip(through, rest, strict=True):
        assert all(map(wrapped.same, whole[6:], weights))


def test_one_rank_cannot_save_for_all_in_mid_period(world):
    trainee = Trainee(world(1).groups[0], options=OPTIONS)
    trainee.run(range(4))
    with pytest.raises(ValueError, match=r"gathered must be False 1 steps after"):
        trainee.state.state_dict(gathered=True)
    trainee.state.exchange()
    assert trainee.state.state_dict(gathered=True)["steps"] == 4


def test_one_rank_cannot_save_for_all_with_local_residuals(world):
    trainee = Trainee(world(1).groups[0], options={**OPTIONS, "local_residuals": True})
    with pytest.raises(ValueError, match="gathered must be False with local_residuals"):
        trainee.state.state_dict(gathered=True)


def test_outer_parameters_of_plain_averages_are_refused(world):
    trainee = Trainee(world(1).groups[0])
    with (
        pytest.raises(ValueError, match=r"outer_parameters\(\) needs compression"),
        trainee.state.outer_parameters(),
    ):
        pass


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.1, momentum=0.9)], ids=str)
def test_local_residuals_need_a_compression_without_momentum(world, compression):
    options = {"period": 2, "compression": compression, "local_residuals": True}
    with pytest.raises(ValueError, match="local_residuals needs a compression without momentum"):
        Trainee(world(1).groups[0], options=options)


def test_local_residuals_and_uneven_batches_are_refused(world):
    trainee = Trainee(world(1).groups[0], options={**OPTIONS, "local_residuals": True})
    with (
        pytest.raises(ValueError, match="must be used without local_residuals"),
        trainee.state.join(),
    ):
        pass


def test_a_state_with_and_one_without_local_residuals_do_not_mix(world):
    group = world(1).groups[0]
    trainees = [
        Trainee(group, options={**OPTIONS, "local_residuals": local}) for local in (False, True)
    ]
    for one, other in (trainees, reversed(trainees)):
        one.run(range(3))
        with pytest.raises(ValueError, match="must come from a state with local_residuals="):
            other.state.load_state_dict(one.state.state_dict())


def test_outer_parameters_are_only_for_looking(world):
    trainee = Trainee(world(1).groups[0], options=OPTIONS)
    trainee.run(range(4))
    saved, own = trainee.state.state_dict(), trainee.weights()
    with trainee.state.outer_parameters():
        for wrong in (
            trainee.state.exchange,
            trainee.optimizer.step,
            lambda: trainee.state.load_state_dict(saved),
            trainee.state.state_dict,
            lambda: copy.deepcopy(trainee.state),
            trainee.state.outer_parameters().__enter__,
        ):
            with pytest.raises(RuntimeError, match=r"inside of its outer_parameters\(\)"):
                wrong()
    assert wrapped.same(trainee.weights(), own)
    trainee.run(range(4, 6))


def test_a_forgotten_state_is_seen(world):
    """The control of the test before last."""
    through = world(2).run(go_on, range(8), None, OPTIONS)
    first = world(2).run(go_on, range(5), None, OPTIONS)
    for _, kept in first:
        for velocity in kept["comm"]["outer"]["velocity"].values():
            velocity.zero_()
    rest = world(2).run(go_on, range(5, 8), [kept for _, kept in first], OPTIONS)
    assert not golden.same_bits(rest[0][0][0]["wide"], through[0][0][5]["wide"])


def make(group, module=None, **options):
    return Trainee(group, module=module or ddp.Given(), options={"period": 1, **options})


def kept_by(group, module=None, **options):
    trainee = make(group, module, **options)
    trainee.step(0)
    return trainee.state.state_dict()


def test_dicts_of_others_are_refused(world):
    group = world(1).groups[0]
    trainee = make(group, **DILOCO)
    trainee.step(0)
    before = trainee.state.state_dict()
    others = hooks.AllReduceState(group=group).state_dict()
    dicts = {
        "LocalSGDState": [None, {}, others, {**before, "format": 0}],
        r"\['last', 'velocity'\]": [kept_by(group, outer_lr=0.5)],
        "compression none": [kept_by(group, compression=pycomm.Int8(), **DILOCO)],
    }
    for match, refused in dicts.items():
        for state_dict in refused:
            with pytest.raises(ValueError, match=match):
                trainee.state.load_state_dict(state_dict)
    renamed = saved(before)
    renamed["outer"]["last"]["wider"] = renamed["outer"]["last"].pop("wide")
    with pytest.raises(ValueError, match=r"of this model: .* wide, wider"):
        trainee.state.load_state_dict(renamed)
    with pytest.raises(ValueError, match="must have this state's entries"):
        make(group).state.load_state_dict(before)
    assert same_tensors(before, trainee.state.state_dict())


# Ranks that differ.


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([{"period": 2}, {"period": 3}], "step 2, period 2.*step 3, period 3"),
        ([{"period": 2}, {"period": 2, "gradient_steps": 1}], None),
        ([{"period": 2, **DILOCO}, {"period": 2, "outer_lr": 0.7}], "options"),
        ([{"period": 2, "compression": c} for c in (pycomm.Int8(), pycomm.TopK(0.1))], "options"),
    ],
)
def test_ranks_with_other_settings_are_a_mismatch(world, options, shown):
    def body(group):
        trainee = Trainee(group, options=options[group.rank])
        with pytest.raises(pycomm.Mismatch) as caught:
            trainee.run(range(6))
        return str(caught.value)

    one, other = world(2).run(body)
    if shown is not None:
        assert one == other
        assert shown.split(".*")[-1] in one
        assert shown.split(".*")[0] in one


def test_ranks_at_other_steps_are_a_mismatch(world):
    def body(group):
        trainee = Trainee(group, options={"period": 100})
        trainee.run(range(2 + group.rank))
        with pytest.raises(
            pycomm.Mismatch, match=r"rank 0 at step 2, .* rank 1 at step 3, "
        ) as caught:
            trainee.state.exchange()
        return caught.value.rank, caught.value.operation

    assert world(2).run(body) == [(1, "local_sgd")] * 2


def test_ranks_that_began_differently_are_a_mismatch(world):
    def body(group):
        trainee = Trainee(group, options={"period": 2, **DILOCO})
        with torch.no_grad():
            trainee.module.bias[3] = group.rank
        trainee.step(0)
        with pytest.raises(pycomm.Mismatch, match="parameters"):
            trainee.step(1)

    world(2).run(body)


class OwnError(Exception):
    pass


def test_an_error_in_one_rank_stops_the_others(world):
    seen = {}

    def body(group):
        trainee = Trainee(group)
        trainee.run(range(3))
        if group.rank == 1:
            raise OwnError
        with pytest.raises(pycomm.PeerDied) as caught:
            trainee.step(3)
        seen[group.rank] = caught.value.rank

    with pytest.raises(OwnError):
        world(3).run(body)
    assert seen == {0: 1, 2: 1}


# What is not wired up.


def test_a_forgotten_call_is_noticed(world):
    trainee = make(world(1).groups[0], period=5)
    trainee.backward(0)
    trainee.optimizer.step()
    trainee.backward(1)
    before = trainee.weights()
    with pytest.raises(RuntimeError, match="must be called after every step of the optimizer"):
        trainee.optimizer.step()
    assert wrapped.same(before, trainee.weights())
    trainee.state.step()
    trainee.optimizer.step()


def test_a_call_too_many_is_noticed(world):
    trainee = make(world(1).groups[0], period=5)
    trainee.step(0)
    with pytest.raises(RuntimeError, match=r"call register\(model\)"):
        trainee.state.step()


def test_another_models_gradients_are_noticed(world):
    trainee = make(world(1).groups[0])
    model = pycomm.DataParallel(ddp.Given(), state=trainee.state)
    with pytest.raises(ValueError, match="params must name every parameter"):
        model(ddp.gradients(model, 0, 0)).backward()


def test_a_parameter_that_comes_late_is_noticed(world):
    trainee = make(world(1).groups[0])
    trainee.step(0)
    trainee.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"optimizer changes; one of shape \(3,\)"):
        trainee.step(1)


def hooks_of_others(group):
    state = make(group).state
    model = torch.nn.parallel.DistributedDataParallel(ddp.network())
    model.register_comm_hook(state, hooks.all_reduce_hook)
    with pytest.raises(TypeError, match="AllReduceState"):
        model(ddp.batch(0, 0)).sum().backward()


def test_other_hooks_refuse_it():
    helpers.run_group(1, hooks_of_others)


BAD = {
    "period": [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)],
    "outer_lr": [(0, ValueError), (-1, ValueError), (float("nan"), ValueError)],
    "outer_momentum": [(1, ValueError), (-0.1, ValueError), (float("nan"), ValueError)],
    "gradient_steps": [(-1, ValueError), (1.5, TypeError)],
    "inner_group": [("world", TypeError)],
    "group": [(3, TypeError)],
    "compression": [("int8", TypeError)],
    "exclude": [(3, TypeError)],
    "optimizer": [(None, TypeError), ([], TypeError)],
    "params": [(None, TypeError), ([], ValueError), ([torch.zeros(3)], TypeError)],
}


@pytest.mark.parametrize(("name", "value", "kind"), [(n, *v) for n in BAD for v in BAD[n]])
def test_bad_arguments_are_refused(world, name, value, kind):
    module = ddp.Given()
    good = {
        "params": module.named_parameters(),
        "optimizer": averaging.sgd(module.parameters()),
        "group": world(1).groups[0],
        "period": 2,
    }
    with pytest.raises(kind, match=name):
        hooks.LocalSGDState(**{**good, name: value})


def test_parameters_that_nobody_exchanges_are_refused(world):
    module = ddp.Given()
    some = [(n, p) for n, p in module.named_parameters() if n != "wide"]
    with pytest.raises(ValueError, match=r"params must name every .* \(280, 250\)"):
        hooks.LocalSGDState(
            some, averaging.sgd(module.parameters()), period=2, group=world(1).groups[0]
        )


@pytest.mark.parametrize(
    ("dtype", "compression", "match"),
    [
        (torch.complex64, None, "real floats, got torch.complex64 for weight"),
        (torch.float64, pycomm.Int8(), "params: weight must have one of the dtypes"),
        (torch.float32, pycomm.TopK(k=9700), "k = 9700 of 10000 would send"),
    ],
)
def test_what_no_exchange_could_carry_is_refused(world, dtype, compression, match):
    weight = nn.Parameter(torch.zeros(100, 100, dtype=dtype))
    optimizer, group = torch.optim.SGD([weight]), world(1).groups[0]
    options = {"period": 500, "compression": compression, "group": group}
    with pytest.raises(ValueError, match=match):
        hooks.LocalSGDState([("weight", weight)], optimizer, **options)


@pytest.mark.parametrize("name", ["compression", "grad_scaler", "group"])
def test_the_wrapper_refuses_options_of_the_state(world, name):
    group = world(1).groups[0]
    scaler = torch.amp.GradScaler("cpu")
    value = {"compression": pycomm.Int8(), "grad_scaler": scaler, "group": group}[name]
    for state in (make(group).state, hooks.AllReduceState(group=group)):
        with pytest.raises(ValueError, match=f"{name} must be given to the state"):
            pycomm.DataParallel(ddp.Given(), state=state, **{name: value})
    with pytest.raises(TypeError, match=r"state must be one of pycomm\.hooks, got 'local'"):
        pycomm.DataParallel(ddp.Given(), state="local")
    other = hooks.Int8State(ddp.Given().named_parameters(), group=group)
    with pytest.raises(ValueError, match=r"state must be made with named_parameters\(\) of this"):
        pycomm.DataParallel(ddp.Given(), state=other)


def test_weights_and_joining_where_they_mean_nothing_are_refused(world):
    trainee = make(world(1).groups[0], gradient_steps=1)
    with pytest.raises(ValueError, match="after the warm-up"), trainee.model.join():
        pass
    trainee.step(0)
    with pytest.raises(ValueError, match="weight must be given where gradients are exchanged"):
        trainee.model(ddp.gradients(trainee.model, 0, 0), weight=2.0)
    with trainee.model.join():
        trainee.step(1)
