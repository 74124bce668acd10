"""Checkpoints: bit for bit within a form, converted between forms, and of other optimizers."""

import copy
import io

import golden
import pytest
import torch
from optimizing import Case, gradients, parameters, run, set_gradients

import pycomm.optim as optim

BF16 = torch.bfloat16
CASES = [
    Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "8bit"),
    Case("adam", states="bf16"),
    Case("adam", {"amsgrad": True}, torch.float16, None, "fp32", "fp16"),
    Case("sgd", {"dampening": 0.2}, torch.float16, None, "fp32", "fp16"),
    Case("lion", dtype=BF16, stochastic=True, seed=3),
    Case("lamb", dtype=BF16, master="remainder", states="bf16", stochastic=True),
]


def advance(params, optimizer, steps):
    for step in steps:
        set_gradients(params, gradients(params, step))
        optimizer.step()


def tensors(params, optimizer):
    return [*params, *(t for p in params for t in optimizer.state[p].values())]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["saved", "copied"])
def test_going_on_changes_no_bit(case, way):
    params, optimizer = run(case)
    if way == "saved":
        file = io.BytesIO()
        torch.save({"params": params, "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        again = [torch.nn.Parameter(p.detach().clone()) for p in saved["params"]]
        resumed = case.make(again)
        resumed.load_state_dict(saved["optimizer"])
    else:
        again, resumed = copy.deepcopy((params, optimizer))
    advance(params, optimizer, range(3, 6))
    advance(again, resumed, range(3, 6))
    for one, other in zip(tensors(params, optimizer), tensors(again, resumed), strict=True):
        assert golden.same_bits(one.detach(), other.detach())


def test_a_checkpoint_is_safe_to_unpickle():
    _, optimizer = run(CASES[0])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["states"] == "8bit"


@pytest.mark.parametrize("states", ["fp32", "bf16", "fp16", "8bit"])
@pytest.mark.parametrize("master", [None, "fp32", "remainder"])
def test_loading_converts(states, master):
    """Any form loads into any other: moments up to rounding, weights exactly if both keep them."""
    sources = [
        Case("adamw", {"amsgrad": True}, BF16, None, "fp32"),
        Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "fp16"),
    ]
    for source in (CASES[0], *sources):
        params, optimizer = run(source)
        other = Case("adamw", {"amsgrad": True}, BF16, None, master, states)
        again = [torch.nn.Parameter(p.detach().clone()) for p in params]
        loaded = other.make(again)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expected, got = (o.state_dict(format="torch")["state"] for o in (optimizer, loaded))
        assert loaded.param_groups[0]["states"] == states
        for number, state in expected.items():
            limit = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-10, "8bit": 1 / 60}[states]
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                most = state[name].abs().max() if state[name].numel() else 0
                assert ((got[number][name] - state[name]).abs() <= limit * most).all()
            assert got[number]["step"] == state["step"] == 3
            if master is not None:
                assert golden.same_bits(got[number]["master_param"], state["master_param"])
        advance(again, loaded, [3])


def test_second_moments_in_fp16_of_torch():
    """torch stores them as they are, pycomm as roots; the names distinguish the two."""
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    peer = torch.optim.Adam([param])
    param.grad = torch.full_like(param, 3.0)
    peer.step()
    assert peer.state[param]["exp_avg_sq"].dtype == torch.float16
    loaded = optim.FusedAdam([param], states="fp16")
    loaded.load_state_dict(peer.state_dict())
    state = loaded.state[param]
    assert "exp_avg_sq" not in state
    assert state["exp_avg_sq_root"].dtype == torch.float16
    moment = peer.state[param]["exp_avg_sq"].float()
    assert torch.allclose(state["exp_avg_sq_root"].float().square(), moment, rtol=2**-10)


def test_loading_masters_leaves_parameters_as_they_were():
    """Also where a weight lies between two bf16 numbers, of which the other one is even."""
    param = torch.nn.Parameter(torch.full((8,), 1 + 2**-7, dtype=BF16))
    optimizer = optim.FusedSGD([param], lr=0.0, momentum=0.9, master_weights="remainder")
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[param]["remainder"].fill_(-(2**15))
    again = torch.nn.Parameter(param.detach().clone())
    loaded = optim.FusedSGD([again], lr=0.0, momentum=0.9, master_weights="fp32")
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state[again]["master_param"][0] == 1 + 2**-8
    assert torch.equal(again, param)


