"""pycomm.even_batches: what it yields, errors of loaders, and ranks that leave the loop early."""

import os
import signal

import golden
import helpers
import pytest
import torch
from torch.utils.data import DataLoader

import pycomm


class OwnError(Exception):
    pass


class Once:
    """An iterator of 0, 1, ..., `end` - 1 that must not be asked again once it has ended."""

    def __init__(self, end):
        self.next, self.end, self.ended = 0, end, False

    def __iter__(self):
        return self

    def __next__(self):
        assert not self.ended
        self.ended = self.next == self.end
        if self.ended:
            raise StopIteration
        self.next += 1
        return self.next - 1


def raising(number, error=OwnError):
    """Yields `number` batches and raises."""
    yield from range(number)
    raise error


class RaisesAtOnce:
    def __iter__(self):
        raise OwnError


LOADERS = {
    "range": range,
    "generator": lambda count: (number for number in range(count)),
    "iterator": Once,
    "DataLoader": lambda count: DataLoader(range(count), batch_size=None),
}


def outcome_of(group, loader):
    """What the loop yields, or its error; the group must work afterwards."""
    try:
        seen = list(pycomm.even_batches(loader, group))
    except Exception as error:
        seen = error
    check_usable(group)
    return seen


def check_usable(group):
    whole = pycomm.all_reduce(torch.ones(3), group=group)
    assert golden.same_bits(whole, torch.full((3,), float(group.size)))


def expected(batches, rank):
    own = batches[rank]
    return [(min(n, own - 1), 1.0 if n < own else 0.0) for n in range(max(batches))]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("batches", [[1, 5], [5, 1], [2, 2], [4], [1, 3, 2, 3]], ids=str)
def test_batches_and_weights(world, batches, kind):
    size = len(batches)
    nodes = [2, 2] if size == 4 else None

    def body(group):
        return [outcome_of(group, LOADERS[kind](batches[group.rank])) for _ in range(2)]

    for rank, seen in enumerate(world(size, nodes=nodes).run(body)):
        assert seen == [expected(batches, rank)] * 2


def test_the_default_device_does_not_matter(world):
    def body(group):
        with torch.device("meta"):
            return list(pycomm.even_batches(range(1 + group.rank), group))

    for rank, seen in enumerate(world(2).run(body)):
        assert seen == expected([1, 2], rank)


def test_a_repeated_batch_is_the_same_object(world):
    def body(group):
        own = [object() for _ in range(1 + group.rank)]
        return own, [batch for batch, _ in pycomm.even_batches(own, group)]

    (own, seen), _ = world(2).run(body)
    assert seen[0] is seen[1] is own[0]


def in_default_group(group, batches):
    assert pycomm.default_group() is group
    return list(pycomm.even_batches(range(batches[group.rank])))


def test_the_default_group_of_processes():
    batches = [2, 1, 3]
    runs = helpers.run_group(3, in_default_group, batches)
    assert runs == [expected(batches, rank) for rank in range(3)]


def test_what_is_no_group_is_refused_by_the_call():
    with pytest.raises(TypeError, match=r"group must be a pycomm\.Group or None, got 3"):
        pycomm.even_batches([1], 3)


# Loaders that are empty or raise.


@pytest.mark.parametrize(
    ("batches", "without"), [([0, 3], [0]), ([2, 0, 0], [1, 2]), ([0, 0], [0, 1]), ([0], [0])]
)
def test_ranks_without_any_batch(world, batches, without):
    size = len(batches)
    for error in world(size).run(lambda group: outcome_of(group, range(batches[group.rank]))):
        assert isinstance(error, ValueError)
        assert str(error).endswith(f"got none on ranks {without} of {size}")


@pytest.mark.parametrize(
    "loader",
    [RaisesAtOnce(), raising(0), raising(1), raising(4)],
    ids=["iter", "first", "second", "last"],
)
def test_a_loader_raises(world, loader):
    """Ranks with and without batches raise at once, and the group works on."""

    def body(group):
        return outcome_of(group, loader if group.rank == 1 else range([2, 0, 6][group.rank]))

    first, own, third = world(3).run(body)
    assert isinstance(own, OwnError)
    for error in (first, third):
        assert isinstance(error, RuntimeError)
        assert str(error) == "loader has raised an error on ranks [1] of 3"


def test_two_loaders_raise(world):
    def body(group):
        return outcome_of(group, range(3) if group.rank == 1 else raising(2))

    first, other, third = world(3).run(body)
    assert isinstance(first, OwnError)
    assert isinstance(third, OwnError)
    assert str(other) == "loader has raised an error on ranks [0, 2] of 3"


def test_a_loader_raises_in_a_group_that_has_failed(world):
    """The rank learns of its loader's error."""

    def body(group):
        group.abort()
        with pytest.raises(OwnError):
            next(iter(pycomm.even_batches(raising(0), group)))

    world(2).run(body)


# Ranks that leave a loop early.


def test_all_ranks_leave_a_loop_early(world):
    """No state is left, and no batch was taken from a loader without being yielded."""
    batches = [2, 5, 7]

    def body(group):
        own, seen = Once(batches[group.rank]), []
        for pair in pycomm.even_batches(own, group):
            seen.append(pair)
            if len(seen) == 2:
                break
        check_usable(group)
        assert own.next == 2
        return seen, outcome_of(group, [9] if group.rank == 0 else own)

    runs = world(3).run(body)
    assert [seen for seen, _ in runs] == [[(0, 1.0), (1, 1.0)]] * 3
    assert runs[0][1] == [(9, 1.0)] + [(9, 0.0)] * 4
    assert runs[1][1] == [(2, 1.0), (3, 1.0), (4, 1.0), (4, 0.0), (4, 0.0)]
    assert runs[2][1] == [(number, 1.0) for number in range(2, 7)]


def leave_early(group, rank, then):
    """One rank leaves after two batches."""
    for number, _ in pycomm.even_batches(range(4), group):
        if (group.rank, number) == (rank, 1):
            return then(group)
    return None


def test_a_rank_that_begins_another_loop(world):
    """All ranks raise, and the group works on."""

    def body(group):
        with pytest.raises(RuntimeError, match=r"different loops .* at batches 0 and 2: leave"):
            leave_early(group, 1, lambda group: list(pycomm.even_batches(range(9), group)))
        check_usable(group)

    world(3).run(body)


def test_a_rank_that_leaves_a_loop_for_another_operation(world):
    def body(group):
        with pytest.raises(pycomm.Mismatch):
            leave_early(group, 1, lambda group: pycomm.all_reduce(torch.ones(3), group=group))

    world(3).run(body)


def test_a_rank_that_leaves_a_loop_and_ends(world):
    def body(group):
        if group.rank == 1:
            return leave_early(group, 1, lambda _: None)
        with pytest.raises(pycomm.PeerDied) as caught:
            leave_early(group, 1, None)
        assert caught.value.rank == 1
        return None

    world(3).run(body)


def killed_in_a_loop(group):
    def loader():
        yield 0
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from range([0, 9, 9][group.rank])

    return list(pycomm.even_batches(loader(), group))


def test_a_killed_rank():
    """A rank without batches learns of it, too."""
    with helpers.Ranks(3, helpers.in_group, killed_in_a_loop, {"timeout": 30}) as ranks:
        for outcome in ranks.wait_for([0, 1]):
            assert type(outcome.error).__name__ == "PeerDied", outcome
            assert outcome.error.rank == 2
