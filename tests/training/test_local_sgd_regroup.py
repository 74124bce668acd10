"""Local SGD goes on when ranks are lost: an exchange counts on all survivors or on none."""

import contextlib
import os
import pickle
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import averaging
import ddp
import golden_local_sgd
import helpers
import pytest
import torch
import wrapped
from averaging import DILOCO, RULES, Trainee
from torch import nn

import pycomm
from pycomm._training import outer

CASES = {name: {"period": 2, **rule} for name, rule in RULES.items()}
MOMENTS = ["before", "within", "after"]
VICTIM = 1


@dataclass
class Life:
    """A rank's exchanges: who took part, and this rank's weights before and after."""

    began: dict[str, torch.Tensor]
    exchanges: list[tuple[tuple[int, ...], averaging.Moment]] = field(default_factory=list)
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


def live(group, options, moment, die):
    """Trains; the victim dies in the second exchange, whose turn comes with the fourth step."""
    trainee = Trainee(group, options=options)
    life, state = Life(trainee.weights()), trainee.state
    while state.steps < 8:
        try:
            if state.group is not group:
                before = trainee.weights()
                trainee.model.regroup(group)
                repeated = averaging.Moment(before, trainee.weights(), {}, True)
                life.exchanges.append((group.ranks, repeated))
            if state.steps == 3 and group.rank == VICTIM and group.size == 3:
                arm(trainee, life, moment, die)
            seen = trainee.step(state.steps)
            if seen.exchanged:
                life.exchanges.append((group.ranks, seen))
        except pycomm.CollectiveError:
            group = group.shrink()
    names = [name for name, p in trainee.module.named_parameters() if not ddp.sent_dense(name, p)]
    if options.get("compression"):
        life.residuals = {name: state.residual(name).clone() for name in names}
    life.stats = state.stats()
    return life


def arm(trainee, life, moment, die):
    """Makes the victim die in its next exchange."""
    state, group = trainee.state, trainee.group
    meet, start, decide = state._meet, state._differences.start, group.should_commit
    started = []

    def last_meeting():
        life.exchanges.append(((0, 1, 2), averaging.Moment(trainee.weights(), {}, {}, True)))
        if moment == "before":
            die(life)
        return meet()

    def last_start(flat, parameters):
        started.append(start(flat, parameters))
        if moment == "within" and len(started) == 2:
            state._differences.finish()
            die(life)
        return started[-1]

    def last_decision():
        assert decide()
        die(life)

    state._meet, state._differences.start = last_meeting, last_start
    if moment == "after":
        group.should_commit = last_decision


def check(lives, options, moment):
    """Every exchange of all that took part, beside the golden model."""
    began = lives[0].began
    outer = golden_local_sgd.Outer(
        3,
        ddp.first_elements(ddp.Given()),
        options.get("outer_lr", 1.0),
        options.get("outer_momentum", 0.0),
        options.get("compression"),
        options.get("local_residuals", False),
    )
    if options.keys() & {"outer_lr", "compression"}:
        outer.last = {name: weights.numpy().ravel() for name, weights in began.items()}
    taken = [ranks for ranks, _ in lives[0].exchanges]
    three = 2 if moment == "after" else 1
    assert taken == [(0, 1, 2)] * three + [(0, 2)] * (4 - three)
    for number, ranks in enumerate(taken):
        if len(ranks) < outer.size:
            lose_victim(outer)
        moments = [lives[rank].exchanges[number][1] for rank in ranks]
        expected = outer.exchange([moment.before for moment in moments])
        for one, wanted in zip(moments, expected, strict=True):
            if one.after:  # the victim has none in its last exchange
                assert wrapped.same(one.after, wanted)
    for place, rank in enumerate([0, 2]):
        life = lives[rank]
        for name, residual in life.residuals.items():
            wanted = torch.from_numpy(outer.means.residuals[name][place])
            assert torch.equal(residual.flatten(), wanted)
        assert life.stats["changes_lost"] == 1
        assert life.stats["residuals_lost"] == bool(life.residuals)
        assert life.stats["steps"] == 4