@pytest.mark.parametrize("master", ["remainder", "fp32"])
def test_weights_that_are_set_between_steps_are_rounded_as_by_a_step(master):
    """Also where they lie between two bf16 numbers, of which the other one is even."""
    param = torch.nn.Parameter(torch.zeros(8, dtype=BF16))
    optimizer = optim.FusedSGD([param], lr=0.0, master_weights=master)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    beside = optimizer.state[param].get("remainder", optimizer.state[param].get("master_param"))
    place = beside.data_ptr()
    weights = torch.linspace(-3, 3, 8)
    weights[0] = 1 + 2**-8
    optimizer.set_full_weights(param, weights)
    before = param.detach().clone()
    optimizer.step()
    assert beside.data_ptr() == place
    assert before[0] == 1 + 2**-7
    assert torch.equal(before, param)
    assert torch.equal(optimizer.full_weights(param), weights)


def test_remainders_and_fp32_masters_train_alike():
    """Both have the same weights, to the last bit."""
    seen = []
    for master in ("fp32", "remainder"):
        case = Case("adamw", dtype=BF16, grad_dtype=torch.float32, master=master)
        params = parameters(BF16)
        optimizer = case.make(params)
        advance(params, optimizer, [])
        for step in range(20):
            set_gradients(params, gradients(params, step, torch.float32))
            optimizer.step()
        states = optimizer.state_dict(format="torch")["state"]
        seen.append([states[n]["master_param"] for n in range(len(params))])
    for one, other in zip(*seen, strict=True):
        assert golden.same_bits(one, other)


def stepped(kind, shapes, **options):
    """An optimizer with 8-bit states, and a checkpoint of it."""
    params = parameters(shapes=shapes)
    optimizer = kind(params, lr=1e-2, states="8bit", **options)
    advance(params, optimizer, [0])
    return params, optimizer, optimizer.state_dict()


@pytest.mark.parametrize("peer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("foreach", [False, True])
def test_torch_does_not_take_codes_for_moments(peer, foreach):
    """Its Adam refuses to step, before it changes anything; beside codes there are fp32 states."""
    params, optimizer, native = stepped(optim.FusedAdamW, ((5000,), (7,), (64, 65)))
    before = copy.deepcopy(params)
    theirs = peer(params, foreach=foreach)
    theirs.load_state_dict(native)
    with pytest.raises(KeyError, match="exp_avg"):
        advance(params, theirs, [1])
    assert all(map(torch.equal, params, before))
    theirs = peer(params, foreach=foreach)
    theirs.load_state_dict(optimizer.state_dict(format="torch"))
    advance(params, theirs, [1])
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "momentum_buffer"])
def test_codes_are_known_by_their_name(name):
    """Codes under the name of values are refused, and values under the name of codes."""
    if name == "momentum_buffer":
        _, optimizer, native = stepped(optim.FusedSGD, ((5000,),), momentum=0.9)
    else:
        _, optimizer, native = stepped(optim.FusedAdamW, ((5000,),))
    state = native["state"][0]
    codes = state[f"{name}_code"]
    assert codes.dtype == torch.uint8
    others = {key: value for key, value in state.items() if key != f"{name}_code"}
    for wrong in ({name: codes}, {f"{name}_code": codes.float()}):
        with pytest.raises(ValueError, match=rf"states with dtype uint8 must be under {name}_code"):
            optimizer.load_state_dict({**native, "state": {0: {**others, **wrong}}})


def test_counter_in_the_group():
    """As FusedAdam of apex and TransformerEngine; with masters as in TransformerEngine."""
    params, optimizer = run(Case("adamw", dtype=BF16, master="fp32"), steps=4)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        del state["step"]
    kept = {"lr", "betas", "eps", "weight_decay", "params"}
    group = {k: v for k, v in state_dict["param_groups"][0].items() if k in kept}
    state_dict["param_groups"] = [{**group, "step": 4, "bias_correction": True}]
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = Case("adamw", dtype=BF16, master="remainder").make(again)
    resumed.load_state_dict(state_dict)
    advance(params, optimizer, range(4, 6))
    advance(again, resumed, range(4, 6))
    expected, got = (o.state_dict(format="torch")["state"] for o in (optimizer, resumed))
    for number, state in expected.items():
        assert golden.same_bits(got[number]["master_param"], state["master_param"])
        assert got[number]["step"] == state["step"] == 6


