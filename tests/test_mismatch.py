"""Disagreement: every rank raises Mismatch and shows both sides; then the group is done for."""

import helpers
import pytest
import torch

import pycomm

# What most ranks call, what one calls instead, and what of each must be in the message.
DISAGREEMENTS = {
    "count": ("sum(8)", "sum(9)", "8 elements", "9 elements"),
    "dtype": ("sum(8)", "sum(8, torch.float16)", "float32", "float16"),
    "op": ("sum(8)", "all_reduce(8, 'max')", "op=sum", "op=max"),
    "algorithm": ("ring(8)", "tree(8)", "algorithm=ring", "algorithm=tree"),
    "auto and ring": ("sum(8)", "ring(8)", "algorithm=one_shot", "algorithm=ring"),
    "src": ("broadcast(8, 0)", "broadcast(8, 1)", "src=0", "src=1"),
    "operation": ("sum(8)", "broadcast(8, 0)", "all_reduce(", "broadcast("),
    "barrier": ("sum(8)", "barrier()", "all_reduce(", "barrier("),
    "blocks": ("gather(8)", "gather(4)", "8 elements", "4 elements"),
    "scattered op": ("scatter(8, 'min')", "scatter(8, 'sum')", "op=min", "op=sum"),
    "gather and scatter": ("gather(8)", "scatter(8, 'sum')", "all_gather(", "reduce_scatter("),
    "large count": ("two_shot(700_001)", "two_shot(700_000)", "700001", "700000"),
}


def calls(group, in_window):
    """The vocabulary of the table above."""

    def tensor(n, dtype=torch.float32):
        return (group.empty(n, dtype=dtype) if in_window else torch.empty(n, dtype=dtype)).fill_(1)

    def all_reduce(n, op="sum", dtype=torch.float32, algorithm="auto"):
        pycomm.all_reduce(tensor(n, dtype), op, algorithm=algorithm, group=group)

    return {
        "torch": torch,
        "all_reduce": all_reduce,
        "sum": lambda n, dtype=torch.float32: all_reduce(n, "sum", dtype),
        "ring": lambda n: all_reduce(n, algorithm="ring"),
        "tree": lambda n: all_reduce(n, algorithm="tree"),
        "two_shot": lambda n: all_reduce(n, algorithm="two_shot"),
        "broadcast": lambda n, src: pycomm.broadcast(tensor(n), src, group=group),
        "barrier": lambda: pycomm.barrier(group=group),
        "gather": lambda n: pycomm.all_gather(tensor(n * group.size), tensor(n), group=group),
        "scatter": lambda n, op: pycomm.reduce_scatter(
            tensor(n), tensor(n * group.size), op, group=group
        ),
    }


def disagree(group, usual, odd, odd_rank, in_window):
    """A good operation, a bad one, and one more; the errors of the last two."""
    known = calls(group, in_window)
    known["sum"](8)
    error = None
    try:
        eval(odd if group.rank == odd_rank else usual, known)
    except pycomm.CollectiveError as caught:
        error = caught
    try:
        known["barrier"]()
    except pycomm.GroupUnusable as refused:
        return error, str(refused)
    return error, "still usable"


def check(errors, name, odd_rank):
    _, _, usual_words, odd_words = DISAGREEMENTS[name]
    for error, refusal in errors:
        assert type(error) is pycomm.Mismatch, error
        message = str(error)
        assert usual_words in message, message
        assert odd_words in message, message
        assert f"rank {odd_rank}" in message, message
        assert error.sequence == 2
        assert message in refusal
    assert len({(str(error), error.rank, error.pid) for error, _ in errors}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_threads(world, name, size):
    usual, odd, *_ = DISAGREEMENTS[name]
    for in_window in (False, True):
        for odd_rank in range(size):
            local_world = world(size, timeout=20)
            check(local_world.run(disagree, usual, odd, odd_rank, in_window), name, odd_rank)


def disagree_on_everything(rank, size, store, names):
    """A group per disagreement, on one process group: each error leaves room for the next group."""
    helpers.join_world(rank, size, store)
    errors = []
    for name in names:
        with pycomm.init(timeout=20) as group:
            usual, odd, *_ = DISAGREEMENTS[name]
            errors.append(disagree(group, usual, odd, size - 1, False))
    return errors


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes(size):
    by_rank = helpers.run_ranks(size, disagree_on_everything, list(DISAGREEMENTS))
    for name, errors in zip(DISAGREEMENTS, zip(*by_rank, strict=True), strict=True):
        check(errors, name, size - 1)
        assert len({error.pid for error, _ in errors}) == 1


def test_asynchronous_work_raises_it_when_waited_for(world):
    def body(group):
        good = pycomm.all_reduce(torch.ones(4), group=group, async_op=True)
        bad = pycomm.all_reduce(torch.ones(4 + group.rank), group=group, async_op=True)
        # Refused at once, or it shares the failure: whether that has been seen by now is luck.
        with pytest.raises((pycomm.GroupUnusable, pycomm.Mismatch), match="5 elements"):
            pycomm.all_reduce(torch.ones(4), group=group, async_op=True).wait()
        good.wait()
        with pytest.raises(pycomm.Mismatch, match=r"4 elements.*5 elements"):
            bad.wait()

    world(2).run(body)