def lose_victim(outer):
    """The survivors' view, from then on."""
    outer.size = outer.means.size = 2
    for kept in (outer.means.residuals, outer.means.velocities):
        for arrays in kept.values():
            del arrays[VICTIM]


class Died(Exception):
    pass


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CASES)
def test_survivors_go_on_from_what_all_had_in_common(world, monkeypatch, name, moment):
    monkeypatch.setattr("pycomm._training.outer._PIECE_BYTES", 1)  # a piece for every parameter
    lives = {}

    def body(group):
        def die(life):
            lives[VICTIM] = life
            group.close()
            raise Died

        with contextlib.suppress(Died):
            lives[group.rank] = live(group, CASES[name], moment, die)

    world(3).run(body)
    check(lives, CASES[name], moment)


def live_until_killed(rank, size, store, name, moment):
    helpers.join_world(rank, size, store)
    outer._PIECE_BYTES = 1

    def die(life):
        Path(f"{store}.victim").write_bytes(pickle.dumps(life))
        os.kill(os.getpid(), signal.SIGKILL)

    return live(pycomm.init(timeout=20), CASES[name], moment, die)


@pytest.mark.parametrize(
    ("name", "moment"),
    [("averages", "before"), ("int8, DiLoCo", "within"), ("top-k, error reset", "after")],
)
def test_survivors_of_kills_go_on(name, moment):
    with helpers.Ranks(3, live_until_killed, name, moment) as ranks:
        one, other = ranks.wait_for([0, 2])
        assert one.error is None, one.trace
        assert other.error is None, other.trace
        victim = pickle.loads(Path(f"{ranks.store}.victim").read_bytes())
    check({0: one.value, VICTIM: victim, 2: other.value}, CASES[name], moment)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_has_all_means_does_not_go_on_alone(world, name):
    """Another rank has failed, so neither takes the outer step; both repeat it."""
    both = threading.Barrier(2)

    def body(group):
        trainee = Trainee(group, options=CASES[name])
        state, comm = trainee.state, trainee.state._differences
        trainee.run(range(3))
        finish = comm.finish

        def finish_and_fail():
            finish()
            both.wait()
            if group.rank:
                group.abort()
                raise pycomm.Aborted("on purpose")

        comm.finish = finish_and_fail
        residuals = [tensor.clone() for tensor in comm.tensors()]
        trainee.optimizer.zero_grad()
        trainee.backward(3)
        trainee.optimizer.step()
        before = trainee.weights()
        with pytest.raises(pycomm.Aborted):
            state.step()
        comm.finish = finish
        assert wrapped.same(trainee.weights(), before)
        assert all(map(torch.equal, comm.tensors(), residuals))
        trainee.model.regroup(group.shrink())
        return trainee.weights()

    def untouched(group):
        trainee = Trainee(group, options=CASES[name])
        return trainee.run(range(4))[-1].after

    failed, wanted = world(2).run(body), world(2).run(untouched)
    assert all(map(wrapped.same, failed, wanted))


def check_survivors(*lives):
    """The first exchange of both that are left, beside the golden model."""
    outer = golden_local_sgd.Outer(2, ddp.first_elements(ddp.Given()), 0.7, 0.9)
    outer.last = {name: weights.numpy().ravel() for name, weights in lives[0][0].items()}
    moments = [moment for _, moment in lives]
    expected = outer.exchange([moment.before for moment in moments])
    for moment, wanted in zip(moments, expected, strict=True):
        assert wrapped.same(moment.after, wanted)


def test_ranks_that_had_come_less_far_count_the_same_steps(world):
    """They take part in the next exchange with what they have changed."""
    both = threading.Barrier(2)

    def body(group):
        trainee = Trainee(group, options={"period": 4, **DILOCO})
        began = trainee.weights()
        trainee.run(range(group.rank + 1))
        if group.rank == VICTIM:
            group.close()
            return None
        both.wait()
        trainee.model.regroup(group.shrink())
        assert trainee.state.steps == 3
        moment = trainee.step(3)
        assert moment.exchanged
        return began, moment

    check_survivors(*world(3).run(body)[::2])


