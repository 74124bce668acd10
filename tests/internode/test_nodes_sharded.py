"""Sharded steps on several nodes, and compressed changes of parameters."""

from __future__ import annotations

import copy
import dataclasses
import time

import pytest
import sharding
import torch
from sharding import Parameter, Program, Step
from wrapping import data_parallel

import pycomm

SHAPES = [(70, 40), (5000,), (3,), (130, 33), (0,), (9000,)]


def program(dtype: torch.dtype, rule: str, **options) -> Program:
    parameters = tuple(Parameter(shape, transposed=shape == (130, 33)) for shape in SHAPES)
    steps = (Step(), Step(without_sync=1, backwards=2), Step(reads=True), Step(weighs=True), Step())
    return Program(3, dtype, parameters, steps, rule, options)


def published(exact: torch.Tensor, seen: torch.Tensor, compression: pycomm.Int8) -> torch.Tensor:
    """What all ranks see of a parameter after its owners have sent its change."""
    flat, before = (x.as_strided((x.numel(),), (1,)) for x in (exact, seen))
    padded = torch.zeros(-(-flat.numel() // 1024) * 1024)
    padded[: flat.numel()] = flat.float() - before.float()
    change = compression.decode(compression.encode(padded), padded.numel())[: flat.numel()]
    return torch.empty_like(seen).copy_(
        (before.float() + change).to(seen.dtype).as_strided(seen.shape, seen.stride())
    )


@pytest.mark.parametrize(
    ("dtype", "rule", "options"),
    [
        (torch.float32, "plain", {}),
        (torch.float32, "adamw", {"max_norm": 1.0}),
        (torch.bfloat16, "adamw", {"master_weights": "remainder", "states": "8bit"}),
        (torch.bfloat16, "lamb", {"master_weights": "fp32"}),
    ],
)
def test_owners_step_exactly_and_send_what_the_code_loses_later(dtype, rule, options):
    """The gradients do not depend on the parameters, so owners have those of a run without."""
    given, compression = program(dtype, rule, **options), pycomm.Int8()
    net = sharding.Given(given)

    def body(group: pycomm.Group, shard: str | None) -> list[list[torch.Tensor]]:
        more = {"publish": compression} if shard else {}
        run = sharding.Run(group, given, net, shard, **more)
        seen = []
        for number, step in enumerate(given.steps):
            run.step(number, step)
            seen.append([p.detach().clone() for p in run.net.parameters()])
        return seen

    with pycomm.LocalWorld(3, nodes=(2, 1), timeout=20) as world:
        exact, *_ = world.run(body, None)
        results = world.run(body, "optimizer")
    wanted = [p.detach().clone() for p in net.parameters()]
    for number, values in enumerate(exact):
        wanted = [published(e, w, compression) for e, w in zip(values, wanted, strict=True)]
        for rank, result in enumerate(results):
            found = sharding.difference(result[number], wanted, f"step {number}, rank {rank}")
            assert found is None, found


NET = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 60))


def small(group: pycomm.Group, **options):
    model = data_parallel(copy.deepcopy(NET), group=group, shard="optimizer", **options)
    return model, pycomm.optim.FusedSGD(model.parameters(), lr=0.1)


def backward(model: pycomm.DataParallel, value: float = 1.0) -> None:
    model.zero_grad()
    model(torch.full((2, 60), value)).sum().backward()


def test_a_parameter_that_is_written_between_steps_has_no_error_left():
    def body(group: pycomm.Group) -> list[torch.Tensor]:
        model, optimizer = small(group, publish=pycomm.Int8())
        seen = []
        saved = copy.deepcopy(model.state_dict())
        for _ in range(2):
            model.load_state_dict(saved)
            backward(model)
            optimizer.step()
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return seen

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=20) as world:
        for first, second in world.run(body):
            assert torch.equal(first, second)


