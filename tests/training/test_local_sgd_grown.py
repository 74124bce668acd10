"""Local SGD goes on with ranks that have joined it: they have what all have in common."""

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import averaging
import ddp
import golden_local_sgd
import growing
import helpers
import numpy as np
import pytest
import sweep
import torch
import wrapped
from averaging import DILOCO, RULES, Trainee

import pycomm
from pycomm import hooks

CASES = {name: {"period": 3, **rule} for name, rule in RULES.items()}
MEMBERS, SIZE = 2, 3


@dataclass
class Life:
    """A rank's exchanges before and after the group grew, and its weights just before and after."""

    began: dict[str, torch.Tensor]
    before: list[averaging.Moment]
    left: dict[str, torch.Tensor]
    came: dict[str, torch.Tensor]
    after: list[averaging.Moment]
    counts: tuple[int, int]


def another_module():
    module = ddp.Given()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    return module


def live(group, smaller, options, steps, make_optimizer=averaging.sgd):
    """Members train in the smaller group; then a newcomer makes its wrapper in the larger one."""
    if group.rank < MEMBERS:
        smaller_group = smaller.groups[group.rank]
        trainee = Trainee(smaller_group, make_optimizer=make_optimizer, options=options)
        began, before = trainee.weights(), trainee.run(range(steps))
        left = trainee.weights()
        trainee.model.regroup(group)
        trainee.group = group
    else:
        module = another_module()
        began, before, left = {}, [], {n: p.clone() for n, p in module.named_parameters()}
        trainee = Trainee(group, "wrapper", module, make_optimizer, options)
    came = trainee.weights()
    state = trainee.state
    counts = state.steps, state.agreements
    return Life(began, before, left, came, trainee.run(range(state.steps, 9)), counts)


def lives_in(world, *options):
    smaller = world(MEMBERS)
    return world(SIZE).run(live, smaller, *options)


