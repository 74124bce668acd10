"""Local SGD goes on with the ranks that are left when some were lost in the warm-up."""

import threading

import pytest
import wrapped
from averaging import DILOCO, Trainee

import pycomm

VICTIM = 1


def test_a_step_of_the_warm_up_is_taken_by_all_or_by_none(world):
    def body(group):
        trainee = Trainee(group, options={"period": 2, "gradient_steps": 2})
        trainee.step(0)
        trainee.optimizer.zero_grad()
        trainee.backward(1)
        assert not trainee.model.should_commit(ready=group.rank != 1)
        trainee.step(1)
        trainee.optimizer.zero_grad()
        trainee.backward(2)
        own = group.rank != 1
        assert trainee.model.should_commit(own) is own  # without asking anybody
        with pytest.raises(TypeError, match="ready must be"):
            trainee.model.should_commit(1)
        return trainee.state.steps

    assert world(3).run(body) == [2] * 3


def test_a_rank_lost_in_the_warm_up(world):
    def body(group):
        trainee = Trainee(group, options={"period": 2, "gradient_steps": 2, **DILOCO})
        trainee.step(0)
        if group.rank == VICTIM:
            group.close()
            return None
        with pytest.raises(pycomm.PeerDied):
            trainee.step(1)
        trainee.model.regroup(group.shrink())
        moments = trainee.run(range(1, 4))
        assert trainee.state.stats()["changes_lost"] == 0
        return moments

    one, _, other = world(3).run(body)
    for steps in (0, 2):
        assert wrapped.same(one[steps].after, other[steps].after)
    assert [moment.exchanged for moment in one] == [True, False, True]


def test_a_step_of_the_warm_up_that_only_some_took_is_noticed(world):
    both = threading.Barrier(2)

    def body(group):
        trainee = Trainee(group, options={"period": 2, "gradient_steps": 3})
        trainee.step(0)
        trainee.backward(1)
        if group.rank:
            trainee.optimizer.step()
            trainee.state.step()
        both.wait()
        with pytest.raises(RuntimeError, match="only some of them took a step"):
            trainee.model.regroup(group.shrink())

    world(2).run(body)


# What else belongs to it.