@pytest.mark.parametrize("rest", ["frozen", "in no wrapper"])
def test_a_state_may_know_more_parameters_than_the_wrapper_exchanges(rest: str):
    def body(group: pycomm.Group, knows_more: bool) -> list[torch.Tensor]:
        net = copy.deepcopy(NET)
        module = net if rest == "frozen" else net[1]
        named = dict(net.named_parameters())
        known = named if knows_more else {name: named[name] for name in ("1.weight", "1.bias")}
        state = pycomm.hooks.Int8State(known.items(), exclude=small_bias, group=group)
        net[0].requires_grad_(rest != "frozen")
        shard = pycomm.Sharding("optimizer", publish=pycomm.Int8())
        model = pycomm.DataParallel(module, state=state, shard=shard)
        optimizer = pycomm.optim.FusedSGD(net[1].parameters(), lr=0.1)
        for number in range(3):
            model.zero_grad()
            model(torch.linspace(group.rank, number, 120).view(2, 60)).pow(2).sum().backward()
            optimizer.step()
        return [*(p.detach().clone() for p in net.parameters()), state.residual("1.weight").clone()]

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=20) as world:
        for more, less in zip(*(world.run(body, knows) for knows in (True, False)), strict=True):
            assert all(map(torch.equal, more, less))


def small_bias(name: str, parameter: torch.Tensor) -> bool:  # noqa: ARG001
    return name.endswith("bias")


@pytest.mark.parametrize("shards", [("optimizer",) * 2, ("optimizer", None), (None, "optimizer")])
def test_a_state_of_two_wrappers_is_refused_if_one_of_them_shards(shards):
    def body(group: pycomm.Group) -> None:
        net = copy.deepcopy(NET)
        state = pycomm.hooks.Int8State(net.named_parameters(), group=group)
        first = pycomm.DataParallel(net[0], state=state, shard=shards[0])
        with pytest.raises(
            ValueError, match=r"state must be of one wrapper, got one with 0\.weight"
        ):
            pycomm.DataParallel(net[1], state=state, shard=shards[1])
        backward(first)
        first = pycomm.DataParallel(net[0], state=state, shard=shards[0])  # the same module again

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=20) as world:
        world.run(body)


@pytest.mark.parametrize("before", ["another optimizer", "an overflow"])
def test_a_step_that_leaves_a_written_parameter_alone_does_not_revive_its_error(before):
    def body(group: pycomm.Group, steps_before: bool) -> torch.Tensor:
        model, _ = small(group, publish=pycomm.Int8(), bucket_cap_mb=0.001)
        first, second = (pycomm.optim.FusedSGD(m.parameters(), lr=0.1) for m in model.module)
        for number in range(2):
            model.zero_grad()
            model(torch.linspace(0, 1, 120).view(2, 60)).pow(2).sum().backward()
            model.reduce_gradients()
            if number == 1:
                with torch.no_grad():
                    model.module[1].weight.fill_(1.0)
                if steps_before and before == "an overflow":
                    second.found_inf = torch.ones(1)
                    second.step()
                    del second.found_inf
            if number == 0 or (steps_before and before == "another optimizer"):
                first.step()
            second.step()
        return model.module[1].weight.detach().clone()

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=20) as world:
        wanted, found = (world.run(body, steps) for steps in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_rank_without_gradients_is_a_mismatch():
    def body(group: pycomm.Group) -> None:
        model, optimizer = small(group)
        optimizer.step()  # no rank has any
        backward(model)
        if group.rank == 1:
            optimizer.zero_grad()
        with pytest.raises(pycomm.Mismatch):
            optimizer.step()

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=5) as world:
        world.run(body)


