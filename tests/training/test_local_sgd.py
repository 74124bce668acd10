"""Local SGD: ranks train separately and exchange parameters every few steps."""

import averaging
import ddp
import golden
import helpers
import pytest
import spanning
import torch
import wrapped
from averaging import DILOCO, Trainee
from torch import nn

import pycomm
from pycomm import optim

TOPK = pycomm.TopK(0.05, values=torch.bfloat16)
STOCHASTIC = pycomm.Int8(512, "stochastic", seed=9)
CASES = {
    "averages": {"period": 2},
    "every step": {"period": 1},
    "DiLoCo": {"period": 3, **DILOCO},
    "int8": {"period": 2, "compression": pycomm.Int8()},
    "int8, DiLoCo": {"period": 2, "compression": STOCHASTIC, **DILOCO},
    "top-k, DiLoCo": {"period": 2, "compression": TOPK, **DILOCO},
    "casts": {"period": 2, "compression": pycomm.Cast()},
    "top-k, error reset": {"period": 1, "compression": TOPK, "local_residuals": True},
    "int8, error reset": {"period": 2, "compression": pycomm.Int8(), "local_residuals": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_are_the_golden_models(world, name, size):
    averaging.check(world(size).run(trained, "wrapper", CASES[name]), CASES[name])


def trained(group, front, options, make=None):
    return averaging.train(group, front, 6, make, **options)


@pytest.mark.parametrize("name", ["averages", "int8, DiLoCo", "top-k, error reset"])
def test_pieces_that_follow_each_other_are_exchanged_alike(world, monkeypatch, name):
    monkeypatch.setattr("pycomm._training.outer._PIECE_BYTES", 1)  # a piece for every parameter
    averaging.check(world(2).run(trained, "wrapper", CASES[name]), CASES[name])


def trained_in_all_ways(group):
    """One case after the other."""
    return [
        trained(group, front, CASES[name])
        for front, name in (("hook", "averages"), ("hook", "int8, DiLoCo"), ("wrapper", "DiLoCo"))
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_under_hook_and_wrapper(size):
    names = ["averages", "int8, DiLoCo", "DiLoCo"]
    runs = helpers.run_group(size, trained_in_all_ways)
    for name, *ranks in zip(names, *runs, strict=True):
        averaging.check(ranks, CASES[name])


@pytest.mark.parametrize("name", ["averages", "int8, DiLoCo"])
def test_nodes_are_the_model_of_one_node(world, name):
    """Exchanges between nodes have the bits of a world of threads laid out like them."""
    nodes = [2, 1]
    runs = spanning.run(nodes, trained, "wrapper", CASES[name])
    expected = world(3, nodes=nodes).run(trained, "wrapper", CASES[name])
    for (_, moments), (_, models) in zip(runs, expected, strict=True):
        for moment, model in zip(moments, models, strict=True):
            assert wrapped.same(moment.after, model.after)
    assert wrapped.same(runs[0][1][-1].after, runs[2][1][-1].after)


def in_flat_buffers():
    def flattened(parameters):
        parameters = list(parameters)
        optim.flatten(parameters)
        return optim.FusedAdamW(parameters, lr=1e-2, master_weights="remainder")

    return {**averaging.in_bf16(), "make_optimizer": flattened}


def in_several_types():
    return {"module": ddp.Given({"line": torch.float64, "small": torch.float16})}


MODELS = {
    "several types": (in_several_types, ["averages", "DiLoCo"]),
    "bf16": (averaging.in_bf16, ["averages", "int8, DiLoCo", "top-k, error reset"]),
    "masters": (lambda: averaging.in_bf16(master_weights="fp32"), ["averages", "DiLoCo"]),
    "remainders": (
        lambda: averaging.in_bf16(master_weights="remainder"),
        ["averages", "int8, DiLoCo", "top-k, error reset"],
    ),
    "flat": (in_flat_buffers, ["top-k, DiLoCo"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_those_that_the_optimizer_has(world, model):
    make, names = MODELS[model]
    for name in names:
        runs = world(2).run(trained, "wrapper", CASES[name], make)
        averaging.check(runs, CASES[name])


def test_steps_between_are_each_ranks_own(world):
    def body(group):
        trainee, alone = Trainee(group, options={"period": 100}), ddp.Given()
        optimizer = averaging.sgd(alone.parameters())
        sequence = group.traffic()
        for step in range(3):
            trainee.step(step)
            optimizer.zero_grad()
            alone(ddp.gradients(alone, group.rank, step)).backward()
            optimizer.step()
            assert wrapped.same(trainee.weights(), wrapped.parameters_of(alone))
        assert group.traffic() == sequence
        assert trainee.state.exchange()
        assert not trainee.state.exchange()  # there is nothing new
        return trainee.weights()

    one, other = world(2).run(body)
    assert wrapped.same(one, other)


def test_outer_parameters_are_the_same_on_all_ranks(world):
    """Also in the middle of a period; afterwards each rank has its own parameters again."""

    def body(group):
        options = {"period": 2, "compression": TOPK, "local_residuals": True}
        trainee = Trainee(group, options=options, **averaging.in_bf16(master_weights="remainder"))
        trainee.run(range(3))
        own, last = trainee.weights(), trainee.state.state_dict()["outer"]["last"]
        with trainee.state.outer_parameters():
            shown = trainee.weights()
        assert wrapped.same(trainee.weights(), own)
        assert wrapped.same(shown, {name: last[name] for name in shown})
        return own, shown

    (own, shown), (other, also_shown) = world(2).run(body)
    assert wrapped.same(shown, also_shown)
    assert not golden.same_bits(own["wide"], shown["wide"])
    assert not golden.same_bits(own["wide"], other["wide"])


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_averages_of_every_step_are_synchronous_training(world):
    """To rounding, with SGD without momentum."""
    net = ddp.network().state_dict()

    def body(group):
        module, alone = ddp_network(net), ddp_network(net)
        trainee = Trainee(group, module=module, make_optimizer=plain_sgd, options={"period": 1})
        model = pycomm.DataParallel(alone, group=group)
        optimizer = plain_sgd(model.parameters())
        for step in range(5):
            trainee.step(step)
            optimizer.zero_grad()
            wrapped.batch_loss(model, group.rank, step).backward()
            optimizer.step()
        return trainee.weights(), wrapped.parameters_of(model)

    for local, synchronous in world(3).run(body):
        for name, weights in local.items():
            torch.testing.assert_close(weights, synchronous[name], rtol=1e-5, atol=1e-6)


def ddp_network(state):
    """:func:`ddp.network`, without the random numbers that all threads share."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(40, 200), nn.GELU(), nn.LayerNorm(200), nn.Linear(200, 30))
    net.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return net


@pytest.mark.parametrize("front", ["wrapper", "hook"])
def test_a_warm_up_is_synchronous_training(front):
    for local, synchronous, exchanged in helpers.run_group(2, warmed_up, front):
        assert all(map(wrapped.same, local[:3], synchronous))
        assert not golden.same_bits(local[3]["0.weight"], synchronous[2]["0.weight"])
        assert exchanged == [True, True, True, False, True, False]


def warmed_up(group, front):
    """Weights after each step, beside those of plain data-parallel training."""
    net = ddp.network()
    trainee = Trainee(
        group, front, module=net, options={"period": 2, "gradient_steps": 3, **DILOCO}
    )
    moments = trainee.run(range(6))
    assert trainee.state.stats()["steps"] == 1  # exchanges of parameters
    model = pycomm.DataParallel(ddp.network(), group=group)
    synchronous = wrapped.train(model, group.rank, range(3))
    return [m.after for m in moments], synchronous, [m.exchanged for m in moments]


def in_two_nodes(group):
    """Pairs exchange gradients in every step, all exchange parameters every second one."""
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    with pycomm.init(pairs[group.rank // 2]) as inner:
        for front in ("wrapper", "hook"):
            options = {"period": 2, "inner_group": inner, **DILOCO}
            trainee = Trainee(group, front, options=options)
            yield trainee.weights(), trainee.run(range(4))


def all_in_two_nodes(group):
    return list(in_two_nodes(group))


def test_gradients_in_a_node_and_parameters_between_nodes():
    for runs in zip(*helpers.run_group(4, all_in_two_nodes), strict=True):
        averaging.check(list(runs), {"period": 2, **DILOCO})
        for step in (0, 2):
            weights = [moments[step].after for _, moments in runs]
            assert wrapped.same(weights[0], weights[1])
            assert wrapped.same(weights[2], weights[3])
            assert not golden.same_bits(weights[1]["wide"], weights[2]["wide"])


def test_diloco_has_the_values_of_its_paper(world):
    """Each step of the optimizer adds 1; Nesterov's lr is 0.7, its momentum 0.9."""

    def body(group):
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        make = pycomm.hooks.LocalSGDState.diloco
        assert make(net.named_parameters(), optimizer, group=group).period == 500
        state = make(net.named_parameters(), optimizer, period=1, group=group)
        model, seen = pycomm.DataParallel(net, state=state), []
        for _ in range(2):
            optimizer.zero_grad()
            (-model(torch.ones(1, 1))).backward()
            optimizer.step()
            state.step()
            seen.append(net.weight.item())
        return seen

    for seen in world(2).run(body):
        assert seen == pytest.approx([0.7 * 1.9, 0.7 * (1.9 + 1 + 0.9 * 1.9)])


def test_frozen_parameters_are_left_alone(world):
    def body(group):
        module = ddp.Given()
        module.square.requires_grad_(False)
        trainee = Trainee(group, module=module, options={"period": 1, "compression": TOPK})
        with torch.no_grad():
            module.square.fill_(group.rank)
        trainee.step(0)
        return module.square.unique().item(), trainee.state.state_dict()["outer"]["last"].keys()

    for rank, (value, names) in enumerate(world(2).run(body)):
        assert value == rank
        assert names == ddp.SHAPES.keys() - {"square"}


@pytest.mark.parametrize(
    ("options", "kinds", "copies"),
    [
        ({}, [], 1),  # what travels
        ({"compression": pycomm.Int8()}, ["last"], 3),
        (DILOCO, ["last", "velocity"], 3),
    ],
)
def test_memory_is_taken_only_where_it_is_needed(world, options, kinds, copies):
    group = world(1).groups[0]
    trainee = Trainee(group, options={"period": 1, "exclude": lambda *_: False, **options})
    trainee.step(0)
    assert list(trainee.state.state_dict()["outer"]) == kinds
    tensors = trainee.state.tensors()
    elements = sum(p.numel() for p in trainee.module.parameters())
    padding = 16 * len(ddp.SHAPES)  # of residuals
    assert 0 <= sum(t.numel() for t in tensors) - copies * elements <= padding
    report = pycomm.memory_report(trainee.model, trainee.optimizer)
    nbytes = sum(t.untyped_storage().nbytes() for t in tensors)
    assert report.bytes["communication"] == group.staging_bytes + nbytes