def test_momentum_that_has_not_begun():
    """torch.optim.SGD saves None, or no state at all."""
    params = parameters()
    for state in ({}, {"momentum_buffer": None}):
        optimizer = optim.FusedSGD(params, momentum=0.9, dampening=0.5)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: state} if state else {}, "param_groups": groups})
        grads = gradients(params, 0)
        set_gradients(params, grads)
        optimizer.step()
        assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], grads[0])


def test_wrong_checkpoints_are_refused():
    params, optimizer = run(Case("adamw"))
    with pytest.raises(ValueError, match="format must be pycomm or torch"):
        optimizer.state_dict(format="apex")
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\), but its parameter \(33, 7\)"):
        optim.FusedAdamW(params).load_state_dict(wrong)


@pytest.mark.parametrize("master", ["fp32", "remainder"])
def test_remainders_of_transformer_engine(master):
    """In 16 bits as ours, but under the name of masters."""
    params, optimizer = run(Case("adam", dtype=BF16, master="remainder"))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["master_param"] = state.pop("remainder")
        del state["step"]
    state_dict["param_groups"][0]["step"] = 3
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = Case("adam", dtype=BF16, master=master).make(again)
    loaded.load_state_dict(state_dict)
    expected, got = (o.state_dict(format="torch")["state"] for o in (optimizer, loaded))
    for number, state in expected.items():
        assert golden.same_bits(got[number]["master_param"], state["master_param"])
    assert all(map(golden.same_bits, map(torch.detach, params), map(torch.detach, again)))


def test_checkpoints_of_other_optimizers_are_refused():
    """They must not be loaded as moments of zero at step 1,000."""
    params, lion = run(Case("lion"))
    adam = Case("adam").make(params)
    with pytest.raises(ValueError, match="has no exp_avg_sq, only step, exp_avg"):
        adam.load_state_dict(lion.state_dict())
    foreign = {"step": torch.tensor(1000.0), "state1": torch.zeros(33, 7)}
    groups = adam.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="has no exp_avg, only step, state1"):
        Case("adam").make(params).load_state_dict({"state": {0: foreign}, "param_groups": groups})
    halves = parameters(torch.float16)
    _, remainders = run(Case("adam", dtype=BF16, master="remainder"))
    with pytest.raises(ValueError, match="remainders of bfloat16 parameters, got one of"):
        Case("adam", master="fp32").make(halves).load_state_dict(remainders.state_dict())


@pytest.mark.parametrize("saved", ["adamw", "sgd", "lion", "lamb"])
@pytest.mark.parametrize("loading", ["adamw", "sgd", "lion", "lamb"])
def test_each_kind_of_optimizer_loads_its_own_checkpoints(saved, loading):
    """Adam and LAMB have states of the same names, Lion's are among Adam's."""
    params, optimizer = run(Case(saved))
    other = Case(loading).make(params)
    if saved == loading:
        other.load_state_dict(optimizer.state_dict())
    else:
        with pytest.raises(ValueError, match=r"another kind of optimizer|has no exp_avg"):
            other.load_state_dict(optimizer.state_dict())
    assert bool(other.state) == (saved == loading)


def test_8_bit_states_follow_the_order_of_elements():
    """Blocks are runs of memory, so states in another memory format are encoded again."""
    weights = torch.randn(64, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    sizes = torch.arange(64.0).neg().exp2().view(-1, 1, 1, 1)
    seen = []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = torch.nn.Parameter(weights.clone(memory_format=layout))
        optimizer = optim.FusedAdam([param], states="8bit")
        if seen:
            optimizer.load_state_dict(seen[0].state_dict())
        else:
            param.grad = weights * sizes
            optimizer.step()
        seen.append(optimizer)
    one, other = (o.state_dict(format="torch")["state"][0]["exp_avg"] for o in seen)
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert ((one - other).abs() <= one.abs().amax() / 60).all()