def test_parameters_that_do_not_arrive_are_half_new():
    def body(group: pycomm.Group) -> str:
        model, optimizer = small(group, bucket_cap_mb=0.001)
        saved = copy.deepcopy(model.module.state_dict())
        backward(model)
        optimizer.step()
        backward(model)
        if group.rank == 1:
            model._exchange.strategy.shards.all_gather.send = lambda: time.sleep(0.1)
            optimizer.step()
            group.abort()
            return ""
        with pytest.raises(pycomm.PycommError):
            optimizer.step()
        with pytest.raises(RuntimeError, match="partly those of a step that has failed"):
            model(torch.ones(1, 60))
        model.module.load_state_dict(saved)
        model._exchange.strategy.check()
        return "raised"

    with pycomm.LocalWorld(2, nodes=(1, 1), timeout=5) as world:
        assert world.run(body) == ["raised", ""]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"publish": pycomm.Int8()}, TypeError, "no publish any more: give it to the sharding"),
        (
            {"overlap_params": True},
            TypeError,
            r"DataParallel\(\) has no overlap_params any more: leave",
        ),
        ({"overlap_param": True}, TypeError, "unexpected keyword argument 'overlap_param'"),
        ({"shard": "optimizer", "publish": pycomm.TopK(density=0.1)}, TypeError, "publish must be"),
        ({"shard": "optimizer", "publish": "int8"}, TypeError, "publish must be"),
        (
            {"shard": "optimizer", "publish": pycomm.Int8(rounding="stochastic")},
            ValueError,
            "publish must round",
        ),
    ],
)
def test_options_are_checked(options, error, message):
    with pycomm.LocalWorld(1) as world, pytest.raises(error, match=message):
        data_parallel(torch.nn.Linear(2, 2), group=world.groups[0], **options)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_residuals_hold_what_encoded_gradients_have_lost(nodes):
    """SGD is linear, so parameters differ from those of a run without by the residuals' mean."""
    shapes = [(70, 100), (5000,), (3,), (130, 33), (90, 100)]
    parameters = tuple(Parameter(shape, transposed=shape == (130, 33)) for shape in shapes)
    steps = (Step(), Step(without_sync=1), Step(), Step(reads=True), Step())
    ranks, compression = sum(nodes), pycomm.Int8()
    plain = Program(ranks, torch.float32, parameters, steps, "plain")
    encoded = dataclasses.replace(plain, compression=compression)
    net = sharding.Given(plain)

    def body(group: pycomm.Group, given: Program, shard: str | None):
        publish = {"publish": pycomm.Identity()} if shard else {}
        run = sharding.Run(group, given, net, shard, **publish)
        run.run()
        state = run.model.comm_state
        kept = state.state_dict()
        state.load_state_dict(kept)
        residuals = kept["kept"][str(group.rank)].get("residual", {})
        return {n: p.detach().clone() for n, p in run.net.named_parameters()}, residuals

    with pycomm.LocalWorld(ranks, nodes=nodes, timeout=20) as world:
        wanted = world.run(body, plain, None)[0][0]
        results = world.run(body, encoded, "optimizer")
    assert len(results[0][1]) == 3, "the small ones have none"
    for name, exact in wanted.items():
        ours = [params[name] for params, _ in results]
        assert all(torch.equal(ours[0], other) for other in ours)
        if name not in results[0][1]:
            assert torch.equal(ours[0], exact)
            continue
        lost = 0.02 * sum(residuals[name] for _, residuals in results) / ranks
        assert lost.abs().max() > 1e-5
        torch.testing.assert_close(ours[0], exact + lost, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [(2, 1), (2, 2)], ids=str)
def test_divided_gradients_of_micro_batches_are_added(nodes, dtype):
    parameters = tuple(Parameter(shape) for shape in [(70, 40), (3,), (5000,)])
    steps = (Step(backwards=2), Step(), Step(backwards=3, zero="none"), Step(set_to_none=False))
    sharding.check(Program(sum(nodes), dtype, parameters, steps, "momentum", nodes=nodes))


def test_memory_of_divided_gradients_is_that_of_the_formula():
    def body(group: pycomm.Group) -> tuple[pycomm.memory.MemoryReport, int]:
        net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
        model = pycomm.DataParallel(net, group=group, shard="gradients")
        optimizer = pycomm.optim.FusedAdamW(model.parameters())
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        report = pycomm.memory_report(model, optimizer)
        assert report.formula is not None
        return report, int(report.formula.per_parameter * report.elements)

    with pycomm.LocalWorld(4, nodes=(2, 2), timeout=20) as world:
        for report, expected in world.run(body):
            held = sum(size for kind, size in report.bytes.items() if kind != "communication")
            assert held == pytest.approx(expected, rel=0.02)
