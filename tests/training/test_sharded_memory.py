"""A rank that lacks memory for its shards: all ranks raise, and all can try again."""

import contextlib
import time

import helpers
import pytest
import sharding
from surviving import STEPS, Training, expect

import pycomm


def raise_memory_error(*_, **__):
    raise MemoryError("no memory, the test says")


@contextlib.contextmanager
def lacking_memory(group):
    """Rank 1 lacks memory."""
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(pycomm.Group, "empty", raise_memory_error)
        yield


def lack_memory(group, options):
    with lacking_memory(group), pytest.raises(MemoryError, match="memory"):
        Training(group)
    training = Training(group, replicas=2, **options)
    training.train(group.rank, range(2))
    group.should_commit()
    if group.rank == 2:
        time.sleep(1)  # so that the others leave it out
        return None
    smaller = group.shrink(exclude=[2])
    with lacking_memory(smaller), pytest.raises(MemoryError, match="memory"):
        training.model.regroup(smaller)
    training.model.regroup(smaller)
    training.train(smaller.rank, range(2, STEPS))
    return training.state()


@pytest.mark.parametrize("options", [{}, {"freezes": 1}], ids=str)
def test_a_rank_lacks_memory(options):
    with helpers.Ranks(3, helpers.in_group, lack_memory, {"timeout": 30}, options) as ranks:
        outcomes = ranks.wait_for([0, 1])
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        expected = expect([(0, (0, 1, 2)), (2, (0, 1))], **options)
        assert sharding.difference(expected, outcome.value) is None
