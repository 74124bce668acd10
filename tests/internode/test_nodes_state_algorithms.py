"""algorithm= of hooks' states and of the wrapper, between nodes and on one node."""

from __future__ import annotations

import golden
import golden_nodes
import pytest
import torch
from torch import nn

import pycomm
from pycomm import hooks

COUNT = 50_003


def inputs(size: int) -> list[torch.Tensor]:
    return [torch.randn(COUNT, generator=torch.Generator().manual_seed(r)) for r in range(size)]


class Given(nn.Module):
    """A parameter whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COUNT))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.x * gradient).sum()


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "tree"])
def test_averages_have_the_bits_of_the_algorithm(world, algorithm):
    nodes = [2, 1, 1]
    gradients = inputs(4)
    wanted = golden_nodes.all_reduced(gradients, "avg", nodes, algorithm)

    def body(group):
        state = hooks.AllReduceState(group=group, algorithm=algorithm)
        net = Given()
        state.start(sent := gradients[group.rank].clone(), [net.x])
        state.finish()
        model = pycomm.DataParallel(net, state=state)
        model(gradients[group.rank]).backward()
        told = {(plan.algorithm, plan.why) for plan in model.explain().buckets}
        return sent, net.x.grad, told, str(model.explain())

    for sent, grad, told, text in world(4, nodes=nodes).run(body):
        assert golden.same_bits(sent, wanted)
        assert golden.same_bits(grad, wanted)
        assert told == {(algorithm, "named by the caller")}
        assert f"; {algorithm}, named by the caller" in text


@pytest.mark.parametrize("nodes", [[2, 1], [3]], ids=str)
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_compressed_averages_are_those_of_the_operation(world, nodes, algorithm):
    gradients = inputs(3)

    def body(group):
        net = Given()
        state = hooks.CommState(
            pycomm.Int8(),
            net.named_parameters(),
            group=group,
            algorithm=algorithm,
            exclude=lambda *_: False,
        )
        model = pycomm.DataParallel(net, state=state)
        residual = torch.zeros(COUNT)
        for _ in range(2):
            net.x.grad = None
            model(gradients[group.rank]).backward()
            wanted = pycomm.compressed_all_reduce(
                gradients[group.rank].clone(),
                pycomm.Int8(),
                residual=residual,
                algorithm=algorithm,
                group=group,
            )
            assert golden.same_bits(net.x.grad, wanted)
            assert golden.same_bits(state.residual("x"), residual)
        return {plan.algorithm for plan in state.explain().buckets}

    given = {} if len(nodes) == 1 else {"nodes": nodes}
    assert world(3, **given).run(body) == [{algorithm}] * 3


@pytest.mark.parametrize("nodes", [[2, 1, 1], [4]], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
def test_local_sgd_averages_by_the_algorithm(world, nodes, algorithm):
    """Gradients in the warm-up, then parameters."""
    given = inputs(4)

    def body(group):
        net = Given()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        state = hooks.LocalSGDState(
            net.named_parameters(),
            optimizer,
            period=1,
            gradient_steps=1,
            group=group,
            algorithm=algorithm,
        )
        model = pycomm.DataParallel(net, state=state)
        for _ in range(2):
            net.x.grad = None
            model(given[group.rank]).backward()
            optimizer.step()
            averaged = net.x.grad if state.steps == 0 else None
            if averaged is None:
                net.x.data.copy_(given[group.rank])
            else:
                gradient = averaged.clone()
            assert state.step()
        wanted = pycomm.all_reduce(
            given[group.rank].clone(), "avg", algorithm=algorithm, group=group
        )
        return gradient, net.x.detach().clone(), wanted, state.explain().buckets[0].algorithm

    among = {} if len(nodes) == 1 else {"nodes": nodes}
    for gradient, parameter, wanted, told in world(4, **among).run(body):
        if among:
            named = "two_shot" if algorithm == "auto" else algorithm
            wanted = golden_nodes.all_reduced(given, "avg", nodes, named)
        assert golden.same_bits(gradient, wanted)
        assert golden.same_bits(parameter, wanted)
        assert told == ("two_shot" if algorithm == "auto" else algorithm)


def test_local_sgd_with_different_algorithms(world):
    def body(group):
        net = Given()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        algorithm = "ring" if group.rank else "tree"
        state = hooks.LocalSGDState(
            net.named_parameters(), optimizer, period=1, group=group, algorithm=algorithm
        )
        model = pycomm.DataParallel(net, state=state)
        model(torch.ones(COUNT)).backward()
        optimizer.step()
        with pytest.raises(pycomm.Mismatch, match="with the same settings"):
            state.step()
        return True

    assert world(2, nodes=[1, 1], timeout=5).run(body) == [True, True]


def test_why_auto_is_two_shot(world):
    def body(group):
        net = Given()
        plans = []
        for compression in (None, pycomm.Int8()):
            state = hooks.CommState(
                compression, net.named_parameters(), group=group, exclude=lambda *_: False
            )
            state.start(torch.zeros(COUNT), [net.x])
            state.finish()
            plans += state.explain().buckets
        return [(plan.algorithm, plan.why) for plan in plans]

    between = ("two_shot", "no table: two-shot between nodes, whatever the size")
    encoded = ("two_shot", "encoded gradients take it at every size")
    assert world(2, nodes=[1, 1]).run(body) == [[between, encoded]] * 2


def test_what_is_refused(world):
    group = world(2, nodes=[1, 1]).groups[0]
    net = Given()
    with pytest.raises(ValueError, match="algorithm must be one of auto, two_shot, ring, tree"):
        hooks.AllReduceState(group=group, algorithm="one_shot")
    with pytest.raises(
        ValueError, match="algorithm must be auto or two_shot for top-k, got 'tree'"
    ):
        hooks.TopKState(net.named_parameters(), group=group, algorithm="tree")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for algorithm, compression in (("one_shot", None), ("rings", None), ("tree", pycomm.TopK(0.1))):
        with pytest.raises(ValueError, match=r"algorithm must be .*auto"):
            hooks.LocalSGDState(
                net.named_parameters(),
                optimizer,
                period=2,
                compression=compression,
                group=group,
                algorithm=algorithm,
            )
    state = hooks.CommState(None, net.named_parameters(), group=group, algorithm="ring")
    with pytest.raises(ValueError, match=r"with shard, state\.algorithm must be auto or two_shot"):
        pycomm.DataParallel(net, shard="optimizer", state=state)


def test_ranks_with_different_algorithms(world):
    def body(group):
        algorithm = "ring" if group.rank else "tree"
        state = hooks.AllReduceState(group=group, algorithm=algorithm)
        with pytest.raises(ValueError, match="algorithm"):
            pycomm.DataParallel(Given(), state=state)
        state.start(torch.zeros(COUNT), [Given().x])
        with pytest.raises(pycomm.Mismatch):
            state.finish()
        return True

    assert world(2, nodes=[1, 1], timeout=5).run(body) == [True, True]