def test_an_exchange_by_hand_that_has_failed_is_repeated(world):
    """Also if another rank did not come to it; and only once."""

    def body(group):
        trainee = Trainee(group, options={"period": 4, **DILOCO})
        began = trainee.weights()
        trainee.run(range(2))
        assert group.should_commit()
        if group.rank == VICTIM:
            group.close()
            return None
        before = trainee.weights()
        if group.rank == 0:
            with pytest.raises(pycomm.CollectiveError):
                trainee.state.exchange()
        smaller = group.shrink()
        trainee.model.regroup(smaller)
        moment = averaging.Moment(before, trainee.weights(), {}, True)
        trainee.model.regroup(smaller)
        assert (trainee.state.agreements, trainee.state.steps) == (1, 2)
        return began, moment

    check_survivors(*world(3).run(body)[::2])


def test_a_group_may_fail_again_in_the_exchange_of_regroup(world):
    def body(group):
        trainee = Trainee(group, options={"period": 1, **DILOCO})
        if group.rank == 1:
            group.close()
            return None
        with pytest.raises(pycomm.PeerDied):
            trainee.step(0)
        before = trainee.weights()
        smaller = group.shrink()
        if group.rank == 2:
            exchange = trainee.state.exchange

            def close_first():
                smaller.close()
                exchange()

            trainee.state.exchange = close_first
            with pytest.raises(pycomm.GroupUnusable):
                trainee.model.regroup(smaller)
            return None
        with pytest.raises(pycomm.PeerDied):
            trainee.model.regroup(smaller)
        assert wrapped.same(trainee.weights(), before)
        trainee.model.regroup(smaller.shrink())
        stats = trainee.state.stats()
        return stats["changes_lost"], trainee.state.agreements, before, trainee.weights()

    lost, agreements, before, after = world(3).run(body)[0]
    assert (lost, agreements) == (2, 1)
    outer = golden_local_sgd.Outer(1, ddp.first_elements(ddp.Given()), 0.7, 0.9)
    outer.last = {n: torch.zeros_like(w).numpy().ravel() for n, w in before.items()}
    assert wrapped.same(after, outer.exchange([before])[0])


# The warm-up, and steps that are not taken.


class Counting(nn.Module):
    """A model with a buffer of each rank's own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.linear(x)


def test_buffers_come_from_the_first_rank_that_is_left(world):
    stepped = threading.Barrier(3)

    def body(group):
        trainee = Trainee(group, module=Counting(), options={"period": 4})
        trainee.step(0)
        stepped.wait(30)  # or rank 0 could leave while a slower one still receives its buffers
        trainee.module.seen.fill_(group.rank)
        if group.rank == 0:
            group.close()
            return None
        with pytest.raises(pycomm.PeerDied):
            group.should_commit()
        trainee.model.regroup(group.shrink())
        trainee.step(1)
        return trainee.module.seen.item()

    assert world(3).run(body) == [None, 1.0, 1.0]


def test_when_it_may_not_be_called(world):
    (group,) = world(1).groups
    trainee = Trainee(group, options={"period": 3, **DILOCO})
    trainee.run(range(2))
    with trainee.model.join(), pytest.raises(ValueError, match="outside of join"):
        trainee.model.regroup(group)
    with (
        trainee.state.outer_parameters(),
        pytest.raises(RuntimeError, match="outer_parameters"),
    ):
        trainee.state.regroup(group)
    with pytest.raises(TypeError, match="group"):
        trainee.state.regroup("smaller")
    with world(1) as other:
        inner = Trainee(group, options={"period": 3, "inner_group": other.groups[0]})
        with pytest.raises(ValueError, match="inner_group"):
            inner.state.regroup(group)
