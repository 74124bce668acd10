"""In-step recovery: every survivor gets the same bits, wherever ranks fail or are lost."""

import pickle
import threading
import time

import pytest
import recovering
import sweep
import torch

import pycomm
from pycomm import recovery


@pytest.mark.parametrize("seed", range(8))
def test_survivors_agree_after_random_kills(seed):
    world = recovering.run_world(seed)
    assert recovering.complaints(world) == [], world


class LostRankError(Exception):
    """Ends a rank in a test."""


class Faults:
    """Makes ranks fail at the n-th event of an operation: one of its collectives, or a decision.

    A rank is "lost before" an event, or it "fails in" one, with garbage in its tensor; or it "fails
    last", when the others have got what they needed, as far as they will within `patience` seconds.
    """

    def __init__(self, monkeypatch, faults, patience=0.02):
        self.faults = faults  # (rank, event) -> what happens
        self.patience = patience
        self.done = set()
        self.here = threading.local()
        self.happened = []
        self.launch, self.should_commit = recovery.launch, pycomm.Group.should_commit
        monkeypatch.setattr(recovery, "launch", self.faulty_launch)
        monkeypatch.setattr(pycomm.Group, "should_commit", lambda g: self.faulty_decision(g))

    def begin(self, rank):
        self.here.rank, self.here.event = rank, -1

    def next_fault(self):
        self.here.event += 1
        place = self.here.rank, self.here.event
        what = self.faults.get(place)
        if what is not None:
            self.happened.append(place)
        if what == "lost before":
            raise LostRankError
        return what

    def fail(self, group):
        group.abort()
        raise pycomm.Aborted("on purpose")

    def wait_for_others(self):
        end = time.monotonic() + self.patience
        wanted = {(rank, self.here.event) for rank in range(3)}
        while not wanted <= self.done and time.monotonic() < end:
            time.sleep(0.0005)

    def faulty_launch(self, group, collective, source, result, *rest, **options):
        fault = self.next_fault()
        answer = self.launch(group, collective, source, result, *rest, **options)
        self.done.add((self.here.rank, self.here.event))
        if fault in ("fails in", "fails last"):
            if fault == "fails last":
                self.wait_for_others()
            if collective != "broadcast" or options["root"] != group.rank:
                result.fill_(-7)
            self.fail(group)
        return answer

    def faulty_decision(self, group):
        if self.next_fault() is not None:
            self.fail(group)
        return self.should_commit(group)


def run_with(faults, size, begin):
    """The survivors' results of one operation: values, refusals, or None for lost ranks."""

    def body(group):
        faults.begin(group.rank)
        survivor = recovering.Survivor(group)
        try:
            result = begin(survivor)
        except LostRankError:
            survivor.group.close()
            return None
        except pycomm.NotRecoverable as error:
            return str(error)
        assert (result == result[0]).all()
        return int(result[0])

    with pycomm.LocalWorld(size, timeout=20) as world:
        return world.run(body)


def reduce(survivor):
    x = torch.full((5000,), 2.0**survivor.group.rank)
    return survivor.run(lambda g: pycomm.all_reduce(x, group=g, preserve=True))


def reduce_apart(survivor):
    x = torch.full((5000,), 2.0**survivor.group.rank)
    out = torch.empty(5000)
    result = survivor.run(lambda g: pycomm.all_reduce(x, out=out, group=g, preserve=True))
    assert result is out
    return out


def send_around(survivor):
    x = torch.full((5000,), 2.0**survivor.group.rank)
    return survivor.run(lambda g: pycomm.broadcast(x, 1, group=g, preserve=True))


EVENTS = range(7)


@pytest.mark.parametrize(
    ("begin", "event"), sweep.a_third_of([reduce, reduce_apart, send_around], EVENTS)
)
def test_wherever_ranks_fail(monkeypatch, begin, event):
    met = 0
    for other in EVENTS:
        for second in ("lost before", "fails in"):
            for ranks in ((0, 1), (1, 2)):
                plan = {(ranks[0], event): "fails last", (ranks[1], other): second}
                faults = Faults(monkeypatch, plan)
                seen = run_with(faults, 3, begin)
                monkeypatch.undo()
                met += len(faults.happened)
                left = {rank for rank in range(3) if seen[rank] is not None}
                values = {seen[rank] for rank in left}
                assert len(values) == 1, (plan, seen)
                value = values.pop()
                if begin is send_around:
                    assert value == 2 or ("source" in value and 1 not in left), (plan, seen)
                else:
                    assert value & sum(2**r for r in left) == sum(2**r for r in left), (plan, seen)
    assert met > 0


def test_the_result_of_a_rank_that_has_completed_is_taken(monkeypatch):
    # Rank 0 loses the result, rank 2 ends: the sum of all three is with rank 1.
    plan = {(0, 0): "fails last", (2, 1): "lost before"}
    faults = Faults(monkeypatch, plan, patience=10)
    assert run_with(faults, 3, reduce) == [7, 7, None]


def test_survivors_repeat_the_sum_if_nobody_has_completed_it(monkeypatch):
    faults = Faults(monkeypatch, {(2, 0): "lost before"})
    assert run_with(faults, 3, reduce) == [3, 3, None]