@pytest.mark.parametrize(("name", "steps"), sweep.a_third_of(CASES, [0, 3, 4]))
def test_a_newcomer_goes_on_from_what_all_have_in_common(world, monkeypatch, name, steps):
    """It joins before the first step, between two rounds, or in one, where it does not count."""
    monkeypatch.setattr("pycomm._training.outer._PIECE_BYTES", 1)  # a piece for every parameter
    options = CASES[name]
    lives = lives_in(world, options, steps)
    averages, reset = name == "averages", options.get("local_residuals", False)
    outer = golden_local_sgd.Outer(
        MEMBERS,
        ddp.first_elements(ddp.Given()),
        options.get("outer_lr", 1.0),
        options.get("outer_momentum", 0.0),
        options.get("compression"),
        reset,
    )
    if not averages:
        outer.last = {n: w.numpy().ravel() for n, w in lives[0].began.items()}
    for moments in zip(*(life.before for life in lives[:MEMBERS]), strict=True):
        if moments[0].exchanged:
            outer.exchange([moment.before for moment in moments])
    for life in lives[:MEMBERS]:
        assert wrapped.same(life.left, life.came)
    common = lives[0].left if averages else outer.last
    for parameter, weights in lives[2].came.items():
        assert torch.equal(weights.ravel(), torch.as_tensor(common[parameter]).ravel())
    assert [life.counts for life in lives] == [(steps, steps // 3)] * SIZE

    outer.size = outer.means.size = SIZE
    for arrays in outer.means.residuals.values():
        arrays.append(np.zeros_like(arrays[0]))
    in_a_round, exchanges = steps % 3 != 0, 0
    for moments in zip(*(life.after for life in lives), strict=True):
        if not moments[0].exchanged:
            continue
        late = in_a_round and exchanges == 0
        scaled = 1.0 if reset else SIZE / MEMBERS
        factors = [scaled, scaled, 0.0] if late else None
        expected = outer.exchange([moment.before for moment in moments], factors)
        for moment, wanted in zip(moments, expected, strict=True):
            assert wrapped.same(moment.after, wanted)
        exchanges += 1
    assert exchanges == 3 - steps // 3


def test_a_failed_exchange_is_repeated_with_a_newcomer_that_does_not_count(world):
    """The two that are left make the exchange of three; the one that is new gets the result."""
    three, grown = world(3), world(3)

    def body(group):
        place = group.rank
        if place < 2:
            trainee = Trainee(three.groups[place], options={"period": 2, **DILOCO})
            trainee.step(0)
            trainee.optimizer.zero_grad()
            trainee.backward(1)
            trainee.optimizer.step()
            before = trainee.weights()
            with pytest.raises(pycomm.PeerDied):
                trainee.state.step()
            trainee.model.regroup(group)
            return before, trainee.weights(), trainee.state.stats()["changes_lost"]
        lost = Trainee(three.groups[2], options={"period": 2, **DILOCO})
        lost.step(0)
        three.groups[2].close()
        trainee = Trainee(group, module=another_module(), options={"period": 2, **DILOCO})
        return trainee.state.agreements, trainee.weights(), trainee.state.steps

    *members, newcomer = grown.run(body)
    outer = golden_local_sgd.Outer(2, ddp.first_elements(ddp.Given()), 0.7, 0.9)
    outer.last = {n: np.zeros(w.numel(), np.float32) for n, w in members[0][0].items()}
    outer.size = outer.means.size = 3
    weights = [before for before, *_ in members]
    expected = outer.exchange([*weights, weights[0]], [1.5, 1.5, 0.0])
    for (_, after, lost), wanted in zip(members, expected, strict=False):
        assert wrapped.same(after, wanted)
        assert lost == 1
    assert wrapped.same(newcomer[1], expected[2])
    assert newcomer[::2] == (1, 2)


def test_a_newcomer_in_the_warm_up(world):
    """There all ranks take the same steps, so it needs an optimizer without states."""
    options = {"period": 2, "gradient_steps": 4, **DILOCO}
    lives = lives_in(world, options, 2, lambda params: torch.optim.SGD(params, lr=0.1))
    for moments in zip(*(life.after for life in lives), strict=True):
        assert [moment.exchanged for moment in moments] == [moments[0].exchanged] * SIZE
        if moments[0].exchanged:
            assert wrapped.same(moments[0].after, moments[2].after)
    assert [moment.exchanged for moment in lives[2].after] == [
        True,
        True,
        *[False, True] * 2,
        False,
    ]


def test_the_state_of_a_hook_takes_newcomers(world):
    """Without a wrapper; also after the ranks that had trained longest are gone."""
    smaller, larger, last = world(MEMBERS), world(SIZE), world(2)

    nets = [ddp.network() for _ in range(SIZE)]  # threads share torch's random numbers

    def make(group, rank):
        net = nets[rank]
        with torch.no_grad():
            net[0].weight.add_(7 if rank == MEMBERS else 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        named = net.named_parameters()
        state = hooks.LocalSGDState(named, optimizer, period=3, **DILOCO, group=group)
        return net, optimizer, state

    def train(net, optimizer, state, steps):
        for step in range(steps):
            optimizer.zero_grad()
            wrapped.batch_loss(net, state.group.rank, step).backward()
            state.start_in_backward(torch.zeros(1), [net[0].weight])
            optimizer.step()
            state.step()

    def body(group):
        if group.rank < MEMBERS:
            made = make(smaller.groups[group.rank], group.rank)
            train(*made, 4)
        else:
            made = make(group, group.rank)
        net, _, state = made
        state.regroup(group)
        train(*made, 1)
        if group.rank == 0:
            return None
        state.regroup(last.groups[group.rank - 1])
        train(*made, 1)
        return state.steps, state.agreements, net.state_dict()

    _, one, other = larger.run(body)
    assert one[:2] == other[:2] == (6, 2)
    assert wrapped.same(one[2], other[2])


@pytest.mark.parametrize("change", [{"period": 3}, {"outer_momentum": 0.5}])
def test_a_newcomer_with_other_options_is_refused(world, change):
    smaller, options = world(MEMBERS), {"period": 2, **DILOCO}

    def body(group):
        if group.rank >= MEMBERS:
            with pytest.raises(ValueError, match="params and options of LocalSGDState must be"):
                Trainee(group, options={**options, **change})
            return None
        trainee = Trainee(smaller.groups[group.rank], options=options)
        trainee.run(range(2))
        before = trainee.weights()
        with pytest.raises(
            pycomm.CollectiveError, match=r"rank 2 has .*, but rank 0 has"
        ) as raised:
            trainee.model.regroup(group)
        assert trainee.state.group is smaller.groups[group.rank]
        assert wrapped.same(before, trainee.weights())
        return raised.value.rank

    assert world(SIZE).run(body) == [2, 2, None]


def test_an_inner_group_is_refused_on_all_ranks(world):
    smaller, inner = world(MEMBERS), world(1)

    def body(group):
        member = group.rank < MEMBERS
        net = ddp.network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = hooks.LocalSGDState(
            net.named_parameters(),
            optimizer,
            period=2,
            inner_group=None if member else inner.groups[0],
            group=smaller.groups[group.rank] if member else group,
        )
        with pytest.raises(ValueError, match="inner_group must be None"):
            state.regroup(group)
        return True

    assert all(world(SIZE).run(body))


def train(model, local, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(ddp.batch(rank, step).bfloat16()).square().mean().backward()
        optimizer.step()
        local.step()


def make(group, options):
    net = ddp.network().bfloat16()
    optimizer = pycomm.optim.FusedAdamW(net.parameters(), lr=0.01, master_weights="remainder")
    local = hooks.LocalSGDState(net.named_parameters(), optimizer, group=group, **options)
    return net, optimizer, local


def grow_in_training(rank, size, store, path, options, steps):
    """Processes; returns what each has when the group has grown, and at the end."""
    is_new = rank >= MEMBERS
    if is_new:
        group = pycomm.join(Path(path), 60)
        net, optimizer, local = make(group, options)
        pycomm.share_state(optimizer, receive=True)
        model = pycomm.DataParallel(net, state=local)
    else:
        helpers.join_world(rank, MEMBERS, store)
        group = pycomm.init(timeout=60)
        net, optimizer, local = make(group, options)
        model = pycomm.DataParallel(net, state=local)
        train(model, local, optimizer, rank, range(steps))
        while group.size < size:
            growing.publish(group, path)
            group = group.grow()
        pycomm.share_state(optimizer)
        model.regroup(group)
    begun = copy.deepcopy([net.state_dict(), optimizer.state_dict(), local.state_dict()])
    train(model, local, optimizer, group.rank, range(steps, 9))
    pycomm.barrier()
    time.sleep(0.2)
    return begun, [net.state_dict(), optimizer.state_dict()]


@pytest.mark.parametrize(
    ("name", "steps"), [("averages", 4), ("int8, DiLoCo", 4), ("top-k, error reset", 3)]
)
def test_a_grown_group_trains_like_one_that_began_at_this_size(name, steps, tmp_path):
    options = CASES[name]
    found = helpers.run_ranks(SIZE, grow_in_training, str(tmp_path / "door"), options, steps)

    def alone(group):
        net, optimizer, local = make(group, options)
        model = pycomm.DataParallel(net, state=local)
        for each, state in zip((net, optimizer, local), found[group.rank][0], strict=True):
            each.load_state_dict(state)
        train(model, local, optimizer, group.rank, range(steps, 9))
        return [net.state_dict(), optimizer.state_dict()]

    with pycomm.LocalWorld(SIZE) as world:
        expected = world.run(alone)
    for mine, (_, end) in zip(expected, found, strict=True):
        assert wrapped.same(mine[0], end[0])
        for number, state in mine[1]["state"].items():
            assert wrapped.same(state, end[1]["state"][number])