def test_averages_divide_by_the_survivors(world):
    def body(group):
        x = torch.tensor([3.0 * (group.rank + 1)])
        if group.rank == 0:
            return None
        survivor = recovering.Survivor(group)
        return survivor.run(lambda g: pycomm.all_reduce(x, "avg", group=g, preserve=True)).item()

    assert world(3).run(body) == [None, 7.5, 7.5]


def lose_rank_0(group):
    """The error of a preserved all-reduce in which rank 0 does not take part, and its tensors."""
    x, out = torch.full((100,), 2.0**group.rank), torch.empty(100)
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(x, out=out, group=group, preserve=True)
    return caught.value, x, out


def test_a_changed_contribution_is_not_taken(world):
    def body(group):
        if group.rank == 0:
            return
        error, x, _ = lose_rank_0(group)
        if group.rank == 2:
            x.add_(1)
        smaller = group.shrink()
        with pytest.raises(pycomm.NotRecoverable, match="has been changed since"):
            pycomm.recover(error, group=smaller)
        assert pycomm.all_reduce(torch.ones(1), group=smaller).item() == 2

    world(3).run(body)


def test_all_ranks_refuse_if_one_failed_elsewhere(world):
    def body(group):
        if group.rank == 0:
            return
        if group.rank == 1:
            error, _, _ = lose_rank_0(group)
        else:
            with pytest.raises(pycomm.PeerDied) as caught:
                pycomm.all_reduce(torch.ones(1), group=group)
            error = caught.value
        smaller = group.shrink()
        with pytest.raises(pycomm.NotRecoverable, match=r"rank 1 of the smaller .* preserve=True"):
            pycomm.recover(error, group=smaller)
        assert pycomm.all_reduce(torch.ones(1), group=smaller).item() == 2

    # Rank 2 comes when the operation has failed, so it does not announce another one.
    failed = threading.Event()

    def in_turn(group):
        if group.rank == 2:
            failed.wait(10)
        elif group.rank == 0:
            failed.set()
        body(group)

    world(3).run(in_turn)


def test_different_operations_are_not_mixed(world):
    def body(group):
        x = torch.ones(10)
        if group.rank == 0:
            group.abort()
        with pytest.raises(pycomm.CollectiveError) as caught:
            pycomm.broadcast(x, group.rank, group=group, preserve=True)
        smaller = group.shrink()
        with pytest.raises(pycomm.NotRecoverable, match="different operations"):
            pycomm.recover(caught.value, group=smaller)

    world(2).run(body)


def test_the_group_must_be_a_successor(world):
    def body(group):
        if group.rank == 0:
            return
        error, x, out = lose_rank_0(group)
        for bad in (group, world(1).groups[0].shrink()):
            with pytest.raises(ValueError, match=r"group must come from shrink\(\)"):
                pycomm.recover(error, group=bad)
        with pytest.raises(TypeError, match="failed must be an error"):
            pycomm.recover(KeyError("x"), group=group)
        copy = pickle.loads(pickle.dumps(error))  # without tensors
        assert (copy.rank, copy.sequence) == (0, 1)
        smaller = group.shrink()
        assert pycomm.recover(error, group=smaller) is out
        assert pycomm.recover(error, group=smaller) is out  # once more changes nothing
        assert (out == 6).all()
        assert (x == 2.0**group.rank).all()

    world(3).run(body)


def test_a_work_is_recovered_without_having_been_waited_for(world):
    def body(group):
        tensors = [torch.full((1000,), 2.0**group.rank) for _ in range(3)]
        first = pycomm.all_reduce(tensors[0], group=group, preserve=True, async_op=True)
        first.wait()
        first.wait()
        if group.rank == 1:
            return None
        others = [
            pycomm.all_reduce(y, group=group, preserve=True, async_op=True) for y in tensors[1:]
        ]
        smaller = group.shrink()
        for work, tensor in zip([first, *others], tensors, strict=True):
            assert pycomm.recover(work, group=smaller) is tensor
            work.wait()
        return [int(y[0]) for y in tensors]

    assert world(3).run(body) == [[7, 5, 5], None, [7, 5, 5]]


def test_what_cannot_be_preserved_says_so(world):
    spanning = world(4, nodes=[2, 2]).groups[0]
    for call in (pycomm.all_reduce, pycomm.broadcast):
        with pytest.raises(
            ValueError, match="preserve must be False for threads with simulated nodes"
        ):
            call(torch.ones(1), group=spanning, preserve=True)


def test_tensors_of_all_kinds(world):
    def body(group):
        if group.rank == 0:
            return
        survivor = recovering.Survivor(group)
        strided = torch.full((8, 6), 2.0**group.rank)
        array = torch.full((5,), 2.0**group.rank).numpy()
        half = torch.full((7,), 2**group.rank, dtype=torch.bfloat16)
        for given in (strided.t(), array, half, torch.empty(0), strided[:, 1]):
            result = survivor.run(lambda g, x=given: pycomm.all_reduce(x, group=g, preserve=True))
            assert result is given
        assert (array == 6).all()
        assert (half == 6).all()
        assert (strided[:, 0] == 6).all()
        assert (strided[:, 1] == 12).all()

    world(3).run(body)
